"""Why an answer: relevance through both sides, against matrices that are all held, in float64."""

import copy

import pytest
import torch

from regard.crossattn import relevance as module
from regard.crossattn.relevance import answer_relevance
from regard.vit.attention import Attention
from regard.vit.errors import InputError

QUESTION = "What animal is left of the red house?"
VARIANTS = {
    "plain": ({}, {}),
    "registers at the end, first token": (dict(registers=2, registers_place="end"), dict(pooling="first")),
    "post norm, gates, qk norm": (dict(registers=1), dict(norm="post", gate=True, qk_norm=True)),
    "asks in every second layer": (dict(class_token=False, pooling="mean"), dict(depth=3, cross_every=2)),
}


def normed(matrix):
    rest = matrix - torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return torch.nan_to_num(rest / rest.sum(-1, keepdim=True), nan=0.0) + torch.eye(len(matrix), dtype=matrix.dtype)


class Eager:
    """Replaces the fused mixing by an explicit A that autograd itself gives a gradient."""

    def __init__(self, monkeypatch):
        self.seen = []

        def mix(attn, q, kv, mask=None):
            a = (q @ kv.k.mT / attn.head_dim**0.5).softmax(-1)
            if not a.requires_grad:
                a.requires_grad_()
            self.seen.append(a)
            return a @ kv.v

        monkeypatch.setattr(Attention, "mix", mix)


def by_hand(qa, image, monkeypatch, answer):
    """R_tt and R_ti by the printed equations, columns in the order class token, registers, patches; the logits too."""
    qa = copy.deepcopy(qa).double()
    with monkeypatch.context() as patch:
        eager = Eager(patch)
        memory = qa.remember(image[None].double())
        encoder = list(eager.seen)
        eager.seen.clear()
        encoded = qa.tokenizer([QUESTION], 64)
        logits = qa.logits(memory, encoded.ids, encoded.mask)
    grads = torch.autograd.grad(logits[0, answer], encoder + eager.seen)
    fused = [(g * a).clamp_min(0).mean(1)[0] for g, a in zip(grads, encoder + eager.seen, strict=True)]
    config, n = qa.config.vit, encoder[0].shape[-1]
    patches = n - config.class_token - config.registers
    order = list(range(n))
    if config.registers_place == "end":
        order = [0, *range(1 + patches, n), *range(1, 1 + patches)]
    r_ii = torch.eye(n, dtype=torch.float64)
    for a in fused[: len(encoder)]:
        r_ii = r_ii + a @ r_ii
    r_ii = normed(r_ii)[order][:, order]
    t = len(encoded.ids[0])
    r_tt, r_ti = torch.eye(t, dtype=torch.float64), torch.zeros(t, n, dtype=torch.float64)
    rest = iter(fused[len(encoder) :])
    for layer in qa.text.layers:
        own = next(rest)
        r_tt, r_ti = r_tt + own @ r_tt, r_ti + own @ r_ti
        if layer.cross is not None:
            r_ti = r_ti + normed(r_tt).T @ next(rest) @ r_ii
    return r_tt.detach(), r_ti.detach(), logits.detach()[0], encoded


