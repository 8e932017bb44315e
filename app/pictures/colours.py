"""Numbers -> RGB over a picture, by perceptually uniform colour maps."""

import functools

import numpy as np
from PIL import Image
from torch import Tensor

from regard.vit.maps.grid import Frame

ATTENTION, NORMS = "magma", "viridis"
_STEPS = 256
_UNSEEN = 0.8  # how white the picture is washed where the model saw nothing; dark means a low value
_HEADS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (213, 94, 0), (204, 121, 167), (240, 228, 66), (0, 114, 178))
"""Colours that people of any colour vision tell apart (Okabe & Ito, 2008)."""


@functools.cache
def table(name: str) -> np.ndarray:
    """`(256, 3)` colours of a colour map, uint8."""
    import matplotlib

    return np.rint(matplotlib.colormaps[name](np.linspace(0, 1, _STEPS))[:, :3] * 255).astype(np.uint8)


def blended(grey: np.ndarray, share: np.ndarray, colours: str = ATTENTION) -> np.ndarray:
    """Grey `(h, w)` under the colours of `share` in 0..1 `(h, w)`, uint8 RGB. NaN is washed white.

    The lower a value, the more of the picture shows; the bar beside a map is blended the same way over mid-grey.
    """
    unseen = np.isnan(share)
    share = np.clip(np.nan_to_num(share), 0, 1)
    colour = table(colours)[np.rint(share * (_STEPS - 1)).astype(int)].astype(np.float32)
    alpha = (0.35 + 0.55 * share)[..., None].astype(np.float32)
    base = grey.astype(np.float32)[..., None]
    mixed = (1 - alpha) * base + alpha * colour
    mixed[unseen] = _washed(base[unseen])
    return np.rint(mixed).astype(np.uint8)


def _washed(grey: np.ndarray) -> np.ndarray:
    return _UNSEEN * 255 + (1 - _UNSEEN) * grey


def overlay(picture: Image.Image, heat: Tensor, frame: Frame, peak: float, colours: str = ATTENTION) -> Image.Image:
    """A map over the greyed picture, where its patches lie there, coloured from 0 to `peak`; patches keep hard edges.

    `picture` is the whole picture at any size.
    """
    placed = frame.place(heat.double().cpu(), picture.height, picture.width).numpy()
    return Image.fromarray(blended(np.asarray(picture.convert("L")), placed / (peak or 1.0), colours))


def painted(picture: Image.Image, colour: Tensor, alpha: Tensor, frame: Frame) -> Image.Image:
    """Patches in colours of their own `(gh, gw, 3)` in 0..1 over the greyed picture, each as dense as `alpha` says."""
    rgb = frame.place(colour.double().cpu().movedim(-1, 0), picture.height, picture.width).movedim(0, -1).numpy()
    dense = frame.place(alpha.double().cpu(), picture.height, picture.width).numpy()[..., None]
    grey = np.asarray(picture.convert("L")).astype(np.float64)[..., None]
    mixed = np.where(np.isnan(dense), _washed(grey), (1 - dense) * grey + dense * rgb * 255)
    return Image.fromarray(np.rint(np.nan_to_num(mixed)).astype(np.uint8))


def head_colours(count: int) -> list[tuple[int, int, int]]:
    """One colour per head: up to seven that are told apart with any colour vision, then evenly spaced hues."""
    if count <= len(_HEADS):
        return list(_HEADS[:count])
    import colorsys

    hues = [colorsys.hsv_to_rgb(i / count, 0.85 if i % 2 else 0.55, 1.0 if i % 2 else 0.9) for i in range(count)]
    return [(round(r * 255), round(g * 255), round(b * 255)) for r, g, b in hues]


def composite(maps: Tensor, hide: float = 0.2) -> tuple[Tensor, Tensor]:
    """All heads in one map, as in figure 3 of DINO (Caron et al., 2021, as its author told the recipe).

    Each head's map `(H, gh, gw)` is stretched from its least to its greatest, what is below `hide` is dropped, and a
    patch takes the colour of the head that is strongest there, as dense as the root of that strength.
    Returns colours `(gh, gw, 3)` in 0..1 and density `(gh, gw)`.
    """
    maps = maps.double()
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    stretched = (maps - low) / (high - low).clamp_min(1e-12)
    best, which = stretched.max(dim=0)
    colours = maps.new_tensor(head_colours(len(maps))) / 255
    return colours[which], 0.85 * best.where(best >= hide, best.new_zeros(())).sqrt()
