"""Answers of the decoder's heads through `ask`: what they say, what they do not depend on, their maps, bad input."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.crossattn import answering
from regard.crossattn.generate import Written
from regard.vit import InputError

HEADS = ("vocabulary", "generate", "rank")
DECODER = dict(text=dict(dim=32, depth=2, heads=4, max_tokens=12), beams=3, max_tokens=5)
# Several tokens each, of pieces that the questions taught, one the beginning of another.
CANDIDATES = ("yes", "no", "red", "red house", "two dogs", "left of the old tree", "the green car")


@pytest.fixture(scope="module")
def make(make_qa):
    def build(head="generate", end=3.0, **options):
        decoder = {} if head == "vocabulary" else dict(decoder=DECODER | options.pop("decoder", {}))
        qa = make_qa(head=head, **decoder, **options)
        if qa.decoder is not None:
            qa.decoder.bias.data[qa.decoder.config.last] += end  # answers of several lengths
        return qa

    return build


@pytest.fixture(scope="module")
def qa(make):
    return make("generate")


def close(one, other) -> None:
    """Two answers to one question are the same, their probabilities and maps too."""
    assert one.text == other.text
    assert [text for text, _ in one.top] == [text for text, _ in other.top]
    assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-5)
    assert one.logs == pytest.approx(other.logs, abs=1e-5)
    assert one.meaning == other.meaning
    torch.testing.assert_close(one.attention.rows(), other.attention.rows(), atol=1e-5, rtol=0)
    assert one.written.tokens == other.written.tokens
    torch.testing.assert_close(one.written.rows(), other.written.rows(), atol=1e-5, rtol=0)
    for token in range(len(one.written.tokens)):
        torch.testing.assert_close(one.written.map(token), other.written.map(token), atol=1e-5, rtol=0)


# An answer depends on its own question and picture only

WANTED = [
    *(dict(beams=beams) for beams in range(1, 6)),
    dict(candidates=CANDIDATES),
    dict(candidates=CANDIDATES, normalise_length=True),
    dict(candidates=CANDIDATES, shortlist=3),
]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: " ".join(wanted))
@pytest.mark.parametrize("text", [{}, dict(norm="post", gate=True)], ids=["pre", "post"])
def test_answers_do_not_depend_on_batch_mates_or_order(make, picture, questions, wanted, text):
    qa = make(text=text, decoder=dict(text=DECODER["text"] | text))
    pictures = [picture(seed, *size) for seed, size in enumerate([(24, 40), (16, 48), (40, 24), (8, 72)])]
    alone = [qa.ask(qa.look(p), q, top=7, **wanted) for p, q in zip(pictures, questions, strict=False)]
    assert len({round(answer.logs[0], 2) for answer in alone}) > 2, "questions and pictures must matter"
    for batch in range(1, 5):
        for order in [*itertools.permutations(range(4), batch)][:: max(1, 2 * batch - 3)]:
            memory = qa.look([pictures[i] for i in order])
            for i, answer in zip(order, qa.ask(memory, [questions[i] for i in order], top=7, **wanted), strict=True):
                close(answer, alone[i])
    eight = qa.ask(qa.look(pictures[0]), [*questions, *questions[:2]], top=7, **wanted)
    close(eight[0], alone[0])
    close(eight[6], alone[0])


@pytest.mark.parametrize("wanted", [dict(beams=1), dict(beams=3), dict(candidates=CANDIDATES)], ids=str)
def test_answers_do_not_depend_on_padding(make, picture, monkeypatch, wanted):
    qa = make(text=dict(max_tokens=96))
    memory = qa.look(picture(0))
    short = "Is it red?"
    alone = qa.ask(memory, short, **wanted)
    for padding in (10, 60):
        long = " ".join(["car"] * (len(alone.written.rows()[0, 0, 0]) + padding - 2))
        answers = qa.ask(memory, [long, short], **wanted)
        assert answers[0].written.rows().shape[-1] == alone.written.rows().shape[-1] + padding
        close(answers[1], alone)


def test_a_decoder_that_reads_padding_is_told_apart(make, picture, questions):
    """As transformers' BLIP reads: the maps show what was read, padding included."""
    qa = make(decoder=dict(reads_padding=True))
    memory = qa.look(picture(0))
    alone, longest = qa.ask(memory, "Who?"), max(questions, key=len)
    together = qa.ask(memory, ["Who?", longest])[0]
    assert together.written.rows().shape[-1] > alone.written.rows().shape[-1]
    assert together.logs != pytest.approx(alone.logs, abs=1e-3)
    torch.testing.assert_close(together.written.rows().sum(-1), torch.ones(together.written.rows().shape[:3]))


