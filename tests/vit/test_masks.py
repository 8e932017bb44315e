"""Masks of attention: broadcasting, and rows that may see nothing."""

import pytest
import torch

from regard.vit.attention import Attention

BATCH, TOKENS, KEYS, DIM, HEADS = 2, 4, 6, 12, 3


def attention(noisy, sink: bool = False) -> Attention:
    return noisy(Attention(DIM, HEADS, sink=sink)).double()


def as_scores(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (TOKENS, KEYS),
        (HEADS, TOKENS, KEYS),
        (HEADS, 1, KEYS),
        (BATCH, 1, 1, KEYS),
        (BATCH, 1, TOKENS, KEYS),
        (1, HEADS, 1, KEYS),
        (BATCH, HEADS, TOKENS, KEYS),
        (BATCH, 1, TOKENS, 1),
    ],
)
def test_a_mask_of_any_broadcastable_shape_equals_the_full_one(noisy, shape, sink):
    attn = attention(noisy, sink)
    x, context = torch.randn(BATCH, TOKENS, DIM).double(), torch.randn(BATCH, KEYS, DIM).double()
    mask = torch.rand(shape) < 0.6
    mask[..., 0, :] = False
    full = mask.expand(BATCH, HEADS, TOKENS, KEYS)
    whole = attn(x, context, mask=full)
    torch.testing.assert_close(attn(x, context, mask=mask), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attn(x, context, mask=as_scores(mask)), whole, rtol=1e-12, atol=1e-12)


def test_masked_keys_may_hold_anything(noisy):
    attn = attention(noisy)
    x, context = torch.randn(BATCH, TOKENS, DIM).double(), torch.randn(BATCH, KEYS, DIM).double()
    mask = torch.tensor([True, True, False, True, False, True])
    answer = attn(x, context, mask=mask[None, :])
    torch.testing.assert_close(answer, attn(x, context[:, mask]), rtol=1e-12, atol=1e-12)
    assert torch.equal(attn(x, torch.where(mask[:, None], context, 1e4), mask=mask[None, :]), answer)


def test_a_float_mask_is_added_to_the_scores(noisy):
    attn = attention(noisy)
    q, kv = attn.project(torch.randn(BATCH, TOKENS, DIM).double())
    added = torch.randn(1, HEADS, TOKENS, TOKENS).double()
    scores = q @ kv.k.transpose(-2, -1) / 2 + added
    torch.testing.assert_close(attn.weights(q, kv.k, added), scores.softmax(-1))
    torch.testing.assert_close(attn.mix(q, kv, added), scores.softmax(-1) @ kv.v)


def test_causal_and_padding_masks_join(noisy):
    attn = attention(noisy)
    x = torch.randn(BATCH, TOKENS, DIM).double()
    padding = torch.tensor([[True, True, True, False], [False, True, True, True]])[:, None, None]
    both = padding & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    answer = attn(x, mask=both)
    assert torch.equal(attn(x, mask=padding, causal=True), answer)
    torch.testing.assert_close(attn(x, mask=as_scores(padding), causal=True), answer, rtol=1e-12, atol=1e-12)
    assert (answer[1, 0] == 0).all(), "the first token of image 1 sees only itself, and is padding"


def test_a_mask_of_whole_numbers_is_refused(noisy):
    attn, x = attention(noisy, sink=True), torch.randn(BATCH, TOKENS, DIM).double()
    with pytest.raises(ValueError, match="bool"):
        attn(x, mask=torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.long))


@pytest.mark.parametrize(("dtype", "given"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("sink", [False, True])
def test_a_float_mask_of_another_precision_is_taken(noisy, dtype, given, sink):
    attn, x = noisy(Attention(DIM, HEADS, sink=sink)).to(dtype), torch.randn(BATCH, TOKENS, DIM).to(dtype)
    mask = torch.tensor([[0.0, -torch.inf, 1.0, 0.0]], dtype=given)
    assert torch.equal(attn(x, mask=mask), attn(x, mask=mask.to(dtype)))


FULLY = {
    "bool, every query of image 1": lambda: torch.tensor([[True] * KEYS, [False] * KEYS])[:, None, None],
    "bool, one query": lambda: (torch.arange(TOKENS) != 2)[:, None].expand(TOKENS, KEYS),
    "bool, one head of every query": lambda: torch.tensor([True, False, True])[:, None, None].expand(3, TOKENS, KEYS),
    "bool, everything": lambda: torch.zeros(TOKENS, KEYS, dtype=torch.bool),
}


@pytest.mark.parametrize("as_float", [False, True], ids=["bool", "-inf"])
@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
@pytest.mark.parametrize("case", FULLY)
def test_rows_that_see_nothing_give_exactly_zero_with_finite_gradients(noisy, case, sink, as_float):
    attn = noisy(Attention(DIM, HEADS, sink=sink))
    mask = FULLY[case]()
    blind = ~mask.expand(BATCH, HEADS, TOKENS, KEYS).any(-1)  # (B, H, T)
    if as_float:
        mask = as_scores(mask).float().requires_grad_()
    x = torch.randn(BATCH, TOKENS, DIM, requires_grad=True)
    context = torch.randn(BATCH, KEYS, DIM, requires_grad=True)
    out = attn(x, context, mask=mask)
    assert torch.isfinite(out).all()
    wholly = blind.all(1)
    assert (out[wholly] == 0).all(), "the output bias of a row that sees nothing must go too"
    assert (out[~wholly] != 0).any(-1).all()
    q, kv = attn.project(x, context)
    joined = attn.join_masks(mask, False, q, kv.k)
    rows, mixed = attn.weights(q, kv.k, joined), attn.mix(q, kv, joined)
    assert (rows[blind] == 0).all()
    assert (mixed[blind] == 0).all()
    (out.pow(2).sum() + rows.pow(2).sum()).backward()
    given = [*attn.parameters(), x, context, *([mask] if as_float else [])]
    for tensor in given:
        assert tensor.grad is None or torch.isfinite(tensor.grad).all()
    assert (x.grad[wholly] == 0).all()


def test_blind_rows_leave_no_trace_in_the_gradients(noisy):
    attn = noisy(Attention(DIM, HEADS)).double()
    x, context = torch.randn(BATCH, TOKENS, DIM).double(), torch.randn(BATCH, KEYS, DIM).double()
    mask = torch.ones(BATCH, 1, TOKENS, KEYS, dtype=torch.bool)
    mask[:, :, 2] = False
    seeing = [0, 1, 3]
    attn(x, context, mask=mask).pow(2).sum().backward()
    masked = [p.grad.clone() for p in attn.parameters()]
    attn.zero_grad()
    attn(x[:, seeing], context).pow(2).sum().backward()
    for got, want in zip(masked, attn.parameters(), strict=True):
        torch.testing.assert_close(got, want.grad, rtol=1e-9, atol=1e-9)
