import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from regard.crossattn import TextTokenizer
from regard.vit import InputError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
BERT_LIKE = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "cat", "##s", "?"]
EVERYDAY = [
    "What is on the table?",
    "Is the table set? Isn't it?",
    "How many plates are there?",
    "Où est le café?",
    "狗?",
]


def write(path, pieces, newline="\n"):
    path.write_bytes((newline.join(pieces) + newline).encode())
    return path


def read(tokenizer, text, max_tokens=64):
    return tokenizer([text], max_tokens).ids[0].tolist()


def refused(call, *parts):
    """The message of the InputError, which is one line and tells `parts`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for part in parts:
        assert str(part) in message
    return message


# Training


@pytest.mark.parametrize("vocab_size", [20, 40, 8192])
def test_no_piece_stays_untrained(vocab_size):
    tokenizer = TextTokenizer.train(EVERYDAY, vocab_size)
    encoded = tokenizer(EVERYDAY, 200)
    used = set(encoded.ids[encoded.mask].tolist())
    specials = {tokenizer.pad_id, tokenizer.unknown_id}
    assert used | specials == set(range(len(tokenizer)))
    assert tokenizer.unknown_id not in used
    assert encoded.unknown == ((),) * len(EVERYDAY)


def test_training_does_not_depend_on_order_or_chance(questions):
    one, other = TextTokenizer.train(questions), TextTokenizer.train(questions[::-1] * 2)
    for question in questions:
        assert read(one, question) == read(other, question) == read(TextTokenizer.train(questions), question)


def test_a_small_vocabulary_splits_words_a_large_one_keeps_them():
    small, large = TextTokenizer.train(EVERYDAY, 20), TextTokenizer.train(EVERYDAY)
    assert len(read(large, "table")) == 3
    assert len(read(small, "table")) > 3
    assert [w.text for w in small(["Table, plates!"], 64).words[0]] == ["Table", ",", "plates", "!"]


def test_training_needs_a_list_of_questions():
    refused(lambda: TextTokenizer.train([]), "no questions")
    refused(lambda: TextTokenizer.train("What is it?"), "not on one text")


# Encoding


def test_questions_are_padded_at_the_right_and_masked():
    tokenizer = TextTokenizer.train(EVERYDAY)
    encoded = tokenizer(["Is it?", "What is on the table?"], 64)
    assert encoded.ids.shape == encoded.mask.shape == (2, 8)
    assert encoded.mask.sum(dim=1).tolist() == [5, 8]
    assert encoded.ids[0, :5].tolist() == read(tokenizer, "Is it?")
    assert (encoded.ids[0, 5:] == tokenizer.pad_id).all()
    assert encoded.mask.dtype == torch.bool


def test_case_and_accents_do_not_matter():
    tokenizer = TextTokenizer.train(EVERYDAY)
    assert read(tokenizer, "OÙ EST LE CAFE") == read(tokenizer, "ou est le cafe\u0301")


def test_unknown_words_are_reported_as_typed():
    tokenizer = TextTokenizer.train(EVERYDAY)
    encoded = tokenizer(["What is the Zebra 🦓 on?", "What is on the table?", "猫?"], 64)
    assert encoded.unknown == (("Zebra", "🦓"), (), ("猫",))
    assert (encoded.ids == tokenizer.unknown_id).sum() == 3


def test_an_answer_carries_the_unknown_words(make_qa, picture):
    qa = make_qa()
    known, unknown = qa.ask(qa.look(picture(0)), ["Is it asleep?", "Is it a Quokka?"])
    assert known.unknown == ()
    assert unknown.unknown == ("a", "Quokka")


@pytest.mark.parametrize("question", ["", " ", "\n\t ", "\u00a0", "\u200b", "\x00", "\ufeff"])
def test_a_question_without_a_word_is_refused(question):
    tokenizer = TextTokenizer.train(EVERYDAY)
    refused(lambda: tokenizer(["What?", question], 64), "question 2 is empty")


def test_what_is_no_text_is_refused():
    tokenizer = TextTokenizer.train(EVERYDAY)
    refused(lambda: tokenizer(["What?", None], 64), "question 2 is no text but NoneType")
    refused(lambda: tokenizer(["\ud83d what?"], 64), "question 1", "surrogate")


@pytest.mark.parametrize("gap", [" ", "\n", "\r\n"])
def test_a_question_of_ten_thousand_words_is_refused_in_one_line(gap):
    tokenizer = TextTokenizer.train(EVERYDAY)
    refused(lambda: tokenizer(["What?", gap.join(["table"] * 10_000)], 64), "question 2", "10002 tokens", "at most 64")


def test_the_longest_question_works_and_one_token_more_does_not(make_qa, picture):
    qa = make_qa(text=dict(max_tokens=20))
    memory = qa.look(picture(0))
    answer = qa.ask(memory, "car " * 18)
    assert len(answer.attention.words) == 18
    assert answer.attention.map(17).shape == (3, 5)
    refused(lambda: qa.ask(memory, "car " * 19), "21 tokens", "at most 20")


def test_a_word_of_a_thousand_letters_is_one_unknown_word():
    tokenizer = TextTokenizer.train(EVERYDAY)
    word = "t" * 1000
    assert tokenizer([f"What is {word}?"], 64).unknown == ((word,),)


# Files


def test_a_bert_vocabulary_gives_each_line_its_number(tmp_path):
    tokenizer = TextTokenizer.from_file(write(tmp_path / "vocab.txt", BERT_LIKE))
    assert len(tokenizer) == 12
    assert (tokenizer.pad_id, tokenizer.unknown_id) == (0, 2)
    assert read(tokenizer, "What is the CATS? dogs") == [3, 6, 7, 8, 9, 10, 11, 2, 4]
    assert tokenizer(["What, cats dogs?"], 64).unknown == ((",", "dogs"),)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x1c"])
def test_a_vocabulary_has_one_piece_a_line_whatever_the_piece(tmp_path, newline, separator):
    pieces = [*BERT_LIKE[:6], f"a{separator}b", *BERT_LIKE[6:]]
    tokenizer = TextTokenizer.from_file(write(tmp_path / "vocab.txt", pieces, newline))
    assert len(tokenizer) == 13
    assert read(tokenizer, "what?") == [3, 7, 12, 4]


@pytest.mark.parametrize("name", ["tokenizer.json", "other.json"])
def test_saving_and_loading_changes_nothing(tmp_path, name):
    trained = TextTokenizer.train(EVERYDAY, 40)
    from_vocabulary = TextTokenizer.from_file(write(tmp_path / "vocab.txt", BERT_LIKE))
    for tokenizer in (trained, from_vocabulary):
        tokenizer.save(tmp_path / name)
        loaded = TextTokenizer.from_file(tmp_path / name)
        assert len(loaded) == len(tokenizer)
        assert (loaded.pad_id, loaded.unknown_id) == (tokenizer.pad_id, tokenizer.unknown_id)
        for texts in (EVERYDAY, ["What are cats? Don't, 狗!"]):
            a, b = tokenizer(texts, 200), loaded(texts, 200)
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.mask, b.mask)
            assert (a.words, a.unknown) == (b.words, b.unknown)
        assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_padding_and_truncation_of_a_foreign_file_are_not_obeyed(tmp_path):
    tokenizer = TextTokenizer.train(EVERYDAY)
    tokenizer.save(tmp_path / "tokenizer.json")
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = TextTokenizer.from_file(tmp_path / "tokenizer.json")
    assert torch.equal(loaded(EVERYDAY, 64).ids, tokenizer(EVERYDAY, 64).ids)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path, name):
    refused(lambda: TextTokenizer.from_file(tmp_path / name), tmp_path / name, "no such")
    (tmp_path / name).mkdir()
    refused(lambda: TextTokenizer.from_file(tmp_path / name), tmp_path / name)


@pytest.mark.parametrize("missing", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path, missing):
    path = write(tmp_path / "vocab.txt", [p for p in BERT_LIKE if p != missing])
    refused(lambda: TextTokenizer.from_file(path), path, missing)


def test_a_vocabulary_with_a_piece_twice_is_refused(tmp_path):
    path = write(tmp_path / "vocab.txt", [*BERT_LIKE, "cat", "dog"])
    refused(lambda: TextTokenizer.from_file(path), path, "line 13", "'cat'", "line 10")


@pytest.mark.parametrize("missing", ["[PAD]", "[UNK]"])
def test_a_tokenizer_json_without_padding_or_unknown_is_refused(tmp_path, missing):
    backend = Tokenizer(models.WordLevel({p: n for n, p in enumerate(p for p in SPECIAL if p != missing)}, "[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    refused(lambda: TextTokenizer.from_file(tmp_path / "tokenizer.json"), tmp_path / "tokenizer.json", missing)


def test_a_tokenizer_json_with_gaps_in_its_ids_is_refused(tmp_path):
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "cat": 7}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    refused(lambda: TextTokenizer.from_file(tmp_path / "tokenizer.json"), tmp_path / "tokenizer.json", "ids 0 to 2")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"null", bytes(range(256)), json.dumps({"version": "1.0", "model": None}).encode()],
)
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_broken_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(lambda: TextTokenizer.from_file(tmp_path / name), tmp_path / name)
