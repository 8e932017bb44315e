"""BLIP's numbers against transformers' `BlipForQuestionAnswering` with the same random weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.crossattn import ImageQA
from regard.crossattn.generate import generate
from regard.vit import Tokens


def close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4, and each row within 1e-5 of its own size."""
    assert ours.shape == theirs.shape
    assert theirs.isfinite().all()
    assert (ours - theirs).abs().max() <= 1e-4
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() <= 1e-5, f"{error.max():.2g}"


def sequence(tokens: Tokens) -> Tensor:
    assert tokens.cls is not None
    return torch.cat((tokens.cls[:, None], tokens.patches), dim=1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def blip(request, make_blip) -> Any:
    return make_blip(tied=request.param)


@pytest.fixture(scope="module")
def qa(blip, save, tmp_path_factory) -> ImageQA:
    return ImageQA.from_pretrained(save(blip, tmp_path_factory.mktemp("blip") / "one"), behaviour="transformers")


def test_the_output_is_tied_where_theirs_is(blip, qa):
    head = blip.text_decoder.cls.predictions
    assert qa.decoder.config.tied == (head.decoder.weight is blip.text_decoder.get_input_embeddings().weight)
    assert (qa.decoder.out is None) == qa.decoder.config.tied
    assert torch.equal(qa.decoder.bias, head.decoder.bias)


@pytest.mark.parametrize("size", [(64, 64), (48, 96), (96, 80), (16, 32)])
@torch.no_grad()
def test_image_tokens_are_theirs_at_any_size(blip, qa, images_of, size):
    images = images_of(0, 2, *size)
    theirs = blip.vision_model(images, interpolate_pos_encoding=True).last_hidden_state
    close(sequence(qa.vit(images)), theirs)


@torch.no_grad()
def test_question_states_and_next_token_scores_are_theirs(blip, qa, images_of, questions_of):
    ids, mask = questions_of(1, 6)
    images = images_of(1, 6)
    seen = blip.vision_model(images).last_hidden_state
    asked = blip.text_encoder(ids, attention_mask=mask.long(), encoder_hidden_states=seen).last_hidden_state
    states = qa.read(qa.remember(images), ids, mask)
    close(states, asked)  # on padding too: the decoder reads it in this behaviour
    answers = torch.randint(5, 50, (6, 7), generator=torch.Generator().manual_seed(2))
    answers[:, 0] = qa.decoder.config.first
    kept = qa.decoder.remember(states)
    theirs = blip.text_decoder(answers, encoder_hidden_states=asked).logits
    close(qa.decoder.logits(qa.decoder(answers, kept)), theirs)
    assert theirs.std() > 1  # decisive scores: nothing nearly tied
    # transformers 5.24 loses the mask of the question on the way to the cross-attention: each alone, it needs none.
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        one = slice(row, row + 1)
        theirs = blip.text_decoder(answers[one], encoder_hidden_states=asked[one, :length]).logits
        close(qa.decoder.logits(qa.decoder(answers[one], tuple(kv[one] for kv in kept), mask[one])), theirs)


def trimmed(rows: Tensor, last: int) -> list[tuple[int, ...]]:
    """transformers' rows without what begins, ends and pads them."""
    found = []
    for row in rows[:, 1:].tolist():
        found.append(tuple(row[: row.index(last)] if last in row else row))
    return found


def written(qa: ImageQA, images: Tensor, ids: Tensor, mask: Tensor, **changes: int) -> list[tuple[int, ...]]:
    decoder = qa.decoder
    with torch.inference_mode():
        states = qa.read(qa.remember(images), ids, mask)
        answers = generate(decoder, decoder.remember(states), qa.readable(mask), replace(decoder.config, **changes))
    return [beam[0].ids for beam in answers]


@pytest.mark.parametrize("beams", [1, 3])
def test_fifty_random_questions_are_answered_with_their_token_ids(blip, qa, images_of, questions_of, beams):
    ours, theirs = [], []
    for batch in range(10):
        images = images_of(100 + batch, 5)
        ids, mask = questions_of(100 + batch, 5)
        out = blip.generate(
            input_ids=ids, pixel_values=images, attention_mask=mask.long(), num_beams=beams, max_new_tokens=20
        )
        theirs += trimmed(out, qa.decoder.config.last)
        ours += written(qa, images, ids, mask, beams=beams)
    assert ours == theirs
    assert len(set(theirs)) > 20  # not one answer to everything
    lengths = {len(answer) for answer in theirs}
    assert min(lengths) < 20
    assert len(lengths) > 3


def test_the_beams_find_other_answers_than_the_greedy_search(qa, images_of, questions_of):
    images, (ids, mask) = images_of(100, 5), questions_of(100, 5)
    assert written(qa, images, ids, mask, beams=3) != written(qa, images, ids, mask)


def test_without_settings_the_answers_are_those_of_their_generate(blip, qa, images_of, questions_of):
    images, (ids, mask) = images_of(7, 5), questions_of(7, 5)
    theirs = blip.generate(input_ids=ids, pixel_values=images, attention_mask=mask.long())
    assert written(qa, images, ids, mask) == trimmed(theirs, qa.decoder.config.last)


@pytest.fixture(scope="module")
def base(fill) -> Any:
    """The published size: 361 million parameters, 12 layers of 12 heads, 30524 pieces, 384 px."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BlipConfig(text_config={"num_attention_heads": 12}, vision_config={})
    assert config.vision_config.image_size == 384
    return fill(transformers.BlipForQuestionAnswering(config))


@pytest.mark.slow
@torch.no_grad()
def test_the_published_size_has_their_numbers(base, images_of):
    pieces = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(f"w{i}" for i in range(30522 - len(pieces)))])}
    qa = ImageQA.from_pretrained(base, behaviour="transformers", tokenizer=vocabulary)
    assert (qa.config.text.heads, qa.config.vit.heads, qa.config.vit.norm_eps) == (12, 12, 1e-5)
    assert (qa.decoder.config.first, qa.decoder.config.last, len(qa.tokenizer)) == (30522, 102, 30524)
    assert qa.preprocess.size == (384, 384)
    images = images_of(0, 2, 384, 384)
    ids = torch.tensor([[101, 2054, 3609, 2003, 1996, 4937, 1029, 102], [101, 2129, 2116, 102, 0, 0, 0, 0]])
    seen = base.vision_model(images).last_hidden_state
    close(sequence(qa.vit(images)), seen)
    asked = base.text_encoder(ids, attention_mask=(ids > 0).long(), encoder_hidden_states=seen).last_hidden_state
    states = qa.read(qa.remember(images), ids, ids > 0)
    close(states, asked)
    answers = torch.tensor([[30522, 2417, 4937], [30522, 2176, 1998]])
    theirs = base.text_decoder(answers, encoder_hidden_states=asked).logits
    close(qa.decoder.logits(qa.decoder(answers, qa.decoder.remember(states))), theirs)
    for beams in (1, 3):
        out = base.generate(
            input_ids=ids, pixel_values=images, attention_mask=(ids > 0).long(), num_beams=beams, max_new_tokens=20
        )
        assert written(qa, images, ids, ids > 0, beams=beams) == trimmed(out, 102)
