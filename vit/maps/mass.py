"""DINO's mass threshold: the fewest patches that hold a share of the attention."""

import torch
from torch import Tensor

from regard.vit.errors import InputError

# What decimal numbers lose in binary; without it, whether .4 + .3 + .2 reaches .9 would be up to rounding.
_ROUNDING = 1e-12


def keep_mass(maps: Tensor, share: float = 0.6) -> Tensor:
    """Which patches hold `share` of a map's mass, the largest first: `(…, gh, gw) -> bool (…, gh, gw)`.

    The kept mass is at least `share` of the whole, and without the smallest kept patch it would be less (Caron et al.,
    2021, arXiv:2104.14294). Summed in float64, so that thousands of patches do not drift; of equal patches the earlier
    in reading order is kept first. A map of zeros keeps nothing. The scale of a map does not matter.

    Raises InputError for a share outside (0, 1], a negative value, and one that is not finite.
    """
    if not 0 < share <= 1:
        raise InputError(f"share is {share}; it must lie in (0, 1]")
    if maps.dim() < 2:
        raise InputError(f"keep_mass takes maps (…, grid height, grid width), not {tuple(maps.shape)}")
    flat = maps.detach().flatten(-2).double()
    if flat.numel() and not (flat.isfinite().all() and (flat >= 0).all()):
        raise InputError("keep_mass takes maps of finite values, none of them below 0")
    if share == 1:
        return maps > 0
    ranked, order = flat.sort(dim=-1, descending=True, stable=True)
    reached = ranked.cumsum(dim=-1)
    before = reached - ranked  # the mass of the patches that are larger
    kept = before < (share - _ROUNDING) * reached[..., -1:]
    return torch.zeros_like(kept).scatter(-1, order, kept).view(maps.shape)
