"""What BLIP does as published, and what transformers does with the same weights."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.crossattn import Answer, ImageQA, TextTokenizer

SHORT, LONG = "Is it red?", "what is the color of the large old house near the tree on the left, " * 2
BEHAVIOURS = ("original", "transformers")


@pytest.fixture(scope="module")
def both(folder) -> dict[str, ImageQA]:
    return {behaviour: ImageQA.from_pretrained(folder, behaviour=behaviour) for behaviour in BEHAVIOURS}


@pytest.fixture(scope="module")
def original(both) -> ImageQA:
    return both["original"]


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((120, 77), Image.Resampling.BICUBIC)


def same(one: Answer, other: Answer) -> None:
    assert [text for text, _ in one.top] == [text for text, _ in other.top]
    shares = [torch.tensor([share for _, share in answer.top]) for answer in (one, other)]
    torch.testing.assert_close(*shares, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(one.logs), torch.tensor(other.logs), atol=0, rtol=1e-5)
    torch.testing.assert_close(one.attention.rows(), other.attention.rows(), atol=1e-5, rtol=0)


# Padding


def test_an_answer_does_not_depend_on_a_longer_question_beside_it(original, picture):
    memory = original.look(picture)
    alone, beside = original.ask(memory, SHORT), original.ask(memory, [LONG, SHORT, "dog"])[1]
    same(alone, beside)
    candidates = ["yes", "no", "two dogs", "dog"]
    alone = original.ask(memory, SHORT, candidates=candidates)
    beside = original.ask(memory, [SHORT, LONG], candidates=candidates)[0]
    same(alone, beside)


def test_in_transformers_behaviour_it_does(both, picture):
    qa = both["transformers"]
    memory = qa.look(picture)
    candidates = ["yes", "no", "two dogs", "dog"]
    alone = qa.ask(memory, SHORT, candidates=candidates)
    beside = qa.ask(memory, [SHORT, LONG], candidates=candidates)[0]
    assert max(abs(a - b) for a, b in zip(sorted(alone.logs), sorted(beside.logs), strict=True)) > 0.01


# The text


def test_a_question_begins_with_its_own_token_and_an_answer_with_its(both):
    for behaviour, first in (("original", "[ENC]"), ("transformers", "[CLS]")):
        tokenizer = both[behaviour].tokenizer
        ids = tokenizer(["what", "is it red"], 48).ids
        assert (ids[:, 0] == tokenizer.id(first)).all()
        assert ids[1].tolist()[1:] == [*tokenizer.answers(["is it red"])[0], tokenizer.id("[SEP]")]
        assert both[behaviour].decoder.config.first == tokenizer.id("[DEC]")


def cleaned(question: str) -> str:
    """The authors' clean-up in plain Python."""
    question = re.sub(r'[.!"()*#:;~]', "", question.lower()).rstrip(" ")
    return " ".join(question.split(" ")[:50])


