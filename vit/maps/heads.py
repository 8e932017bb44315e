"""One map from many heads: their mean, their maximum, one of them, or the mean of those that see a thing."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.maps.rows import AttentionRows

How = Literal["mean", "max", "auto"] | int


class Fused(NamedTuple):
    """Maps `(B, L, Q, gh, gw)` and the numbers of the heads `(B, L, Q, taken)` that each was made of, best first."""

    maps: Tensor
    heads: Tensor


def fuse(rows: AttentionRows, how: How = "mean", *, top: int | None = None) -> Fused:
    """Combine the heads of `rows`; the per-head maps themselves are `rows.patches`.

    Args:
        how: `mean` or `max` over all heads that `rows` holds; the number of one head; or `auto`, the mean over the
            `top` heads with the highest `head_scores`, chosen for each image, layer and query by itself.
        top: how many heads `auto` takes; default: a third of them, rounded up.

    A map holds shares of the whole row, so it sums to less than 1 where special tokens took mass; nothing is rescaled.
    Raises InputError for a head that `rows` does not hold, and a `top` that is not between 1 and the number of heads.
    """
    patches = rows.patches  # (B, L, H, Q, gh, gw)
    count = patches.shape[2]
    numbers = torch.tensor(rows.heads or range(count), device=patches.device)
    if top is not None and (how != "auto" or not 1 <= top <= count):
        raise InputError(f"top is {top}; it is for how='auto', and lies between 1 and {count} heads")
    if how == "auto":
        ranked = head_scores(rows).movedim(2, -1).sort(dim=-1, descending=True, stable=True).indices
        taken = ranked[..., : -(-count // 3) if top is None else top]
        maps = patches.movedim(2, 3)  # (B, L, Q, H, gh, gw)
        index = taken[..., None, None].expand(*taken.shape, *maps.shape[-2:])
        return Fused(maps.gather(3, index).mean(dim=3), numbers[taken])
    if how in ("mean", "max"):
        maps = patches.mean(dim=2) if how == "mean" else patches.amax(dim=2)
        return Fused(maps, numbers.expand(*maps.shape[:3], count))
    places = (numbers == how).nonzero().flatten() if isinstance(how, int) and not isinstance(how, bool) else numbers[:0]
    if not len(places):
        raise InputError(f"how={how!r} is unknown; ask for 'mean', 'max', 'auto' or one of the heads {rows.heads}")
    maps = patches[:, :, int(places[0])]
    return Fused(maps, numbers[places[:1]].expand(*maps.shape[:3], 1))


def head_scores(rows: AttentionRows) -> Tensor:
    """How much each head looks at one thing that others see too, `(B, L, H, Q)` in 0..1; no label is needed.

    The product of three shares: the head's mass on patches rather than special tokens; how peaked its map is, 1 less
    the entropy over log N; and how much of its map lies under the mean map of the other heads. The last one tells a
    head on the subject from one that is as peaked on the background, where the others do not look.
    """
    patches = rows.patches.flatten(-2)
    mass = patches.sum(dim=-1)
    maps = patches / mass.clamp_min(torch.finfo(mass.dtype).tiny)[..., None]
    count, tokens = maps.shape[2], maps.shape[-1]
    peaked = torch.ones_like(mass)
    if tokens > 1:
        peaked = 1 + torch.xlogy(maps, maps).sum(dim=-1) / math.log(tokens)
    shared = torch.ones_like(mass)
    if count > 1:
        others = (maps.sum(dim=2, keepdim=True) - maps) / (count - 1)
        shared = torch.minimum(maps, others).sum(dim=-1)
    return mass * peaked.clamp_min(0) * shared
