"""Attention rollout: what reaches a token through all layers, if half of each layer's stream is its attention."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.maps.queries import Query, resolve
from regard.vit.maps.rows import AttentionRows, as_tensor
from regard.vit.maps.streamed import Streamed, evaluating, first_rows, head_rows, name_rows
from regard.vit.maps.trace import passages, plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture

HeadFusion = Literal["mean", "max", "min"]


@torch.no_grad()
def rollout(
    model: nn.Module,
    images: Tensor | Picture | Sequence[Picture],
    queries: Query | Sequence[Query] = "cls",
    *,
    heads: HeadFusion = "mean",
    start_layer: int = 0,
) -> AttentionRows:
    """Rows of the product of (A + I) / 2 over the layers (Abnar & Zuidema, 2020, arXiv:2005.00928).

    A row starts at its query and walks from the last layer to `start_layer`, v <- (v + v A) / 2, over blocks of rows of
    A: memory is O(layers x N x D) for the residual stream, never N x N.

    Args:
        model, images, queries: as in `attention_rows`.
        heads: what stands for A in a layer: the `mean` of its heads, or the `max` or `min` of each entry, each row
            scaled to the mass that it has in the mean.
        start_layer: the first layer that takes part, counted from the end if negative.

    Returns rows whose axes of layers and heads have size 1. A row's parts sum to 1; what learned sinks took on the way
    is its `sink`.
    """
    if heads not in _FUSE:
        raise InputError(f"heads={heads!r} is unknown; rollout fuses them by {', '.join(_FUSE)}")
    vit = plain(model)
    images = as_tensor(vit, images)
    (first,) = vit.layer_numbers(start_layer)
    with evaluating(vit):
        return _rollout(vit, images, queries, heads, first)


def _rollout(
    vit: ViT, images: Tensor, queries: Query | Sequence[Query], heads: HeadFusion, first: int
) -> AttentionRows:
    # The stream alone is kept: queries and keys made of it again cost a projection, and half of the memory.
    seen = [(p.block, p.x, p.grid) for p in passages(vit, images, range(first, vit.config.depth))]
    grid = seen[-1][2]
    asked = resolve(vit, queries, grid, images.device)
    batch, tokens = seen[-1][1].shape[:2]
    rotary = vit.rotary(grid, images.device)
    v = first_rows(asked, batch, tokens, seen[-1][1])
    for block, x, _ in reversed(seen):
        q, kv = block.attn.project(block.norm1(x), rotary=rotary)
        a = Streamed(_fused(head_rows(block.attn, q, kv), _FUSE[heads]), (batch, tokens, tokens))
        v = (v + a.left(v)) / 2
    return name_rows(vit, v, grid, asked, 1 - v.sum(dim=-1) if vit.config.sink else None)


def _fused(rows: Callable[[Tensor], Tensor], fuse: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def fused(index: Tensor) -> Tensor:
        weights = rows(index)  # (B, H, n, S)
        mean, one = weights.mean(dim=1), fuse(weights)
        # A row sums to 1 less what a sink took. Where no two heads agree on any token, their minimum says nothing.
        mass, own = mean.sum(dim=-1, keepdim=True), one.sum(dim=-1, keepdim=True)
        tiny = torch.finfo(own.dtype).tiny
        return torch.where(own > tiny, one * (mass / own.clamp_min(tiny)), mean)

    return fused


_FUSE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(dim=1),
    "max": lambda weights: weights.amax(dim=1),
    "min": lambda weights: weights.amin(dim=1),
}
