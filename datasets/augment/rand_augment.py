"""RandAugment in timm's spelling, `rand-m9-n2-mstd0.5-inc1`: a few random operations of random strength per picture.

Cubuk et al., 2020 (arXiv:1909.13719). The operations are Pillow's, one picture at a time, as in timm: they are
compiled, exact by definition, and only pictures that drew one pay for it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from regard.datasets.augment.dice import Dice
from regard.vit.errors import InputError

_FULL = 10.0  # the magnitude at which an operation reaches the end of its range
_KNOWN = (
    "known are m (magnitude), n (operations per picture), p (the chance of each), mstd (deviation of the magnitude),"
    " mmax (its bound) and inc (1: strength grows with magnitude), as in rand-m9-n2-mstd0.5-inc1"
)
_PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class RandAugment:
    """The settings of RandAugment, with timm's defaults.

    Attributes:
        magnitude: 0 … `most`; 10 is the full range of an operation.
        layers: operations drawn per picture, with replacement.
        probability: of each drawn operation to be applied.
        deviation: of the normal distribution around `magnitude`; infinite draws uniformly from 0 … `magnitude`.
        most: upper bound of the drawn magnitude.
        increasing: every operation grows stronger with the magnitude; otherwise timm's first table, where
            posterize and solarize grow weaker and the four enhancements pass through "no change".
    """

    magnitude: int = 10
    layers: int = 2
    probability: float = 0.5
    deviation: float = 0.0
    most: int = 10
    increasing: bool = False

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations drawn from, timm's."""
        return _NAMES_INCREASING if self.increasing else _NAMES


@lru_cache(maxsize=32)
def parse_rand_augment(spelling: str) -> RandAugment:
    """Settings from timm's spelling. Raises InputError for one that is not known."""
    first, *parts = spelling.split("-")
    if first != "rand":
        raise InputError(f"rand_augment is {spelling!r}; it must begin with 'rand'; {_KNOWN}")
    values: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"(m|n|p|mstd|mmax|inc)(\d+(?:\.\d+)?|(?<=mstd)inf)", part)
        if match is None or match[1] in values or ("." in match[2] and match[1] not in ("p", "mstd")):
            raise InputError(f"rand_augment {spelling!r}: {part!r} is not understood; {_KNOWN}")
        values[match[1]] = float(match[2])
    settings = RandAugment(
        magnitude=int(values.get("m", 10)),
        layers=int(values.get("n", 2)),
        probability=values.get("p", 0.5),
        deviation=math.inf if values.get("mstd", 0) > 100 else values.get("mstd", 0.0),
        most=int(values.get("mmax", 0)) or 10,
        increasing=bool(values.get("inc", 0)),
    )
    if settings.layers < 1 or settings.probability > 1 or values.get("inc", 0) not in (0, 1):
        raise InputError(f"rand_augment {spelling!r}: n is at least 1, p at most 1, inc 0 or 1; {_KNOWN}")
    return settings


def rand_augment(
    pixels: Tensor,
    dice: Dice,
    spelling: str,
    *,
    name: str = "rand augment",
    fill: tuple[int, ...] = (124, 116, 104),
    interpolation: str = "bicubic",
) -> Tensor:
    """RandAugment on each picture of a batch.

    Args:
        pixels: uint8 `(B, C, height, width)`, C of 1 or 3, on the CPU.
        dice: the random numbers of the batch.
        spelling: timm's, as `rand-m9-n2-mstd0.5-inc1`.
        name: what the draws are for; another name draws others.
        fill: what comes in where a picture is moved; of a gray picture their mean.
        interpolation: `bilinear` or `bicubic`, of the rotated and sheared picture.

    Returns a new uint8 tensor. Raises InputError for an unknown spelling or interpolation.
    """
    settings = parse_rand_augment(spelling)
    if interpolation not in _PILLOW:
        raise InputError(f"interpolation of rand_augment is {interpolation!r}; choose one of {', '.join(_PILLOW)}")
    layers = settings.layers
    which = dice.integers(f"{name} which", len(settings.operations), layers).tolist()
    applied = (dice.uniform(f"{name} applied", layers) < settings.probability).tolist()
    magnitudes = _magnitudes(settings, dice, name).tolist()
    signs = (dice.uniform(f"{name} sign", layers) < 0.5).tolist()
    changed = pixels.clone()
    levels = fill_of(fill, pixels.shape[1])
    filling = levels if len(levels) > 1 else levels[0]
    for row in range(len(pixels)):
        image = None
        for layer in range(layers):
            if not applied[row][layer]:
                continue
            image = _as_image(pixels[row]) if image is None else image
            operation = settings.operations[which[row][layer]]
            strength = strength_of(operation, magnitudes[row][layer], negative=signs[row][layer])
            image = apply(operation, image, strength, fill=filling, interpolation=interpolation)
        if image is not None:
            array = torch.from_numpy(np.array(image))
            changed[row] = array[None] if array.dim() == 2 else array.permute(2, 0, 1)
    return changed