# What a probability means


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_shares_over_a_closed_list_sum_to_one(make, picture, questions, head, normalise):
    names = CANDIDATES if head != "vocabulary" else ("yes", "left", "red")
    options = {} if head == "vocabulary" else dict(normalise_length=normalise)
    qa = make(head)
    for answer in qa.ask(qa.look(picture(0)), questions, candidates=names, top=99, **options):
        assert {text for text, _ in answer.top} == set(names)
        assert math.fsum(p for _, p in answer.top) == pytest.approx(1, abs=1e-6)
        assert answer.meaning.startswith(f"share among {len(names)} candidates")
        assert answer.probability == answer.top[0][1] == max(p for _, p in answer.top)


def test_shares_follow_from_the_logarithms(qa, picture):
    memory = qa.look(picture(0))
    tokens = dict(zip(CANDIDATES, qa.tokenizer.answers(CANDIDATES), strict=True))
    plain = qa.ask(memory, "Who?", candidates=CANDIDATES, top=99)
    evened = qa.ask(memory, "Who?", candidates=CANDIDATES, top=99, normalise_length=True)
    lengths = {name: len(ids) + 1 for name, ids in tokens.items()}
    for answer, power in ((plain, 0), (evened, 1)):
        logs = dict(zip([text for text, _ in answer.top], answer.logs, strict=True))
        assert logs == pytest.approx(dict(zip([t for t, _ in plain.top], plain.logs, strict=True)), abs=1e-6)
        weights = {name: math.exp(log / lengths[name] ** power) for name, log in logs.items()}
        total = sum(weights.values())
        assert dict(answer.top) == pytest.approx({name: w / total for name, w in weights.items()}, abs=1e-6)
    assert evened.meaning == "share among 7 candidates, by log-probability per token"
    assert dict(plain.top) != pytest.approx(dict(evened.top), abs=1e-3)


def test_a_written_answer_is_ranked_at_what_it_was_written_for(qa, picture, questions):
    memory = qa.look(picture(0))
    ended = 0
    for question in questions:
        written = qa.ask(memory, question, beams=3)
        assert written.probability == pytest.approx(math.exp(written.logs[0]))
        if written.meaning != "the decoder writes exactly this" or not written.text:
            continue
        if qa.tokenizer.answers([written.text])[0] == written.written._read:
            ended += 1
            ranked = qa.ask(memory, question, candidates=[written.text])
            assert ranked.logs[0] == pytest.approx(written.logs[0], abs=1e-5)
            assert ranked.probability == 1
    assert ended


def test_a_shortlist_says_so_and_gives_the_others_nothing(qa, picture):
    answer = qa.ask(qa.look(picture(0)), "Who?", candidates=CANDIDATES, shortlist=3, top=99)
    assert answer.meaning == "share among 7 candidates, 3 of them ranked"
    assert [p > 0 for _, p in answer.top] == [True] * 3 + [False] * 4
    assert math.fsum(p for _, p in answer.top) == pytest.approx(1, abs=1e-6)
    whole = qa.ask(qa.look(picture(0)), "Who?", candidates=CANDIDATES, shortlist=7, top=99)
    assert whole.meaning == "share among 7 candidates"


def test_the_rank_head_chooses_from_the_models_own_list(make, picture, questions):
    qa = make("rank")
    memory = qa.look(picture(0))
    encoded = qa.tokenizer(questions, 64)
    with torch.no_grad():
        logits = qa.logits(memory, encoded.ids, encoded.mask)
    for answer, row in zip(qa.ask(memory, questions), logits.softmax(dim=-1), strict=True):
        assert dict(answer.top) == pytest.approx(dict(zip(qa.config.answers, row.tolist(), strict=True)), abs=1e-5)


