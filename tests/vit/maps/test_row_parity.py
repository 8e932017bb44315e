"""Rows of every layout against an eager forward written out here in float64, from the pixels on.

Nothing of the product's attention or rope takes part in it: only its weights, its patch tokens and its MLP do.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit.attention import Attention, KeysValues
from regard.vit.config import RopeRecipe
from regard.vit.maps import Pixel, attention_rows, checked_rows, patch_rows
from regard.vit.maps.trace import passages
from regard.vit.model import ViT

SIZE, GRID = (32, 56), (4, 7)  # not the native 3 x 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers after cls": dict(registers=4),
    "registers at the end": dict(registers=4, registers_place="end"),
    "no class token": dict(class_token=False, pooling="mean"),
    "registers alone": dict(class_token=False, registers=2, pooling="mean"),
    "registers alone, at the end": dict(class_token=False, registers=2, registers_place="end", pooling="mean"),
    "rope centred": dict(positions="rope", registers=2),
    "rope by number": dict(positions="rope", rope=RopeRecipe("index", base=10000.0)),
    "rope by number, stretched": dict(positions="rope", rope=RopeRecipe("index", base=10000.0, reference=(3, 5))),
    "rope of stated periods": dict(positions="rope", rope=RopeRecipe(periods=(1.0, 3.0, 7.0, 20.0))),
    "learned and rope, registers at the end": dict(positions="learned+rope", registers=2, registers_place="end"),
    "qk norm": dict(qk_norm=True),
    "qk norm, rope, wide heads": dict(qk_norm=True, positions="rope", head_dim=24, registers=2),
    "sub-norms": dict(attn_norm=True, mlp_norm=True, activation="swiglu", key_bias=False),
    "sink": dict(sink=True),
    "sink, rope, qk norm, registers at the end": dict(
        sink=True, positions="rope", qk_norm=True, registers=2, registers_place="end"
    ),
    "sincos, layer scale, no biases": dict(positions="sincos", layer_scale=0.1, qkv_bias=False),
    "norm before, no positions": dict(positions="none", pre_norm=True, activation="quick_gelu"),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[name.replace(" ", "-") for name in LAYOUTS])


def turned(x: Tensor, model: ViT, lead: int) -> Tensor:
    """Rotary positions on the patches of `x (B, S, K)`: half of the pairs (i, i + K/2) turn with the row."""
    config, quarter = model.config, x.shape[-1] // 4
    periods = config.rope.periods or [config.rope.base ** (i / quarter) for i in range(quarter)]
    x = x.clone()
    for patch in range(GRID[0] * GRID[1]):
        angles = []
        for at, length, axis in zip(divmod(patch, GRID[1]), GRID, (0, 1), strict=True):
            if config.rope.coordinates == "centred":
                place = 2 * torch.pi * (2 * (at + 0.5) / length - 1)
            else:
                place = at * (config.rope.reference[axis] / length if config.rope.reference else 1)
            angles += [place / period for period in periods]
        turn = torch.polar(torch.ones(len(angles), dtype=x.dtype), torch.tensor(angles, dtype=x.dtype))
        first, second = x[:, lead + patch].chunk(2, dim=-1)
        pairs = torch.complex(first, second) * turn
        x[:, lead + patch] = torch.cat((pairs.real, pairs.imag), dim=-1)
    return x


def eager(model: ViT, images: Tensor, *, rope: bool = True, scale: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer all logits `(B, H, S, S)`, and A with the sink's share as a last column `(B, H, S, S + 1)`."""
    config = model.config
    x, grid = model.embed(images)
    assert grid == GRID
    lead = config.class_token + (config.registers if config.registers_place == "after_cls" else 0)
    logits, rows = [], []
    for block in model.blocks:
        attn, y = block.attn, block.norm1(x)
        mixed, of_heads, scores_of_heads = [], [], []
        for h in range(attn.heads):
            part = slice(h * attn.head_dim, (h + 1) * attn.head_dim)
            q, k, v = (
                y @ to.weight[part].T + (0 if to.bias is None else to.bias[part])
                for to in (attn.to_q, attn.to_k, attn.to_v)
            )
            q, k = attn.norm_q(q), attn.norm_k(k)
            if config.has_rope:
                q, k = turned(q, model, lead), turned(k, model, lead)
            scores = q @ k.transpose(1, 2) / attn.head_dim**0.5
            rest = torch.full_like(scores[..., :1], -torch.inf if attn.sink is None else float(attn.sink[h]))
            weights = torch.cat((scores, rest), dim=-1).exp()
            weights = weights / weights.sum(dim=-1, keepdim=True)
            mixed.append(weights[..., :-1] @ v)
            of_heads.append(weights)
            scores_of_heads.append(scores)
        x = x + block.scale1(attn.out(attn.norm_out(torch.cat(mixed, dim=-1))))
        x = x + block.scale2(block.mlp(block.norm2(x)))
        rows.append(torch.stack(of_heads, dim=1))
        logits.append(torch.stack(scores_of_heads, dim=1))
    return logits, rows


