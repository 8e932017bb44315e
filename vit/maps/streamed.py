"""Matrices of N x N that are never held: their rows are made a block at a time, used and forgotten.

Rollout and relevance ask for few rows of a product of layers. `v M` and `M w` need every row of M once, in any order.
B images, R rows that are carried, T rows and N columns of a matrix, S tokens of a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, KeysValues
from regard.vit.maps.queries import Asked
from regard.vit.maps.rows import BLOCK, AttentionRows, checked_rows
from regard.vit.model import ViT


class Streamed:
    """A matrix `(B, T, N)` known by its rows: `rows(index)` gives `(B, len(index), N)` for row numbers `(n,)`."""

    def __init__(self, rows: Callable[[Tensor], Tensor], shape: tuple[int, int, int]):
        self.rows, self.shape = rows, shape

    def left(self, v: Tensor) -> Tensor:
        """`v M`: `(B, R, T) -> (B, R, N)`. Rows that `v` has only zeros for are not made."""
        out = v.new_zeros(*v.shape[:2], self.shape[2])
        if not v.numel():
            return out
        for index in (v != 0).flatten(0, 1).any(dim=0).nonzero().flatten().split(BLOCK):
            out += v[:, :, index] @ self.rows(index).to(v.dtype)
        return out

    def right(self, w: Tensor) -> Tensor:
        """`M w`: `(B, N, C) -> (B, T, C)`."""
        every = torch.arange(self.shape[1], device=w.device)
        return torch.cat([self.rows(index).to(w.dtype) @ w for index in every.split(BLOCK)], dim=1)


class Dense:
    """The same for a matrix `(B, T, N)` that is small enough to hold."""

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    def left(self, v: Tensor) -> Tensor:
        return v @ self.matrix

    def right(self, w: Tensor) -> Tensor:
        return self.matrix @ w


Operator = Streamed | Dense


def head_rows(attn: Attention, q: Tensor, kv: KeysValues, out: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Rows `(B, H, n, S)` of A by their numbers `(n,)`; the first block is proven against the head's real output."""
    proven = False

    def rows(index: Tensor) -> Tensor:
        nonlocal proven
        if proven:
            return attn.weights(q[:, :, index], kv.k)
        proven = True
        return checked_rows(attn, q[:, :, index], kv, out=None if out is None else out[:, :, index])

    return rows


def positive_relevance(attn: Attention, q: Tensor, kv: KeysValues, grad: Tensor, out: Tensor | None = None) -> Streamed:
    """mean_h((dA * A)^+) `(B, S, S)` of a layer whose heads' outputs got the gradient `grad (B, H, S, K)`.

    dA = grad V^T, so that the fused kernel's one backward is all that is needed.
    """
    rows, size = head_rows(attn, q, kv, out), q.shape[2]
    values = kv.v.transpose(-2, -1)

    def fused(index: Tensor) -> Tensor:
        weights = rows(index)
        towards = grad[:, :, index].to(weights.dtype) @ values.to(weights.dtype)
        return (weights * towards).clamp_min(0).mean(dim=1)

    return Streamed(fused, (q.shape[0], size, kv.k.shape[2]))


def first_rows(asked: Sequence[Asked], batch: int, tokens: int, like: Tensor) -> Tensor:
    """Where each query starts `(B, Q, S)`: at its token, or evenly at its tokens; in fp32 or wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    v = torch.zeros(batch, len(asked), tokens, dtype=wide, device=like.device)
    for number, query in enumerate(asked):
        v[:, number, query.tokens] = 1 / len(query.tokens)
    return v


def name_rows(
    model: ViT, v: Tensor, grid: tuple[int, int], asked: Sequence[Asked], sink: Tensor | None = None
) -> AttentionRows:
    """Rows `(B, Q, S)` by the name of the token they look at; the axes of layers and heads, now one, have size 1."""
    flat = model.name(v.flatten(0, 1)[..., None], grid)
    shape = (v.shape[0], 1, 1, v.shape[1])
    return AttentionRows(
        flat.patches[..., 0].reshape(*shape, *grid),
        None if flat.cls is None else flat.cls[..., 0].reshape(shape),
        flat.registers[..., 0].reshape(*shape, model.config.registers),
        None if sink is None else sink[:, None, None],
        tuple(query.name for query in asked),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No stochastic depth meanwhile; afterwards each part stands as it stood, which need not be as its parent does."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