def test_every_candidate_is_a_hard_constraint(make, picture, questions):
    for head in HEADS:
        qa = make(head)
        for answer in qa.ask(qa.look(picture(0)), questions, candidates=("no", "two")):
            assert {text for text, _ in answer.top} == {"no", "two"}


# Several ways to write one text


@pytest.fixture
def beam_of(qa, monkeypatch, picture):
    def ask(*beam: Written, **wanted):
        monkeypatch.setattr(answering, "generate", lambda decoder, kept, visible, config: [list(beam)])
        return qa.ask(qa.look(picture(0)), "Who?", **wanted)

    return ask


def test_a_token_that_no_text_shows_makes_another_answer(qa, beam_of):
    ((red,),), first = qa.tokenizer.answers(["red"]), qa.decoder.config.first
    answer = beam_of(Written((red,), -1.0, True), Written((first, red), -2.0, True), Written((red,), -3.0, False))
    assert [text for text, _ in answer.top] == ["red"] * 3
    assert answer.logs == pytest.approx((-1.0, -2.0, -3.0))


def test_tokens_that_spell_one_text_are_one_answer(qa, beam_of, monkeypatch):
    (red,), (two,) = qa.tokenizer.answers(["red", "two"])
    first = qa.decoder.config.first  # stands for a piece that adds nothing to the spelling
    monkeypatch.setattr(type(qa.tokenizer), "is_special", lambda self, number: False)
    answer = beam_of(Written((red,), -1.0, True), Written((two,), -1.5, True), Written((first, red), -2.0, True), top=2)
    assert [text for text, _ in answer.top] == ["red", "two"]
    both = math.exp(-1.0) + math.exp(-2.0)
    assert [p for _, p in answer.top] == pytest.approx([both, math.exp(-1.5)])
    assert answer.logs == pytest.approx((math.log(both), -1.5))
    assert answer.written.tokens == ("red", "[end]")
    assert beam_of(Written((red,), -2000.0, True), Written((first, red), -2000.0, True)).logs == pytest.approx(
        (math.log(2) - 2000,)
    )


def test_the_answer_is_the_searchs_best_even_where_another_is_likelier(qa, beam_of):
    tokens = qa.tokenizer.answers(["red house", "two"])
    answer = beam_of(Written(tokens[0], -2.0, True), Written(tokens[1], -1.5, True))
    assert answer.text == answer.top[0][0] == "red house"
    assert answer.probability == pytest.approx(math.exp(-2))


@pytest.mark.parametrize("wanted", [dict(beams=4), dict(candidates=CANDIDATES)], ids=str)
def test_top_is_how_many_answers_are_told(qa, picture, wanted):
    memory = qa.look(picture(0))
    four = qa.ask(memory, "Who?", top=4, **wanted)
    two = qa.ask(memory, "Who?", top=2, **wanted)
    assert len(four.top) == len(four.logs) == 4
    assert (two.top, two.logs) == (four.top[:2], four.logs[:2])


def test_a_cut_answer_says_so(make, picture):
    qa = make(end=-20.0, decoder=dict(max_tokens=12))  # as many as there are places
    answer = qa.ask(qa.look(picture(0)), "Who?")
    assert answer.meaning == "the decoder begins with exactly this"
    assert len(answer.written.tokens) == 12
    assert answer.written.rows().shape[2] == 12
    assert "[end]" not in answer.written.tokens


# Maps: answer token -> question words -> patches


@pytest.mark.parametrize("wanted", [dict(), dict(candidates=CANDIDATES)], ids=["written", "ranked"])
def test_rows_of_an_answer_are_what_its_decoder_read(qa, picture, questions, wanted):
    for question in questions:
        answer = qa.ask(qa.look(picture(0)), question, **wanted)
        maps = answer.written
        tokens = len(qa.tokenizer(questions=[question], max_tokens=64).ids[0])
        rows = maps.rows()
        assert rows.shape == (2, 4, len(maps.tokens), tokens)
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:3]))
        assert rows.min() >= 0
        assert rows.std(dim=-1).min() > 1e-4