def places(model: ViT) -> tuple[list[int], list[int], list[int]]:
    """Where the class token, the registers and the patches stand in the sequence, from the configuration alone."""
    config, count = model.config, GRID[0] * GRID[1]
    cls, registers = int(config.class_token), config.registers
    if config.registers_place == "end":
        return list(range(cls)), list(range(cls + count, cls + count + registers)), list(range(cls, cls + count))
    first = cls + registers
    return list(range(cls)), list(range(cls, first)), list(range(first, first + count))


def in_double(model: ViT) -> ViT:
    model = copy.deepcopy(model).double()
    model._ropes.clear()
    return model


@torch.no_grad()
@layouts
def test_rows_of_every_layout_equal_an_eager_forward_in_float64(vit, layout):
    model, images = vit(**layout), torch.randn(2, 3, *SIZE)
    logits, dense = eager(in_double(model), images.double())
    cls, registers, patches = places(model)
    mask = torch.zeros(GRID, dtype=torch.bool)
    mask[1:3, 2:6] = True
    asked = {"patches": patches, "mask": [patches[i] for i in mask.flatten().nonzero().flatten()]}
    queries: list[Any] = ["patches", mask, (1, 5), Pixel(31, 0)]
    asked |= {"patch (1, 5)": [patches[1 * 7 + 5]], "pixel (31, 0)": [patches[3 * 7]]}
    if cls:
        queries.append("cls")
        asked["cls"] = cls
    if registers:
        queries.append("registers")
        asked |= {f"reg{i}": [place] for i, place in enumerate(registers)}
    got = attention_rows(model, images, queries, "all", logits=True)
    assert got.queries == tuple(asked)
    for layer in range(3):
        for q, tokens in enumerate(asked.values()):
            want = dense[layer][:, :, tokens].mean(dim=2)

            def same(ours: Tensor, theirs: Tensor) -> None:
                torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)

            same(got.patches[:, layer, :, q].flatten(-2), want[..., patches])
            same(got.registers[:, layer, :, q], want[..., registers])
            assert (got.cls is None) == (not cls)
            if got.cls is not None:
                same(got.cls[:, layer, :, q, None], want[..., cls])
            assert (got.sink is None) == (not model.config.sink)
            if got.sink is not None:
                same(got.sink[:, layer, :, q], want[..., -1])
                assert torch.equal(got.logits.sink[:, layer, :, q], model.blocks[layer].attn.sink.expand(2, -1))
            scores = logits[layer][:, :, tokens].mean(dim=2)
            ours = got.logits.patches[:, layer, :, q].flatten(-2).double()
            torch.testing.assert_close(ours / scores.abs().max(), scores[..., patches] / scores.abs().max(),
                                       rtol=0, atol=1e-5)  # fmt: skip
    total = sum(got.mass().values())
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


@torch.no_grad()
@layouts
def test_every_patch_in_blocks_equals_the_eager_forward(vit, layout):
    model, images = vit(**layout), torch.randn(2, 3, *SIZE)
    patches = places(model)[2]
    want = eager(in_double(model), images.double())[1][2][:, :, patches][..., patches]
    got = torch.cat([block.patches[:, 0] for block in patch_rows(model, images, 2, block=9)], dim=2)
    torch.testing.assert_close(got.flatten(-2).double(), want, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["plain", "rope centred", "qk norm, rope, wide heads", "sink", "sub-norms"])
def test_bf16_rows_are_no_further_from_float64_than_an_eager_bf16_forward(vit, layout):
    model, images = vit(**LAYOUTS[layout]).bfloat16(), torch.randn(4, 3, *SIZE).bfloat16()
    patches = places(model)[2]
    exact = eager(in_double(model), images.double())[1]
    half = copy.deepcopy(model)
    if model.config.has_rope:
        # A complex number has no bf16: the eager forward is given the product's rope, which the test above has proven.
        rough = [p.block.attn.weights(p.q, p.kv.k) for p in passages(half, images, "all")]
    else:
        rough = [rows[..., :-1] for rows in eager(half, images)[1]]
    got = attention_rows(model, images, [divmod(i, GRID[1]) for i in range(len(patches))], "all")
    assert got.patches.dtype == torch.float32
    for layer in range(3):
        want = exact[layer][:, :, patches][..., patches]
        ours = (got.patches[:, layer].flatten(-2).double() - want).abs().mean()
        theirs = (rough[layer][:, :, patches][..., patches].double() - want).abs().mean()
        assert 0 < ours <= 1.1 * theirs


@torch.no_grad()
@pytest.mark.parametrize(
    "layout", ["registers at the end", "rope centred", "sink, rope, qk norm, registers at the end"]
)
def test_a_compiled_model_gives_the_same_rows_and_still_runs(vit, layout):
    torch._dynamo.reset()
    model, images = vit(**LAYOUTS[layout]), torch.randn(2, 3, *SIZE)
    plain = attention_rows(model, images, layers="all")
    compiled = torch.compile(model, backend="eager")
    before = compiled(images).patches
    rows = attention_rows(compiled, images, layers="all")
    assert torch.equal(rows.patches, plain.patches)
    assert torch.equal(rows.registers, plain.registers)
    assert torch.equal(compiled(images).patches, before)


