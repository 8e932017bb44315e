"""Gaussian blur in the two recipes that DINO's releases have: Pillow's three box blurs, and torchvision's nine taps.

Both are separable: a line of taps per picture, first across, then down.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from regard.datasets.augment.colour import change
from regard.vit.errors import InputError

Kernel = Literal["pillow", "kernel 9"]


def blur(pixels: Tensor, sigma: Tensor, mask: Tensor | None = None, kernel: Kernel = "pillow") -> Tensor:
    """The pictures of `mask` `(B,)` blurred, each with its own sigma.

    Args:
        pixels: uint8 `(B, C, height, width)`.
        sigma: `(B,)`, in pixels; Pillow calls it radius.
        mask: which pictures; by default all.
        kernel: `pillow` is `ImageFilter.GaussianBlur`, three passes of a box blur with rounding between them and
            repeated edges (DINO v1); `kernel 9` is torchvision's GaussianBlur with nine taps and mirrored edges
            (DINOv2 and v3).

    Raises:
        InputError: for another kernel.
    """
    if kernel not in get_args(Kernel):
        raise InputError(f"the blur's kernel is {kernel!r}; choose one of {', '.join(get_args(Kernel))}")
    chosen = sigma if mask is None else sigma[mask.to(sigma.device)]
    if not len(chosen):
        return pixels.clone()
    if kernel == "pillow":
        reach = _box_reach(float(chosen.max()))
        return change(pixels, mask, lambda floats, sigma: _boxes(floats, sigma, reach), sigma)
    return change(pixels, mask, _nine_taps, sigma)


def _box_reach(sigma: float) -> int:
    """How far the box of this sigma reaches, its fractional end included."""
    return int((math.sqrt(4 * sigma**2 + 1) - 1) / 2) + 1


def _boxes(floats: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Three box blurs have the variance of the Gaussian (Gwosdek et al., 2011, doi:10.1007/978-3-642-24785-9_38)."""
    variance = sigma.double() ** 2 / 3
    half = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    end = (2 * half + 1) * (half * (half + 1) - 3 * variance) / (6 * (variance - (half + 1) ** 2))
    # Pillow's weights are whole 2^-24ths, rounded down.
    middle = (2**24 / (2 * half + 1 + 2 * end)).floor()
    end = ((2**24 - (2 * half + 1) * middle) / 2).floor()
    taps = torch.arange(reach + 1, device=floats.device)
    weights = torch.where(taps <= half, middle, torch.where(taps == half + 1, end, 0.0)) / 2**24
    for dim in (3, 2):
        for _ in range(3):
            floats = _line(floats, weights.float(), dim, "replicate").add_(0.5).floor_()
    return floats.clamp_(0, 255)


def _nine_taps(floats: Tensor, sigma: Tensor) -> Tensor:
    taps = torch.arange(-4, 5, device=floats.device)
    weights = torch.softmax(-0.5 * (taps / sigma) ** 2, -1)[..., 4:]
    for dim in (3, 2):
        floats = _line(floats, weights, dim, "reflect")
    return floats.round_().clamp_(0, 255)


def _line(floats: Tensor, weights: Tensor, dim: int, edge: str) -> Tensor:
    """A symmetric filter along one dimension; `weights` `(n, 1, 1, taps)`, from the middle outwards."""
    reach, length = weights.shape[-1] - 1, floats.shape[dim]
    if edge == "reflect" and length <= reach:
        # A picture too small to be mirrored once is mirrored again and again; torchvision refuses it.
        places = torch.arange(-reach, length + reach, device=floats.device) % max(1, 2 * (length - 1))
        padded = floats.index_select(dim, torch.minimum(places, 2 * (length - 1) - places).abs())
    else:
        padded = functional.pad(floats, (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach), mode=edge)
    total = floats * weights[..., :1]
    for tap in range(1, reach + 1):
        both = padded.narrow(dim, reach - tap, length) + padded.narrow(dim, reach + tap, length)
        total.addcmul_(both, weights[..., tap : tap + 1])
    return total