def test_rows_are_a_plain_softmax_of_queries_and_keys(qa, picture):
    """Computed by hand: the decoder reads the answer, and each of its tokens asks the question's states."""
    memory, question = qa.look(picture(0)), "Where is the café?"
    answer = qa.ask(memory, question, candidates=CANDIDATES)
    encoded = qa.tokenizer([question], 64)
    (ids,) = qa.tokenizer.answers([answer.text])
    with torch.no_grad():
        states = qa.read(memory, encoded.ids, encoded.mask)
        decoder, asked = qa.decoder, []
        decoder(torch.tensor([[decoder.config.first, *ids]]), decoder.remember(states), asked=asked)
        for layer, (cross, q) in enumerate(zip(decoder.body.asking, asked, strict=True)):
            k = cross.attn.to_k(states).unflatten(-1, (4, 8)).transpose(1, 2)
            rows = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1)[0]
            torch.testing.assert_close(answer.written.rows()[layer], rows)


def test_maps_are_the_words_maps_in_the_proportion_they_were_read(qa, picture, questions):
    answer = qa.ask(qa.look(picture(0, 40, 24)), questions[0])
    maps, words = answer.written, answer.attention
    rows, grid = maps.rows(), (5, 3)
    of_tokens = words.rows().mean(dim=(0, 1))[:, -15:]  # (T, patches): the grid's, behind the special tokens
    for layer, head in [("mean", "mean"), (0, "mean"), ("mean", 3), (-1, 2)]:
        chosen = rows[[0, 1] if layer == "mean" else [layer]]
        chosen = chosen[:, [0, 1, 2, 3] if head == "mean" else [head]].mean(dim=(0, 1))
        for token in range(len(maps.tokens)):
            by_hand = (chosen[token] @ of_tokens).unflatten(0, grid)
            torch.testing.assert_close(maps.map(token, layer, head), by_hand)
            shares = maps.words(token, layer, head)
            assert list(shares) == list(dict.fromkeys(words.words))
            for number, word in enumerate(words.words):
                if words.words.count(word) == 1:
                    assert shares[word] == pytest.approx(chosen[token, words.places(number)].sum().item(), abs=1e-6)
            ends = chosen[token, [0, -1]].sum().item()
            assert sum(shares.values()) == pytest.approx(1 - ends, abs=1e-5)
        named = dict.fromkeys(maps.tokens)
        for token in named:
            place = maps.tokens.index(token)
            torch.testing.assert_close(maps.map(token, layer, head), maps.map(place, layer, head))


def test_asking_for_maps_changes_no_answer(qa, picture, questions):
    memory = qa.look(picture(0))
    before = qa.ask(memory, questions)
    for answer in before:
        answer.written.map("[end]" if answer.written.tokens[-1] == "[end]" else 0)
    assert qa.ask(memory, questions) == before


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (("zebra",), "no token 'zebra'; its tokens are"),
        ((99,), "token 99 does not exist: the answer has"),
        ((-99,), "token -99 does not exist"),
        ((0, 2), "layer 2 does not exist: choose 0 to 1"),
        ((0, "mean", 4), "head 4 does not exist: choose 0 to 3"),
    ],
    ids=str,
)
def test_maps_of_what_is_not_there_are_refused(qa, picture, where, message):
    answer = qa.ask(qa.look(picture(0)), "Who?")
    with pytest.raises(InputError, match=message):
        answer.written.map(*where)
    with pytest.raises(InputError, match=message):
        answer.written.words(*where)


# Bad input

