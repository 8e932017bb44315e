"""LeGrad and value-weighted maps, against N x N matrices and their own gradients in float64."""

import importlib

import pytest
import torch

from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import attention_rows
from regard.vit.maps.legrad import legrad
from regard.vit.maps.weighted import value_lengths, value_weighted

SIZE = (16, 40)
VARIANTS = {
    "plain": dict(classes=5),
    "registers at the end, rope": dict(classes=5, registers=3, positions="rope", registers_place="end"),
    "mean of patches, no class token": dict(classes=5, class_token=False, pooling="mean", registers=1),
    "class token and mean, sub-norm, sink": dict(classes=5, pooling="cls+mean", attn_norm=True, sink=True),
    "norm of the pooled": dict(classes=5, pooling="mean", norm_place="pooled"),
}


def stretched(maps: torch.Tensor) -> torch.Tensor:
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / (high - low)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layers", ["all", [-1, 0]])
def test_legrad_equals_the_dense_gradient_of_each_layers_mean_token(vit, dense, variant, layers):
    model, images = vit(**VARIANTS[variant]).double(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    run, columns = dense(model, images), []
    for layer in (0, 1, 2) if layers == "all" else (2, 0):
        mean = run.model.norm(run.stream[layer].mean(1))
        pooled = torch.cat((mean, mean), -1) if model.config.pooling == "cls+mean" else mean
        logit = run.model.head(run.model.pool.norm(pooled))[:, 3]
        (grad,) = torch.autograd.grad(logit.sum(), run.attention[layer], retain_graph=True)
        columns.append(grad.clamp_min(0).mean(dim=(1, 2)))
    total = model.name(torch.stack(columns).mean(0)[..., None], (2, 5)).patches[..., 0].unflatten(-1, (2, 5))
    torch.testing.assert_close(legrad(model, images, 3, layers=layers), stretched(total), rtol=0, atol=1e-6)


def test_legrad_of_a_model_that_pools_by_attention_looks_at_the_pooling(vit, dense):
    model = vit(pooling="map", class_token=False, registers=2, classes=5).double()
    images, total = torch.randn(2, 3, *SIZE, dtype=torch.float64), 0.0
    run, pool = dense(model, images), model.pool.asker
    for stream in run.stream:
        patches = model.norm(stream[:, 2:]).detach()
        q = pool.attn.to_q(pool.latent).view(1, 2, 1, 16).expand(2, -1, -1, -1)
        k, v = (to(patches).unflatten(-1, (2, 16)).transpose(1, 2) for to in (pool.attn.to_k, pool.attn.to_v))
        a = (q @ k.mT / 4).softmax(-1).detach().requires_grad_()
        x = pool.attn.out((a @ v).transpose(1, 2).flatten(2))
        logit = model.head((x + pool.mlp(pool.norm(x)))[:, 0])[:, 1]
        total = total + torch.autograd.grad(logit.sum(), a)[0].clamp_min(0).mean(1)[:, 0].unflatten(-1, (2, 5))
    torch.testing.assert_close(legrad(model, images, 1), stretched(total), rtol=0, atol=1e-6)


def test_legrad_is_0_without_a_gradient_and_takes_text_vectors_and_every_image_by_itself(vit):
    model, images = vit(), torch.randn(3, 3, *SIZE)
    assert not legrad(model, images, lambda tokens, pooled: 0 * pooled.sum(1)).any()
    texts = torch.randn(3, 32)
    together = legrad(model, images, texts)
    alone = torch.cat([legrad(model, i[None], t) for i, t in zip(images, texts, strict=True)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    assert together.amin((1, 2)).tolist() == [0, 0, 0]
    assert together.amax((1, 2)).tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="does not depend"):
        legrad(model, images, lambda tokens, pooled: torch.ones(3))


def test_legrad_holds_no_more_than_a_block(vit, monkeypatch):
    model, images = vit(classes=5).double(), torch.randn(1, 3, *SIZE, dtype=torch.float64)
    whole = legrad(model, images, 0)
    monkeypatch.setattr(importlib.import_module("regard.vit.maps.legrad"), "BLOCK", 4)
    torch.testing.assert_close(legrad(model, images, 0), whole)


@pytest.mark.parametrize("frozen", [False, True])
def test_legrad_leaves_the_model_as_it_was_whatever_happens(vit, untouched, frozen):
    model, images = vit(classes=5, drop_path=0.9), torch.randn(2, 3, *SIZE)
    still = legrad(torch.compile(model), images, 1)
    model.train().requires_grad_(not frozen)
    model.blocks[0].eval()
    check = untouched(model)
    with torch.inference_mode():
        assert torch.equal(legrad(model, images, 1), still)
    with pytest.raises(ZeroDivisionError):
        legrad(model, images, lambda tokens, pooled: 1 / 0)
    check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_weighted_rows_equal_the_lengths_of_what_is_handed_over(vit, dense, variant):
    model, images = vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE)
    config = model.config
    query = "cls" if config.class_token else "reg0"
    rows = value_weighted(model, images, query, [2, 0])
    run = dense(model, images)
    for place, layer in enumerate([2, 0]):
        attn, a, v = run.model.blocks[layer].attn, run.attention[layer][:, :, 0], run.values[layer]
        gamma = attn.norm_out.weight if config.attn_norm else torch.ones(attn.out.in_features, dtype=torch.float64)
        for head in range(2):
            part = slice(head * attn.head_dim, (head + 1) * attn.head_dim)
            handed = torch.einsum("bn,bnk,dk->bnd", a[:, head], v[:, head], (attn.out.weight * gamma)[:, part])
            lengths = run.model.name(handed.norm(dim=-1)[..., None], (2, 5))
            for got, want in (
                (rows.patches[:, place, head, 0].flatten(1), lengths.patches[..., 0]),
                (rows.registers[:, place, head, 0], lengths.registers[..., 0]),
                *([(rows.cls[:, place, head], lengths.cls)] if config.class_token else []),
            ):
                torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    assert (rows.queries, rows.layers, rows.heads) == ((query,), (2, 0), (0, 1))


def test_a_sink_takes_attention_and_hands_over_nothing(vit):
    model, images = vit(registers=1), torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        attn = model.blocks[0].attn
        here = model.blocks[0].norm1(model.embed(images)[0])[0, 1]  # the register
        attn.to_v.bias.copy_(-attn.to_v.weight @ here)
        attn.to_k.weight.mul_(0.1)
        attn.to_k.bias.zero_()
        attn.to_q.weight.zero_()
        key = attn.to_k(here).unflatten(0, (2, 16))
        attn.to_q.bias.copy_((16 * key / key.square().sum(dim=1, keepdim=True)).flatten())
    seen, fetched = attention_rows(model, images, layers=0), value_weighted(model, images, layers=0)
    assert seen.registers.min() > 0.5
    assert (fetched.registers[..., 0] < 1e-3 * fetched.patches.sum((-2, -1))).all()
    with_sink = vit(sink=True)
    assert (value_weighted(with_sink, images).sink == 0).all()
    assert (attention_rows(with_sink, images).sink > 0).all()


def test_value_weighted_rows_are_chosen_and_proven_as_attention_rows_are(vit, untouched, monkeypatch):
    model, images = vit(registers=2, heads=4).train(), torch.randn(2, 3, *SIZE)
    compiled, check = torch.compile(model), untouched(model)
    every = value_weighted(model, images, ["cls", "patches", (1, 1)], "all")
    assert every.patches.shape == (2, 3, 4, 3, 2, 5)
    some = value_weighted(compiled, images, (1, 1), 1, [3, 0])
    assert torch.equal(some.patches[:, 0, :, 0], every.patches[:, 1, [3, 0], 2])
    weights = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda attn, q, k, mask=None: weights(attn, q.flip(1), k.flip(1)))
    with pytest.raises(RuntimeError, match="attention rows differ"):
        value_weighted(model, images)
    check()


def test_lengths_need_no_vector_of_full_width(noisy):
    attn = noisy(Attention(24, 3, head_dim=5))
    v = torch.randn(2, 3, 7, 5)
    want = torch.stack([(v[:, h] @ attn.out.weight[:, h * 5 : h * 5 + 5].T).norm(dim=-1) for h in range(3)], dim=1)
    torch.testing.assert_close(value_lengths(attn, v), want)


@pytest.mark.parametrize("ask", [legrad, value_weighted])
def test_no_layers_are_refused(vit, ask):
    with pytest.raises(InputError, match="no layers"):
        ask(vit(classes=5), torch.randn(1, 3, *SIZE), *([0] if ask is legrad else []), layers=[])