@pytest.mark.parametrize("variant", VARIANTS)
def test_patches_and_words_equal_the_printed_equations(make_qa, picture, monkeypatch, variant):
    vit, text = VARIANTS[variant]
    qa, image = make_qa(vit, text).double(), picture(1).double()
    got = answer_relevance(qa, image, QUESTION, "red")
    tt, ti, logits, encoded = by_hand(qa, image, monkeypatch, 2)
    special = qa.config.vit.class_token + qa.config.vit.registers
    assert got.answer == "red"
    assert abs(got.logit - float(logits[2])) < 1e-9
    assert got.words == ("What", "animal", "is", "left", "of", "the", "red", "house", "?")
    assert ti.amax() > 1e-6
    for word, relevance in zip(encoded.words[0], got.patches, strict=True):
        want = ti[list(word.tokens)].mean(0)[special:].unflatten(0, (3, 5))
        torch.testing.assert_close(relevance, want, rtol=0, atol=1e-6)
    row = ti[0] if qa.config.text.pooling == "first" else ti.mean(0)
    words = tt[0] if qa.config.text.pooling == "first" else tt.mean(0)
    torch.testing.assert_close(got.answer_patches, row[special:].unflatten(0, (3, 5)), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.special, row[:special], rtol=0, atol=1e-6)
    each = torch.stack([words[list(word.tokens)].sum() for word in encoded.words[0]])
    torch.testing.assert_close(got.answer_words, each, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_explains_the_answer_that_ask_gives(make_qa, picture, variant):
    vit, text = VARIANTS[variant]
    qa, image = make_qa(vit, text), picture(2, 32, 48)
    got, asked = answer_relevance(qa, image, QUESTION), qa.ask(qa.look(image), QUESTION)
    assert got.answer == asked.text
    assert got.words == asked.attention.words
    assert got.answer_patches.shape == asked.attention.map(0).shape == (4, 6)
    memory, encoded = qa.look(image), qa.tokenizer([QUESTION], 64)
    with torch.no_grad():
        logits = qa.logits(memory, encoded.ids, encoded.mask)[0]
    assert abs(got.logit - float(logits.max())) < 1e-4


def test_gates_that_are_shut_leave_the_picture_without_relevance(make_qa, picture):
    qa = make_qa(text=dict(gate=True), random=False)
    got = answer_relevance(qa, picture(1), QUESTION)
    assert not got.patches.any()
    assert not got.answer_patches.any()
    assert got.answer_words.isfinite().all()


def test_the_model_is_left_as_it_was_whatever_happens(make_qa, picture, monkeypatch):
    qa = make_qa(text=dict(dropout=0.5)).train()
    qa.vit.blocks[0].eval()
    modes = {name: part.training for name, part in qa.named_modules()}
    held = {name: set(vars(part)) for name, part in qa.named_modules()}
    state = {name: tensor.clone() for name, tensor in qa.state_dict().items()}

    def check():
        assert {name: part.training for name, part in qa.named_modules()} == modes
        assert {name: set(vars(part)) for name, part in qa.named_modules()} == held
        assert all(torch.equal(state[name], tensor) for name, tensor in qa.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in qa.parameters())

    image = picture(1)
    first, second = (answer_relevance(qa, image, QUESTION, "no") for _ in range(2))
    assert torch.equal(first.patches, second.patches)  # no dropout
    assert not first.patches.requires_grad
    assert not image.requires_grad
    check()
    with torch.inference_mode():
        assert torch.equal(answer_relevance(qa, image, QUESTION, "no").patches, first.patches)
    monkeypatch.setattr(module, "encoder_decoder", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer_relevance(qa, image, QUESTION)
    check()


def test_frozen_parameters_change_nothing(make_qa, picture):
    qa = make_qa()
    want = answer_relevance(qa, picture(1), QUESTION)
    qa.requires_grad_(False)
    got = answer_relevance(qa, picture(1), QUESTION)
    assert torch.equal(got.patches, want.patches)
    assert not any(p.requires_grad for p in qa.parameters())


@pytest.mark.parametrize(
    ("options", "words"), [(dict(answer="blue"), "no answer 'blue'"), (dict(picture=None), "without a picture")]
)
def test_what_cannot_be_explained_is_told(make_qa, picture, options, words):
    given = dict(picture=picture(1), question=QUESTION) | options
    with pytest.raises(InputError, match=words):
        answer_relevance(make_qa(), **given)
    with pytest.raises(InputError):
        answer_relevance(make_qa(), picture(1), "")


@pytest.mark.parametrize("head", ["generate", "rank"])
def test_with_a_decoder_it_is_the_log_probability_of_writing_the_answer(make_qa, picture, head):
    qa = make_qa(head=head, decoder=dict(text=dict(dim=32, heads=4)))
    told = qa.ask(qa.look(picture(0)), QUESTION, candidates=["red", "two"])
    for text, log in zip((text for text, _ in told.top), told.logs, strict=True):
        found = answer_relevance(qa, picture(0), QUESTION, text)
        assert found.answer == text
        assert found.logit == pytest.approx(log, abs=1e-4)
        assert found.answer_patches.shape == (3, 5)
    red, two = (answer_relevance(qa, picture(0), QUESTION, text).answer_patches for text in ("red", "two"))
    assert not torch.allclose(red, two, rtol=1e-2)
    assert answer_relevance(qa, picture(0), QUESTION).answer == qa.ask(qa.look(picture(0)), QUESTION).text
