"""Attention rollout as a recursion over rows, against the product of N x N matrices in float64."""

import pytest
import torch

from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import streamed
from regard.vit.maps.rollout import rollout

SIZE = (16, 40)  # grid 2 x 5, not the native 3 x 5
VARIANTS = {
    "plain": {},
    "registers after cls": dict(registers=2),
    "rope, qk norm, registers at the end": dict(registers=3, positions="rope", qk_norm=True, registers_place="end"),
    "no class token": dict(class_token=False, registers=1, pooling="mean"),
}


def whole(rows) -> torch.Tensor:
    """Rows `(B, Q, S)` with cls, registers, patches side by side."""
    cls = [] if rows.cls is None else [rows.cls[..., None]]
    return torch.cat([*cls, rows.registers, rows.patches.flatten(-2)], dim=-1)[:, 0, 0]


def named(model, matrix: torch.Tensor) -> torch.Tensor:
    """The columns of a product `(B, Q, S)` in the order of `whole`."""
    cls, registers, patches = order(model, matrix.shape[-1])
    return matrix[..., cls + registers + patches]


def order(model, tokens: int) -> tuple[list[int], list[int], list[int]]:
    config = model.config
    cls = [0] * config.class_token
    lead = config.class_token + (config.registers if config.registers_place == "after_cls" else 0)
    patches = list(range(lead, lead + tokens - config.class_token - config.registers))
    rest = [i for i in range(tokens) if i not in patches and i not in cls]
    return cls, rest, patches


