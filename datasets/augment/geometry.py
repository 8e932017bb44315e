"""Where pixels go: random crops, antialiased resizing of a box, flips and shifts, a whole batch at a time.

A box is (top, left, height, width) in pixels of its own picture. Everything here runs on any device.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.datasets.augment.dice import Dice
from regard.vit.errors import InputError

_TRIES = 10


def crop_boxes(
    sizes: Sequence[tuple[int, int]],
    dice: Dice,
    name: str,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """A random crop of each picture, by the rule of torchvision's RandomResizedCrop (Inception's crops).

    The crop's share of the area is uniform in `scale`, its width / height log-uniform in `ratio`; after ten tries that
    do not fit, the central crop of the nearest allowed ratio is taken.

    Args:
        sizes: (height, width) of each of the B pictures, in pixels.
        dice: the random numbers of the batch.
        name: what the crop is for; another name draws another crop.

    Returns:
        Float64 `(B, 4)`: top, left, height, width, all of them whole pixels.
    """
    pictures = torch.as_tensor(sizes, dtype=torch.float64).reshape(-1, 2)
    tall, wide = pictures[:, :1], pictures[:, 1:]
    tries = dice.uniform(f"{name} tries", 2 * _TRIES).reshape(-1, 2, _TRIES)
    area = tall * wide * (scale[0] + (scale[1] - scale[0]) * tries[:, 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * tries[:, 1])
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths > 0) & (widths <= wide) & (heights > 0) & (heights <= tall)
    first = fits.byte().argmax(1, keepdim=True)  # of equal values argmax names the first
    found = fits.any(1)
    height, width = heights.gather(1, first)[:, 0], widths.gather(1, first)[:, 0]
    tall, wide = tall[:, 0], wide[:, 0]
    place = dice.uniform(f"{name} place", 2)
    top, left = (place[:, 0] * (tall - height + 1)).floor(), (place[:, 1] * (wide - width + 1)).floor()
    if not found.all():
        thin, flat = wide / tall < ratio[0], wide / tall > ratio[1]
        # Where torchvision's rounding ends at no pixel at all, one is kept: a picture of 1 x 1 is its own crop.
        central_height = torch.where(thin, (wide / ratio[0]).round().clamp(min=1), tall)
        central_width = torch.where(flat, (tall * ratio[1]).round().clamp(min=1), wide)
        height, width = torch.where(found, height, central_height), torch.where(found, width, central_width)
        top = torch.where(found, top, ((tall - height) / 2).floor())
        left = torch.where(found, left, ((wide - width) / 2).floor())
    return torch.stack((top, left, height, width), 1)


def whole_boxes(sizes: Sequence[tuple[int, int]]) -> Tensor:
    """The box of each whole picture, float64 `(B, 4)`."""
    pictures = torch.as_tensor(sizes, dtype=torch.float64).reshape(-1, 2)
    return torch.cat((torch.zeros_like(pictures), pictures), 1)


def resample(pixels: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: str = "bicubic") -> Tensor:
    """A box of each picture, resized with antialiasing as Pillow's `resize(size, box=...)` does it.

    Like there, a filter near the box's edge also reads the pixels beyond it, and what lies between the horizontal and
    the vertical pass is rounded to 8 bits. The horizontal pass comes first, as in Pillow up to 12; later ones begin
    with the vertical pass where that is less work, which differs where bicubic overshoots at hard edges.

    Args:
        pixels: uint8 `(B, C, height, width)`.
        boxes: `(B, 4)`, top, left, height, width in pixels, within the picture; fractions are allowed.
        size: (height, width) of the result.
        interpolation: `bilinear` or `bicubic`.

    Returns:
        Uint8 `(B, C, *size)`, on the device of `pixels`; `pixels` itself where nothing is to be done.

    Raises:
        InputError: for another filter.
    """
    if interpolation not in _FILTERS:
        raise InputError(f"interpolation of arrays is {interpolation!r}; choose one of {', '.join(_FILTERS)}")
    batch, channels, height, width = pixels.shape
    boxes = boxes.to(torch.float64)
    if not batch or (size == (height, width) and bool((boxes == boxes.new_tensor((0, 0, height, width))).all())):
        return pixels
    across = _weights(boxes[:, 1], boxes[:, 3], width, size[1], interpolation).to(pixels.device)
    down = _weights(boxes[:, 0], boxes[:, 2], height, size[0], interpolation).to(pixels.device)
    rows = torch.bmm(pixels.reshape(batch, channels * height, width).float(), across.transpose(1, 2))
    rows = _as_levels(rows).reshape(batch * channels, height, size[1])
    if channels > 1:
        down = down.repeat_interleave(channels, 0)
    return _as_levels(torch.bmm(down, rows)).byte().reshape(batch, channels, *size)


def flip(pixels: Tensor, mask: Tensor) -> Tensor:
    """The pictures whose `mask` is True mirrored left to right; `pixels` `(B, C, height, width)`, `mask` `(B,)`."""
    flipped = pixels.clone()
    flipped[mask] = pixels[mask].flip(-1)
    return flipped


def shift(pixels: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """Each picture moved down by `dy` and to the right by `dx` whole pixels; what it leaves repeats its edge.

    `pixels` is `(B, C, height, width)`, `dy` and `dx` are whole numbers `(B,)`.
    """
    height, width = pixels.shape[-2:]
    dy, dx = dy.to(pixels.device), dx.to(pixels.device)
    rows = (torch.arange(height, device=pixels.device) - dy[:, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - dx[:, None]).clamp(0, width - 1)
    places = (rows[:, :, None] * width + columns[:, None]).flatten(1)[:, None].expand(-1, pixels.shape[1], -1)
    return pixels.flatten(2).gather(2, places).reshape(pixels.shape)


def erase_boxes(
    size: tuple[int, int],
    dice: Dice,
    name: str,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 1 / 0.3),
) -> Tensor:
    """What random erasing takes out of each picture of one size (Zhong et al., 2020, arXiv:1708.04896), as timm.

    The share of the area is uniform in `area`, height / width log-uniform in `ratio`; the box is smaller than the
    picture on both sides. After ten tries that do not fit, nothing is taken: a box without height.

    Returns float64 `(B, 4)`: top, left, height, width, whole pixels.
    """
    tall, wide = size
    tries = dice.uniform(f"{name} tries", 2 * _TRIES).reshape(-1, 2, _TRIES)
    share = tall * wide * (area[0] + (area[1] - area[0]) * tries[:, 0])
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * tries[:, 1])
    heights, widths = (share * aspect).sqrt().round(), (share / aspect).sqrt().round()
    fits = (heights < tall) & (widths < wide)
    first = fits.byte().argmax(1, keepdim=True)
    height, width = (sides.gather(1, first)[:, 0] * fits.any(1) for sides in (heights, widths))
    place = dice.uniform(f"{name} place", 2)
    top, left = (place[:, 0] * (tall - height + 1)).floor(), (place[:, 1] * (wide - width + 1)).floor()
    return torch.stack((top, left, height, width), 1)


def erase(pixels: Tensor, boxes: Tensor, fill: Tensor) -> Tensor:
    """Each picture's box `(B, 4)` filled (top, left, height, width, whole pixels); one without height stays as it is.

    `fill` is uint8, of a shape that broadcasts to that of `pixels`: a colour `(C, 1, 1)`, or noise of their shape.
    """
    top, left, tall, wide = boxes.to(pixels.device).long()[:, :, None, None].unbind(1)
    rows = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
    columns = torch.arange(pixels.shape[3], device=pixels.device)
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)  # (B, height, width)
    return torch.where(inside[:, None], fill.to(pixels.device), pixels)


def _weights(start: Tensor, length: Tensor, before: int, after: int, interpolation: str) -> Tensor:
    """What each of the `before` pixels of a line gives to each of the `after` ones, float32 `(B, after, before)`."""
    shape, reach = _FILTERS[interpolation]
    scale = (length / after)[:, None]
    stretch = scale.clamp(min=1)
    centre = start[:, None] + (torch.arange(after, device=start.device) + 0.5) * scale
    first = (centre - reach * stretch + 0.5).floor()
    steps = torch.arange(math.ceil(2 * reach * float(stretch.max())) + 1, device=start.device)  # beyond, all is zero
    distance = (((first + 0.5 - centre)[:, :, None] + steps) / stretch[:, :, None]).float()
    pixel = first.long()[:, :, None] + steps
    inside = pixel.clamp(0, before - 1)
    weights = shape(distance).mul_(pixel == inside)
    weights = (weights * (2**22 / weights.sum(-1, keepdim=True))).round_() / 2**22  # as precise as Pillow's
    return weights.new_zeros(len(start), after, before).scatter_add_(2, inside, weights)


def _as_levels(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)  # halves go up, as in Pillow


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_(min=0)


def _bicubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, as two truncated powers: one has its end at 2, the other at 1."""
    outer, inner = (2 - x.abs()).clamp_(min=0), (1 - x.abs()).clamp_(min=0)
    return (0.5 * outer).sub_(0.5).mul_(outer).mul_(outer).add_((1 - 2 * inner).mul_(inner).mul_(inner))


_FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {"bilinear": (_bilinear, 1), "bicubic": (_bicubic, 2)}