# what the self-check catches -----------------------------------------------------------------------------------------

Wrong = Callable[[Attention, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def interleaved(attn: Attention, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Width split as (K, H) where it is (H, K): what a wrong reshape of a fused projection gives."""

    def split(t: Tensor) -> Tensor:
        joined = t.transpose(1, 2).flatten(2)
        return joined.unflatten(-1, (attn.head_dim, attn.heads)).permute(0, 3, 1, 2)

    return split(q), split(k)


def without_qk_norm(attn: Attention, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (to(x).unflatten(-1, (attn.heads, attn.head_dim)).transpose(1, 2) for to in (attn.to_q, attn.to_k))
    return q, k


def without_rope(attn: Attention, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    q, kv = attn.project(x)
    return q, kv.k


WRONG: dict[str, tuple[str, Wrong]] = {
    "heads in another order": ("plain", lambda attn, q, k, x: (q.flip(1), k.flip(1))),
    "heads interleaved": ("plain", interleaved),
    "no scale": ("plain", lambda attn, q, k, x: (q * attn.head_dim**0.5, k)),
    "scale of another width": ("qk norm, rope, wide heads", lambda attn, q, k, x: (q * (24 / 16) ** 0.5, k)),
    "no rope, centred": ("rope centred", without_rope),
    "no rope, by number": ("rope by number", without_rope),
    "no rope on the queries": ("rope centred", lambda attn, q, k, x: (without_rope(attn, q, k, x)[0], k)),
    "no qk norm": ("qk norm", without_qk_norm),
    "keys of the neighbour": ("registers at the end", lambda attn, q, k, x: (q, k.roll(1, 2))),
    "another image's queries": ("plain", lambda attn, q, k, x: (q.flip(0), k)),
}


@torch.no_grad()
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("given", [True, False], ids=["the-forward's-output", "the-kernel-again"])
def test_a_wrong_recomputation_is_caught_in_every_layer(vit, wrong, given):
    layout, spoil = WRONG[wrong]
    model, images = vit(**LAYOUTS[layout]), torch.randn(2, 3, *SIZE)
    for passage in passages(model, images, "all"):
        attn, kv = passage.attn, passage.kv
        q, k = spoil(attn, passage.q, kv.k, passage.block.norm1(passage.x))
        checked_rows(attn, passage.q, kv, out=passage.out)  # the right ones pass
        if given:
            with pytest.raises(RuntimeError, match="attention rows differ"):
                checked_rows(attn, q, KeysValues(k, kv.v), out=passage.out)
        else:
            # Without an output at hand only what `weights` itself does can be wrong.
            weights = attn.weights
            attn.weights = lambda q_, k_, mask=None, q=q, k=k, weights=weights: weights(q, k, mask)  # type: ignore
            try:
                with pytest.raises(RuntimeError, match="attention rows differ"):
                    checked_rows(attn, passage.q, kv)
            finally:
                del attn.weights


@torch.no_grad()
def test_a_forgotten_sink_and_a_forgotten_mask_are_caught(noisy, monkeypatch):
    attn = noisy(Attention(32, 2, sink=True))
    q, kv = attn.project(torch.randn(2, 9, 32))
    out = attn.mix(q, kv)
    checked_rows(attn, q, kv, out=out)
    sink = attn.sink
    attn.sink = None
    with pytest.raises(RuntimeError, match="attention rows differ"):
        checked_rows(attn, q, kv, out=out)
    attn.sink = sink
    mask = torch.rand(2, 1, 9, 9) > 0.4
    out = attn.mix(q, kv, mask)
    checked_rows(attn, q, kv, mask, out)
    with pytest.raises(RuntimeError, match="attention rows differ"):
        checked_rows(attn, q, kv, None, out)


@torch.no_grad()
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masked_rows_equal_float64(noisy, sink, kind):
    attn = noisy(Attention(32, 2, sink=sink, qk_norm=True))
    q, kv = attn.project(torch.randn(2, 6, 32), torch.randn(2, 9, 32))
    seen = torch.rand(2, 1, 6, 9) > 0.4
    seen[1, :, 2] = False
    mask = seen if kind == "bool" else torch.randn(2, 1, 6, 9).masked_fill(~seen, -torch.inf)
    scores = q.double() @ kv.k.double().transpose(-2, -1) / 4
    scores = scores + (mask.double() if kind == "float" else torch.zeros(()).masked_fill(~seen, -torch.inf))
    top = scores.exp()
    below = top.sum(-1, keepdim=True) + (attn.sink.double()[:, None, None].exp() if sink else 0)
    want = torch.where(below > 0, top / below, 0.0) * seen.any(-1, keepdim=True)
    got = checked_rows(attn, q, kv, mask)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert (got[1, :, 2] == 0).all()
    assert torch.isfinite(F.linear(got, torch.ones(1, 9))).all()