def product(attention, fuse=lambda a: a.mean(dim=1), first=0) -> torch.Tensor:
    total = torch.eye(attention[0].shape[-1], dtype=torch.float64).expand(attention[0].shape[0], -1, -1)
    for a in attention[first:]:
        fused = fuse(a)
        fused = fused / fused.sum(dim=-1, keepdim=True)
        total = (fused + torch.eye(fused.shape[-1], dtype=fused.dtype)) / 2 @ total
    return total


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_equals_that_of_the_dense_product(vit, dense, variant, dtype):
    model, images = vit(**VARIANTS[variant]).to(dtype), torch.randn(2, 3, *SIZE, dtype=dtype)
    cls, registers, patches = order(model, 10 + model.config.class_token + model.config.registers)
    queries = ["patches", (1, 3), *(["cls"] if cls else []), *(["registers"] if registers else [])]
    rows = rollout(model, images, queries)
    matrix = product(dense(model, images).attention)
    picked = [matrix[:, patches].mean(dim=1), *(matrix[:, i] for i in [patches[8], *cls, *registers])]
    assert rows.patches.shape == (2, 1, 1, len(picked), 2, 5)
    torch.testing.assert_close(whole(rows).double(), named(model, torch.stack(picked, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize("start_layer", [0, 1, -1])
def test_heads_may_be_fused_otherwise_and_early_layers_left_out(vit, dense, heads, start_layer):
    model, images = vit(registers=2), torch.randn(2, 3, *SIZE)
    fuse = {"mean": lambda a: a.mean(1), "max": lambda a: a.amax(1), "min": lambda a: a.amin(1)}[heads]
    matrix = product(dense(model, images).attention, fuse, start_layer)
    rows = whole(rollout(model, images, heads=heads, start_layer=start_layer))
    torch.testing.assert_close(rows.double(), named(model, matrix[:, :1]), rtol=0, atol=1e-6)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 1))


def test_heads_that_agree_on_nothing_are_replaced_by_their_mean(vit, monkeypatch):
    def apart(attn, q, k, mask=None):
        rows = torch.zeros(*q.shape[:3], k.shape[2])
        rows[:, 0, :, 1] = rows[:, 1, :, 2] = 1.0
        return rows

    monkeypatch.setattr(Attention, "weights", apart)
    monkeypatch.setattr(streamed, "checked_rows", lambda attn, q, kv, out=None: attn.weights(q, kv.k))
    rows = whole(rollout(vit(), torch.randn(1, 3, *SIZE), heads="min", start_layer=-1))
    assert rows[0, 0, :3].tolist() == [0.5, 0.25, 0.25]


def test_a_token_that_sees_only_itself_rolls_out_to_itself(vit):
    """A = I in every layer gives R = I."""
    model = vit(qk_norm=True, positions="none")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.norm_q.weight.fill_(40.0)
            block.attn.norm_q.bias.zero_()
            block.attn.norm_k.weight.fill_(40.0)
            block.attn.norm_k.bias.zero_()
            block.attn.to_k.load_state_dict(block.attn.to_q.state_dict())
    rows = rollout(model, torch.randn(1, 3, *SIZE), [(0, 2), "cls"])
    assert rows.patches[0, 0, 0, 0, 0, 2] > 1 - 1e-6
    assert rows.cls[0, 0, 0, 1] > 1 - 1e-6


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_what_a_sink_takes_is_shown_and_not_scaled_away(vit, dense, heads):
    model, images = vit(sink=True), torch.randn(2, 3, *SIZE)
    rows = rollout(model, images, heads=heads)
    assert (rows.sink > 0.01).all()
    total = whole(rows).sum(-1) + rows.sink[:, 0, 0]
    torch.testing.assert_close(total, torch.ones_like(total))
    mass = [a.mean(1).sum(-1, keepdim=True) for a in dense(model, images).attention]
    fuse = {"mean": lambda a: a.mean(1), "max": lambda a: a.amax(1), "min": lambda a: a.amin(1)}[heads]
    v = torch.eye(11, dtype=torch.float64)[:1].expand(2, 1, 11)
    for a, share in zip(reversed(dense(model, images).attention), reversed(mass), strict=True):
        fused = fuse(a)
        v = (v + v @ (fused / fused.sum(-1, keepdim=True) * share)) / 2
    torch.testing.assert_close(whole(rows).double(), v, rtol=0, atol=1e-6)


def test_no_more_than_a_block_of_rows_is_held(vit, monkeypatch):
    made, weights = [], Attention.weights
    monkeypatch.setattr(streamed, "BLOCK", 4)
    monkeypatch.setattr(
        Attention, "weights", lambda *args, **rest: made.append(args[1].shape[2]) or weights(*args, **rest)
    )
    model, images = vit(), torch.randn(1, 3, *SIZE)
    rows = whole(rollout(model, images))
    assert made == [1, 4, 4, 3, 4, 4, 3]  # the class token's row of the last layer, then every row, by fours
    monkeypatch.setattr(streamed, "BLOCK", 256)
    torch.testing.assert_close(rows, whole(rollout(model, images)))


def test_an_answer_does_not_depend_on_the_rest_of_the_batch(vit):
    model, images = vit(registers=2), torch.randn(3, 3, *SIZE)
    together = whole(rollout(model, images))
    alone = torch.cat([whole(rollout(model, image[None])) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert rollout(model, images[:0]).patches.shape == (0, 1, 1, 1, 2, 5)


def test_a_wrong_row_is_caught(vit, monkeypatch):
    weights = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda attn, q, k, mask=None: weights(attn, q.flip(1), k.flip(1)))
    with pytest.raises(RuntimeError, match="attention rows differ"):
        rollout(vit(), torch.randn(2, 3, *SIZE))


def test_a_model_in_training_is_left_as_it_was_and_gives_the_same(vit, untouched, monkeypatch):
    model, images = vit(drop_path=0.9), torch.randn(2, 3, *SIZE)
    still = whole(rollout(model, images))
    model.train()
    model.blocks[1].eval()
    check = untouched(model)
    assert torch.equal(whole(rollout(model, images)), still)
    check()
    monkeypatch.setattr(Attention, "weights", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rollout(model, images)
    check()


def test_a_compiled_model_is_taken(vit):
    model, images = vit(), torch.randn(1, 3, *SIZE)
    assert torch.equal(whole(rollout(torch.compile(model), images)), whole(rollout(model, images)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(heads="median"), "heads='median'"),
        (dict(start_layer=3), "layer 3"),
        (dict(queries="reg0"), "no reg0"),
    ],
)
def test_what_does_not_exist_is_named(vit, options, words):
    with pytest.raises(InputError, match=words):
        rollout(vit(), torch.randn(1, 3, *SIZE), **options)
