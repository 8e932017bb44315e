"""Value-weighted maps: what a head fetches from where, not only where it looks.

A sink is looked at a lot and hands over next to nothing: its value is short. |A_ij| * ||v_j W_o|| tells the two apart.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps.queries import Query, resolve
from regard.vit.maps.rows import AttentionRows, Layers, as_tensor, head_numbers, rows_of, split, stacked
from regard.vit.maps.trace import passages, plain
from regard.vit.preprocess import Picture


@torch.no_grad()
def value_weighted(
    model: nn.Module,
    images: Tensor | Picture | Sequence[Picture],
    queries: Query | Sequence[Query] = "cls",
    layers: Layers = -1,
    heads: int | Sequence[int] | Literal["all"] = "all",
) -> AttentionRows:
    """|A_ij| * ||v_j W_o|| per head: how long a vector each token adds to the stream (Kobayashi et al., 2020,
    arXiv:2004.10102).

    The arguments and the arrangement are those of `attention_rows`, and its rows are proven in the same way. The values
    are lengths in the residual stream before LayerScale, not shares; they do not sum to 1, and a learned sink, which
    hands over nothing, has 0. Where a norm stands before W_o (sub-LN) its weight counts as a part of W_o; the
    mean it takes away and the spread it divides by, which belong to a query and not to a token, are left out.
    """
    vit = plain(model)
    images = as_tensor(vit, images)
    wanted = vit.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    chosen = head_numbers(vit, heads)
    found: dict[int, AttentionRows] = {}
    for passage in passages(vit, images, wanted):
        asked = resolve(vit, queries, passage.grid, images.device)
        lengths = value_lengths(passage.attn, passage.kv.v)[:, :, None]
        rows = split(vit, (rows_of(passage, asked) * lengths)[:, chosen], passage, asked)
        sink = None if rows.sink is None else torch.zeros_like(rows.sink)
        found[passage.layer] = AttentionRows(rows.patches, rows.cls, rows.registers, sink, rows.queries)
    return stacked([found[layer] for layer in wanted], wanted, chosen)


def value_lengths(attn: Attention, v: Tensor) -> Tensor:
    """||v_j W_o|| for each head's part of W_o: `v (B, H, N, K) -> (B, H, N)`; no vector of width D is made."""
    weight = attn.out.weight.double()  # (D, H K)
    if isinstance(attn.norm_out, nn.LayerNorm) and attn.norm_out.weight is not None:
        weight = weight * attn.norm_out.weight.double()
    parts = weight.unflatten(1, (attn.heads, attn.head_dim)).transpose(0, 1)  # (H, D, K)
    gram = parts.mT @ parts  # (H, K, K): ||v W||^2 = v W W^T v^T
    wide = v.double()
    squares = ((wide @ gram) * wide).sum(dim=-1)
    return squares.clamp_min(0).sqrt().to(torch.promote_types(v.dtype, torch.float32))