REFUSED = [
    ("generate", dict(candidates=[]), "candidates is empty; give at least one"),
    ("generate", dict(candidates="yes"), "candidates must be a list of texts"),
    ("generate", dict(candidates=3), "candidates must be a list of texts"),
    ("generate", dict(candidates=["yes", 3]), "candidates holds 3, which is no text"),
    ("generate", dict(candidates=["yes", " "]), "candidate 2 is blank"),
    ("generate", dict(candidates=["yes", "no", "yes"]), "candidate 'yes' is given twice"),
    ("generate", dict(candidates=["yes", "Yes"]), "'yes' and 'Yes' are the same tokens"),
    ("generate", dict(candidates=["no", "red " * 12]), "has 12 tokens, the decoder has places for 11; shorten it"),
    ("generate", dict(candidates=["\u200b"]), "has no token that the tokenizer knows"),
    ("generate", dict(candidates=["a\ud800"]), "candidate 1 holds half a character"),
    ("generate", dict(candidates=["yes"], beams=2), "candidates are ranked"),
    ("generate", dict(candidates=["yes"], max_tokens=2), "candidates are ranked"),
    ("generate", dict(max_tokens=13), "max_tokens is 13; this decoder writes 2 to 12 tokens, the end counted"),
    ("generate", dict(max_tokens=1), "max_tokens is 1; this decoder writes 2 to 12 tokens"),
    ("generate", dict(shortlist=2), "choose among candidates; give candidates"),
    ("generate", dict(normalise_length=True), "choose among candidates; give candidates"),
    ("generate", dict(beams=0), "beams is 0; it must be a whole number, at least 1"),
    ("generate", dict(beams=True), "beams is True"),
    ("generate", dict(top=0), "top is 0"),
    ("generate", dict(top=1.5), "top is 1.5"),
    ("generate", dict(max_tokens=-1), "max_tokens is -1"),
    ("rank", dict(shortlist=0), "shortlist is 0"),
    ("rank", dict(beams=2), "candidates are ranked"),
    ("rank", dict(candidates=[]), "candidates is empty"),
    ("vocabulary", dict(candidates=[]), "candidates is empty"),
    ("vocabulary", dict(candidates=["yes", "perhaps"]), "'perhaps' is no answer of this model; it has yes, no, red"),
    ("vocabulary", dict(candidates=["yes", "yes"]), "'yes' is given twice"),
    ("vocabulary", dict(beams=2), "settings of a decoder; this model scores a list"),
    ("vocabulary", dict(max_tokens=2), "settings of a decoder"),
    ("vocabulary", dict(shortlist=2), "settings of a decoder"),
    ("vocabulary", dict(normalise_length=True), "settings of a decoder"),
]


@pytest.mark.parametrize(("head", "wanted", "message"), REFUSED, ids=str)
def test_settings_that_cannot_work_are_one_line(make, picture, head, wanted, message):
    qa = make(head)
    with pytest.raises(InputError) as caught:
        qa.ask(qa.look(picture(0)), "Who?", **wanted)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted", [dict(), dict(candidates=["yes", "no"]), dict(shortlist=2)], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_half_precision_that_overflows_says_what_to_use(make, picture, head, wanted):
    if "shortlist" in wanted and head != "rank":
        pytest.skip("a shortlist is of candidates")
    qa = make(head)
    with torch.no_grad():
        layer = qa.head if qa.decoder is None else qa.decoder.norm
        layer.weight.mul_(1e5)
    memory = qa.look(picture(0))
    qa.ask(memory, "Who?", **wanted)  # fp32 holds it
    qa, memory = qa.half(), replace(memory.to(torch.float16), fingerprint=None)
    with pytest.raises(InputError, match=r"not finite: float16 ends at 65504.*use torch\.bfloat16 or torch\.float32"):
        qa.ask(memory, "Who?", **wanted)


@pytest.mark.parametrize("head", HEADS)
def test_weights_that_are_not_finite_are_told(make, picture, head):
    qa = make(head)
    memory = qa.look(picture(0))
    with torch.no_grad():
        qa.text.norm.bias[0] = torch.nan
    with pytest.raises(InputError, match=r"the scores are not finite numbers in torch\.float32"):
        qa.ask(replace(memory, fingerprint=None), "Who?")


@pytest.mark.parametrize("head", HEADS)
def test_half_precision_that_holds_answers_as_fp32_does(make, picture, head):
    qa = make(head)
    fine: Tensor = torch.tensor(qa.ask(qa.look(picture(0)), "Who?", candidates=("yes", "no", "two"), top=3).logs)
    qa = qa.to(torch.bfloat16)
    half = qa.ask(qa.look(picture(0)), "Who?", candidates=("yes", "no", "two"), top=3)
    assert torch.isfinite(torch.tensor(half.logs)).all()
    assert sorted(half.logs) == pytest.approx(sorted(fine.tolist()), abs=0.5)
