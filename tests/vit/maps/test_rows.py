"""Where a head looks: attention rows against an explicit float64 recomputation."""

import inspect

import pytest
import torch

from regard.vit import maps
from regard.vit.attention import Attention, KeysValues
from regard.vit.errors import InputError
from regard.vit.maps import attention_rows, checked_rows

SIZE = (16, 40)  # grid 2 x 5, not the native 3 x 5
VARIANTS = {
    "plain": {},
    "registers after cls": dict(registers=2),
    "registers at the end": dict(registers=2, registers_place="end"),
    "rope, qk norm, wide heads": dict(registers=2, positions="rope", qk_norm=True, head_dim=24, registers_place="end"),
    "sincos, swiglu, layer scale": dict(positions="sincos", activation="swiglu", layer_scale=0.1, qkv_bias=False),
}


def by_hand(model, images: torch.Tensor, layer: int) -> torch.Tensor:
    """A of one layer in float64, `(B, H, S, S)`, from the residual stream that reaches it."""
    x, grid = model.embed(images)
    rotary = model.rotary(grid, x.device)
    for block in model.blocks[:layer]:
        x = block(x, rotary)
    block = model.blocks[layer]
    attn, x = block.attn, block.norm1(x)
    heads = []
    for h in range(attn.heads):
        part = slice(h * attn.head_dim, (h + 1) * attn.head_dim)
        q, k = (
            norm(torch.nn.functional.linear(x, to.weight[part], None if to.bias is None else to.bias[part]))
            for to, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k))
        )
        if rotary is not None:
            q, k = rotary(q[:, None])[:, 0], rotary(k[:, None])[:, 0]
        scores = q.double() @ k.double().transpose(1, 2) / attn.head_dim**0.5
        heads.append(scores.softmax(-1))
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("queries", ["cls", "registers"])
def test_rows_equal_a_recomputation_in_float64(vit, variant, queries):
    options = VARIANTS[variant]
    model, images = vit(**options), torch.randn(2, 3, *SIZE)
    count = options.get("registers", 0)
    if queries == "registers" and not count:
        with pytest.raises(InputError, match="registers"):
            attention_rows(model, images, queries)
        return
    at_end = options.get("registers_place") == "end"
    registers = list(range(11, 11 + count)) if at_end else list(range(1, 1 + count))
    patches = list(range(1, 11)) if at_end else list(range(1 + count, 11 + count))
    asked = [0] if queries == "cls" else registers
    rows = attention_rows(model, images, queries, layers=[2, 0])
    assert rows.patches.shape == (2, 2, 2, len(asked), 2, 5)
    assert rows.cls.shape == (2, 2, 2, len(asked))
    assert rows.registers.shape == (2, 2, 2, len(asked), count)
    for place, layer in enumerate([2, 0]):
        want = by_hand(model, images, layer)[:, :, asked]
        for got, columns in (
            (rows.patches[:, place].flatten(-2), patches),
            (rows.registers[:, place], registers),
            (rows.cls[:, place, ..., None], [0]),
        ):
            torch.testing.assert_close(got.double(), want[..., columns], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_mass_on_all_named_tokens_is_one(vit, variant):
    rows = attention_rows(vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE), layers="all")
    mass = rows.patches.sum((-2, -1)) + rows.cls + rows.registers.sum(-1)
    assert mass.shape == (2, 3, 2, 1)
    torch.testing.assert_close(mass, torch.ones_like(mass))


def test_without_a_class_token_the_registers_can_be_asked(vit):
    model, images = vit(class_token=False, registers=2, pooling="mean"), torch.randn(2, 3, *SIZE)
    rows = attention_rows(model, images, "registers")
    assert rows.cls is None
    total = rows.patches.sum((-2, -1)) + rows.registers.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    with pytest.raises(InputError, match="no cls"):
        attention_rows(model, images)


