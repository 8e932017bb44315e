"""What colours pixels have: torchvision's ColorJitter and its companions, a whole batch at a time.

Each function takes uint8 `(B, C, height, width)`, a strength per picture where it has one, and a `mask` `(B,)` of the
pictures to change (by default all); it returns a new uint8 tensor. Of pictures with one channel, saturation, hue and
grayscale change nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.datasets.augment.dice import Dice

_GRAY = (0.2989, 0.587, 0.114)  # torchvision's rounding of ITU-R 601-2, which Pillow has too
_PIECE = 1 << 18  # values worked on at a time: the floats of a piece stay within a core's own cache


def change(pixels: Tensor, mask: Tensor | None, what: Callable[..., Tensor], *strengths: Tensor) -> Tensor:
    """`what(floats (n, C, height, width), strength, ...)` on the pictures of `mask`, in pieces that fit a cache.

    `what` gets floats that hold whole levels, may overwrite them, and returns such floats in 0 … 255. A strength
    `(B,)` reaches it as `(n, 1, 1, 1)`, a table of them `(B, m)` as `(n, m)`.
    """
    rows = _rows(pixels, mask)
    changed = pixels.clone()
    together = _PIECE // max(1, pixels[:1].numel()) if pixels.device.type == "cpu" else len(rows)
    for piece in rows.split(max(1, together)):
        if not len(piece):
            break
        own = [strength[piece.to(strength.device)].to(pixels.device, torch.float32) for strength in strengths]
        own = [strength.reshape(-1, 1, 1, 1) if strength.dim() == 1 else strength for strength in own]
        changed[piece] = what(pixels[piece].float(), *own).to(torch.uint8)
    return changed


def brightness(pixels: Tensor, factor: Tensor, mask: Tensor | None = None) -> Tensor:
    """Levels times `factor` `(B,)`."""
    return change(pixels, mask, _brightness, factor)


def contrast(pixels: Tensor, factor: Tensor, mask: Tensor | None = None) -> Tensor:
    """The distance of levels from the picture's mean gray times `factor` `(B,)`."""
    return change(pixels, mask, _contrast, factor)


def saturation(pixels: Tensor, factor: Tensor, mask: Tensor | None = None) -> Tensor:
    """The distance of levels from the pixel's gray times `factor` `(B,)`."""
    return change(pixels, mask, _saturation, factor)


def hue(pixels: Tensor, turn: Tensor, mask: Tensor | None = None) -> Tensor:
    """Hues turned by `turn` `(B,)`, as a share of the whole circle, in -0.5 … 0.5."""
    return change(pixels, mask, _hue, turn)


def jitter(
    pixels: Tensor,
    dice: Dice,
    name: str,
    strengths: tuple[float, float, float, float],
    mask: Tensor | None = None,
) -> Tensor:
    """ColorJitter of torchvision: brightness, contrast, saturation and hue, each random, in a random order.

    `strengths` are (brightness, contrast, saturation, hue): the first three factors are uniform in
    [max(0, 1 - strength), 1 + strength], the turn of the hue in [-strength, strength]; 0 leaves one out.
    """
    active = [number for number, strength in enumerate(strengths) if strength > 0]
    if pixels.shape[1] == 1:
        active = [number for number in active if number < 2]
    order = dice.uniform(f"{name} order", 4)[:, active].argsort(1)
    lows = torch.tensor([max(0.0, 1 - strength) for strength in strengths[:3]] + [-strengths[3]], dtype=torch.float64)
    highs = torch.tensor([1 + strength for strength in strengths[:3]] + [strengths[3]], dtype=torch.float64)
    factors = lows + (highs - lows) * dice.uniform(f"{name} factors", 4)

    def steps(floats: Tensor, order: Tensor, factors: Tensor) -> Tensor:
        for step in range(len(active)):
            for place, number in enumerate(active):
                rows = (order[:, step] == place).nonzero()[:, 0]
                if len(rows) == len(floats):
                    floats = _JITTERS[number](floats, factors[:, number].reshape(-1, 1, 1, 1))
                elif len(rows):
                    floats[rows] = _JITTERS[number](floats[rows], factors[rows, number].reshape(-1, 1, 1, 1))
        return floats

    if not active:
        return pixels.clone()
    return change(pixels, mask, steps, order, factors)


def grayscale(pixels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every channel becomes the gray of its pixel."""
    if pixels.shape[1] == 1:
        return pixels.clone()
    return change(pixels, mask, lambda floats: _gray(floats).expand_as(floats))


def solarize(pixels: Tensor, mask: Tensor | None = None, threshold: int = 128) -> Tensor:
    """Levels from `threshold` on are inverted."""
    rows = _rows(pixels, mask)
    changed = pixels.clone()
    chosen = pixels[rows]
    changed[rows] = chosen ^ (chosen >= threshold).view(torch.uint8).neg_()  # exclusive or with 255 inverts
    return changed


def _rows(pixels: Tensor, mask: Tensor | None) -> Tensor:
    return torch.arange(len(pixels)) if mask is None else mask.nonzero()[:, 0]


def _gray(floats: Tensor) -> Tensor:
    red, green, blue = floats.unbind(1)
    return (red * _GRAY[0]).add_(green, alpha=_GRAY[1]).add_(blue, alpha=_GRAY[2]).floor_().unsqueeze(1)


def _brightness(floats: Tensor, factor: Tensor) -> Tensor:
    return floats.mul_(factor).clamp_(0, 255).floor_()


def _contrast(floats: Tensor, factor: Tensor) -> Tensor:
    gray = floats if floats.shape[1] == 1 else _gray(floats)
    mean = gray.mean((1, 2, 3), keepdim=True)
    return floats.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 255).floor_()


def _saturation(floats: Tensor, factor: Tensor) -> Tensor:
    if floats.shape[1] == 1:
        return floats
    gray = _gray(floats)
    return floats.mul_(factor).add_(gray.mul_(1 - factor)).clamp_(0, 255).floor_()


def _hue(floats: Tensor, turn: Tensor) -> Tensor:
    if floats.shape[1] == 1:
        return floats
    red, green, blue = floats.unbind(1)
    low, high = floats.amin(1), floats.amax(1)
    chroma = high - low
    safe = chroma.clamp(min=1)  # gray has no hue; whatever is computed for it is multiplied by its chroma of 0
    angle = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    angle += 6 * turn[:, 0]
    # Levels of HSV back to RGB in closed form: en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    for channel, start in enumerate((5, 3, 1)):
        corner = angle + start
        corner -= (corner * (1 / 6)).floor_() * 6  # its remainder, several times as fast as torch.remainder
        rise = torch.minimum(corner, 4 - corner).clamp_(0, 1)
        floats[:, channel] = high - chroma * rise
    # torchvision scales 0 … 1 to levels by 255.999 and drops the fraction
    return floats.mul_(255.999 / 255).floor_()


_JITTERS = (_brightness, _contrast, _saturation, _hue)