def test_questions_are_cleaned_up_as_the_authors_do(original, pieces):
    plain = TextTokenizer.from_pieces([*pieces, "[DEC]", "[ENC]"], first="[ENC]")
    rng = random.Random(0)
    letters = "abcrt  .!\"()*#:;~?,-'19ÉßＲ\n\t"
    questions = [
        "What is (the) color?! ",
        "U.S. dogs: are there 2; or 3...",
        "it's *red* ~ #1",
        *("dog " * n + "cat..." for n in (48, 49, 50, 51, 60)),
        "dog  " * 30 + "red",
        *(" ".join("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.choice((3, 55)))) + "a"
          for _ in range(200)),
    ]  # fmt: skip
    for question in questions:
        ours = original.tokenizer([question], 1000).ids[0].tolist()
        assert ours == plain([cleaned(question)], 1000).ids[0].tolist(), question


def test_transformers_reads_questions_as_they_are(both, pieces):
    plain = TextTokenizer.from_pieces([*pieces, "[DEC]", "[ENC]"])
    question = "what is it. (red:)!"
    assert torch.equal(both["transformers"].tokenizer([question], 48).ids, plain([question], 48).ids)
    assert (
        both["transformers"].tokenizer([question], 48).ids.shape != both["original"].tokenizer([question], 48).ids.shape
    )


def test_words_are_spelled_as_typed(original, picture):
    question = 'What "COLOR" is the U.S. dog\'s (old) tree: Réd?..'
    words = original.ask(original.look(picture), question).attention.words
    assert words == ("What", "COLOR", "is", "the", "U.S", "dog", "'", "s", "old", "tree", "Réd", "?")


def test_answers_are_not_cleaned_up(both, tmp_path):
    for behaviour, qa in both.items():
        qa.tokenizer.save(tmp_path / f"{behaviour}.json")
        for tokenizer in (qa.tokenizer, TextTokenizer.from_file(tmp_path / f"{behaviour}.json")):
            dot, colon = tokenizer.id("."), tokenizer.id(":")
            assert tokenizer.answers(["no.", "2:3", "No"]) == [
                (tokenizer.id("no"), dot),
                (tokenizer.id("2"), colon, tokenizer.id("3")),
                (tokenizer.id("no"),),
            ]


def test_no_special_token_is_read_in_a_question_or_written_in_an_answer(both):
    for qa in both.values():
        tokenizer = qa.tokenizer
        ids = tokenizer(["is [DEC] it [SEP] red"], 48).ids[0].tolist()
        assert sum(i in (tokenizer.id("[DEC]"), tokenizer.id("[SEP]")) for i in ids) == 1  # its own end
        special = [tokenizer.id(token) for token in ("[PAD]", "[CLS]", "[DEC]", "[ENC]", "[MASK]")]
        assert tokenizer.decode([*special, tokenizer.id("red"), *special]) == "red"


# Numbers


def test_eps_and_what_training_uses_differ(both):
    assert both["original"].config.vit.norm_eps == 1e-6
    assert both["transformers"].config.vit.norm_eps == 1e-5
    for qa in both.values():
        assert qa.config.text.norm_eps == qa.decoder.config.text.norm_eps == 1e-12
        assert {m.eps for m in qa.vit.modules() if isinstance(m, torch.nn.LayerNorm)} == {qa.config.vit.norm_eps}
    trained = [
        (qa.config.vit.drop_path, qa.config.text.dropout, qa.decoder.config.text.dropout) for qa in both.values()
    ]
    assert trained == [(0.1, 0.1, 0.1), (0.0, 0.0, 0.0)]


def test_an_eps_that_transformers_was_told_is_kept(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["layer_norm_eps"] = 3e-5
    (tmp_path / "config.json").write_text(json.dumps(config))
    for behaviour in BEHAVIOURS:
        assert ImageQA.from_pretrained(tmp_path, behaviour=behaviour).config.vit.norm_eps == 3e-5


# Pictures


@pytest.fixture(scope="module")
def published(make_blip, save, tmp_path_factory) -> Path:
    """The published size of pictures, 384 px in 24 x 24 patches."""
    return save(make_blip(image_size=384), tmp_path_factory.mktemp("blip") / "published")


def grid(qa: ImageQA, picture: Image.Image) -> tuple[int, ...]:
    return tuple(qa.ask(qa.look(picture), "what").attention["what"].shape)


def by_hand(picture: Image.Image, side: int) -> Tensor:
    pixels = np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1).float()


def test_pictures_are_squashed_to_480_as_published(published, picture):
    qa = ImageQA.from_pretrained(published)
    torch.testing.assert_close(qa.preprocess(picture)[0], by_hand(picture, 480), atol=1e-6, rtol=0)
    assert grid(qa, picture) == (30, 30)
    assert qa.config.vit.grid == (24, 24)  # the table stays as it is, and is resampled for the picture at hand


def test_pictures_are_squashed_to_384_in_transformers_behaviour(published, picture):
    transformers = pytest.importorskip("transformers")
    qa = ImageQA.from_pretrained(published, behaviour="transformers")
    theirs = transformers.BlipImageProcessor()(picture, return_tensors="pt").pixel_values
    assert (qa.preprocess(picture) - theirs).abs().max() < 0.02  # a level of 255
    assert grid(qa, picture) == (24, 24)
    torch.testing.assert_close(qa.preprocess(picture)[0], by_hand(picture, 384), atol=0.2, rtol=0)


@pytest.mark.parametrize(("asked", "size"), [(96, (96, 96)), ((48, 96), (48, 96))])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_another_size_of_pictures_can_be_asked_for(folder, picture, behaviour, asked, size):
    qa = ImageQA.from_pretrained(folder, behaviour=behaviour, image_size=asked)
    assert qa.preprocess(picture).shape[2:] == size
    assert grid(qa, picture) == (size[0] // 16, size[1] // 16)


def test_the_position_table_is_resampled_as_at_the_authors(blip, folder, images_of):
    qa = ImageQA.from_pretrained(folder, image_size=96)
    table = blip.vision_model.embeddings.position_embedding.detach()[0, 1:].unflatten(0, (4, 4)).permute(2, 0, 1)
    wider = torch.nn.functional.interpolate(table[None], (6, 6), mode="bicubic", align_corners=False)
    zero = torch.zeros(1, 3, 96, 96)
    with torch.no_grad():
        embedded = qa.vit.embed(zero)[0][0, 1:] - qa.vit.tokenizer.proj.bias
    torch.testing.assert_close(embedded, wider[0].flatten(1).t(), atol=1e-5, rtol=0)


def test_what_a_processor_of_theirs_states_is_used(folder, tmp_path, picture):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    said = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": 48, "width": 80},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    theirs = ImageQA.from_pretrained(tmp_path, behaviour="transformers").preprocess
    assert (theirs.size, theirs.mean, theirs.fit) == ((48, 80), (0.1, 0.2, 0.3), "squash")
    ours = ImageQA.from_pretrained(tmp_path).preprocess
    assert (ours.size, ours.mean, ours.resampler) == ((64, 64), (0.1, 0.2, 0.3), "pillow")


# Regard's own passport


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_opened_again_it_gives_the_same_answers_bit_by_bit(
    make_blip, save, tmp_path, picture, behaviour, tied
):
    folder = save(make_blip(tied=tied), tmp_path / "theirs")
    qa = ImageQA.from_pretrained(folder, behaviour=behaviour, image_size=80, answers=["yes", "no"])
    qa.save_pretrained(tmp_path / "ours")
    again = ImageQA.from_pretrained(tmp_path / "ours")
    assert again.config == qa.config
    questions = [LONG, 'What "COLOR" is the (old) dog: Réd...', SHORT]
    for wanted in ({}, {"candidates": ["yes", "no", "two dogs"]}):
        before, after = (m.ask(m.look(picture), questions, **wanted) for m in (qa, again))
        assert before == after
        assert [a.logs for a in before] == [a.logs for a in after]
        for a, b in zip(before, after, strict=True):
            assert a.attention.words == b.attention.words
            assert torch.equal(a.attention.rows(), b.attention.rows())


def test_every_answer_is_one_of_the_candidates_and_shares_sum_to_one(both, picture):
    for qa in both.values():
        answer: Any = qa.ask(qa.look(picture), SHORT, candidates=["yes", "no", "2 dogs"], top=3)
        assert {text for text, _ in answer.top} == {"yes", "no", "2 dogs"}
        assert sum(share for _, share in answer.top) == pytest.approx(1, abs=1e-6)