def fill_of(fill: tuple[int, ...], channels: int) -> tuple[int, ...]:
    """A colour for a picture of so many channels: another number of them gets its mean."""
    return tuple(fill) if len(fill) == channels else (round(sum(fill) / len(fill)),) * channels


def strength_of(operation: str, magnitude: float, *, negative: bool = False) -> float:
    """The argument of an operation at a magnitude (timm's tables): degrees, a factor, bits, a threshold or a share."""
    level = magnitude / _FULL
    signed = -level if negative else level
    if operation == "Rotate":
        return signed * 30
    if operation in ("ShearX", "ShearY"):
        return signed * 0.3
    if operation in ("TranslateXRel", "TranslateYRel"):
        return signed * 0.45
    if operation == "Posterize":
        return int(level * 4)
    if operation == "PosterizeIncreasing":
        return 4 - int(level * 4)
    if operation == "Solarize":
        return min(256, int(level * 256))
    if operation == "SolarizeIncreasing":
        return 256 - min(256, int(level * 256))
    if operation == "SolarizeAdd":
        return min(128, int(level * 110))
    if operation.endswith("Increasing"):
        return max(0.1, 1 + signed * 0.9)
    return level * 1.8 + 0.1


def apply(
    operation: str, image: Image.Image, strength: float, *, fill: Any = None, interpolation: str = "bicubic"
) -> Image.Image:
    """One operation, by timm's name, on a picture of mode L or RGB; `fill` is a level or a colour."""
    kind = operation.removesuffix("Increasing")
    if kind in _MOVES:
        matrix = _MOVES[kind](strength, image)
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix, resample=_PILLOW[interpolation], fillcolor=fill
        )
    if kind == "Rotate":
        return image.rotate(strength, resample=_PILLOW[interpolation], fillcolor=fill)
    return _COLOURS[kind](image, strength)


def _magnitudes(settings: RandAugment, dice: Dice, name: str) -> Tensor:
    """`(B, layers)`, float64."""
    drawn = dice.uniform(f"{name} magnitude", settings.layers)
    if math.isinf(settings.deviation):
        return (drawn * settings.magnitude).clamp(0, settings.most)
    if not settings.deviation:
        return torch.full_like(drawn, settings.magnitude).clamp(0, settings.most)
    normal = torch.special.ndtri(drawn.clamp(min=2.0**-53))
    return (settings.magnitude + settings.deviation * normal).clamp(0, settings.most)


def _as_image(pixels: Tensor) -> Image.Image:
    if len(pixels) == 1:
        return Image.fromarray(pixels[0].contiguous().numpy())
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _solarize_add(image: Image.Image, strength: float) -> Image.Image:
    table = [min(255, level + int(strength)) if level < 128 else level for level in range(256)]
    return image.point(table * len(image.getbands()))


def _posterize(image: Image.Image, strength: float) -> Image.Image:
    """Pillow's, and a black picture for no bits at all, which timm's tables allow and Pillow no longer does."""
    mask = 256 - (1 << (8 - int(strength)))
    return image.point([level & mask for level in range(256)] * len(image.getbands()))


_MOVES: dict[str, Callable[[float, Image.Image], tuple[float, ...]]] = {
    "ShearX": lambda strength, image: (1, strength, 0, 0, 1, 0),
    "ShearY": lambda strength, image: (1, 0, 0, strength, 1, 0),
    "TranslateXRel": lambda strength, image: (1, 0, strength * image.width, 0, 1, 0),
    "TranslateYRel": lambda strength, image: (1, 0, 0, 0, 1, strength * image.height),
}
_COLOURS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "AutoContrast": lambda image, strength: ImageOps.autocontrast(image),
    "Equalize": lambda image, strength: ImageOps.equalize(image),
    "Invert": lambda image, strength: ImageOps.invert(image),
    "Posterize": _posterize,
    "Solarize": lambda image, strength: ImageOps.solarize(image, int(strength)),
    "SolarizeAdd": _solarize_add,
    "Color": lambda image, strength: ImageEnhance.Color(image).enhance(strength),
    "Contrast": lambda image, strength: ImageEnhance.Contrast(image).enhance(strength),
    "Brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(strength),
    "Sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(strength),
}
_NAMES = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_NAMES_INCREASING = tuple(f"{name}Increasing" if name in _GROWING else name for name in _NAMES)