def test_a_map_lies_the_way_the_image_lies(vit):
    """Where one patch stands out, its cell of the map does, on a grid of 2 x 5."""
    model = vit(positions="none", depth=1)
    with torch.no_grad():
        block = model.blocks[0]
        bright = model.tokenizer(torch.full((1, 3, 8, 8), 3.0))[0][0, 0]
        key = block.attn.to_k(block.norm1(bright))
        query = block.attn.to_q(block.norm1(model.cls))
        for part in (slice(0, 16), slice(16, 32)):  # make each head's class query like the bright patch's key
            block.attn.to_q.bias[part] += 20 * key[part] / key[part].norm() - query[part]
    for row, column in ((0, 4), (1, 0), (1, 3)):
        images = torch.zeros(1, 3, *SIZE)
        images[:, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = 3.0
        for head in attention_rows(model, images).patches[0, 0, :, 0]:
            assert divmod(int(head.argmax()), 5) == (row, column)


def test_asking_for_maps_changes_nothing_and_leaves_nothing_behind(vit):
    model, images = vit(registers=2), torch.randn(2, 3, *SIZE)
    before, state = model(images), {n: p.clone() for n, p in model.state_dict().items()}
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    rows = attention_rows(model, images, layers="all")
    after = model(images)
    assert torch.equal(before.patches, after.patches)
    assert torch.equal(before.cls, after.cls)
    assert all(torch.equal(state[n], p) for n, p in model.state_dict().items())
    for name, module in model.named_modules():
        assert set(vars(module)) == keys[name]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not rows.patches.requires_grad
    assert torch.is_grad_enabled()
    assert not model.training


def test_only_the_rows_asked_for_are_computed(vit, monkeypatch):
    seen, weights = [], Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda *a, **k: seen.append(weights(*a, **k).shape) or weights(*a, **k))
    attention_rows(vit(registers=2), torch.randn(2, 3, *SIZE), layers=[0, 1])
    assert seen == [(2, 2, 1, 13)] * 2


# the self-check ------------------------------------------------------------------------------------------------------

WRONG = {
    "heads in another order": lambda attn, q, k: weights(attn, q.flip(1), k.flip(1)),
    "no scale": lambda attn, q, k: weights(attn, q * attn.head_dim**0.5, k),
    "rows of another query": lambda attn, q, k: weights(attn, q.roll(1, 0), k),
    "rounded away": lambda attn, q, k: weights(attn, q, k).round(decimals=2),
    "not a number": lambda attn, q, k: weights(attn, q, k) * torch.nan,
}
weights = Attention.weights


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_map_is_caught(vit, monkeypatch, wrong):
    monkeypatch.setattr(Attention, "weights", lambda attn, q, k, mask=None: WRONG[wrong](attn, q, k))
    with pytest.raises(RuntimeError, match="attention rows differ"):
        attention_rows(vit(), torch.randn(2, 3, *SIZE), layers="all")


def test_checked_rows_take_masks_and_sinks(noisy):
    attn = noisy(Attention(12, 3, sink=True))
    q, kv = attn.project(torch.randn(2, 4, 12), torch.randn(2, 6, 12))
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 6])[:, None, None]
    rows = checked_rows(attn, q, kv, mask)
    assert (rows[0, ..., 4:] == 0).all()
    assert (rows[1] == 0).all()
    assert (rows[0].sum(-1) < 1).all()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_half_precision_rows_pass_their_check_and_are_fp32(vit, qk_norm):
    model, images = vit(qk_norm=qk_norm, registers=2), torch.randn(2, 3, *SIZE)
    exact = attention_rows(model, images, layers=0).patches
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention_rows(model, images, layers=0)
    half = attention_rows(model.bfloat16(), images.bfloat16(), layers=0)
    for rows in (mixed, half):
        assert rows.patches.dtype == torch.float32
        torch.testing.assert_close(rows.patches, exact, rtol=0, atol=0.03)
        mass = rows.patches.sum((-2, -1)) + rows.cls + rows.registers.sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


def test_fp32_queries_that_meet_half_precision_values_are_judged_by_the_kernel_that_ran(noisy):
    """On CUDA autocast leaves normed queries in fp32 while the values are bf16."""
    attn = noisy(Attention(64, 2, qk_norm=True))
    q, kv = attn.project(torch.randn(2, 40, 64))
    with torch.autocast("cpu", torch.bfloat16):
        rows = checked_rows(attn, q, KeysValues(kv.k, kv.v.bfloat16()))
    assert rows.dtype == torch.float32


def test_an_empty_batch_gives_empty_maps(vit):
    assert attention_rows(vit(), torch.zeros(0, 3, *SIZE)).patches.shape == (0, 1, 2, 1, 2, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [(dict(queries="patch"), "queries"), (dict(layers=3), "layer 3"), (dict(layers=[]), "layers"),
     (dict(queries="registers"), "no registers")],
)  # fmt: skip
def test_what_the_model_does_not_have_is_named(vit, options, words):
    with pytest.raises(InputError, match=words):
        attention_rows(vit(), torch.randn(1, 3, *SIZE), **options)


def test_no_hook_is_ever_set():
    assert "register_forward" not in inspect.getsource(maps)
