"""Is what a map points at what the score rests on? Pixels are taken away, or given, in the order of a map.

Pixels are changed before the normalisation: 0 is black, not the mean colour that a 0 after it would be. The scorer gets
pixels and normalises them itself, as in

    score = lambda pixels: model.classify(model.preprocess.normalize(pixels)).softmax(-1)[:, label]

B images, C channels, (gh, gw) the grid of a map.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.maps.measures import on_pixels

Score = Callable[[Tensor], Tensor]  # pixels (B, C, height, width) -> one value per image (B,)
Order = Literal["most", "least"]
Fill = Literal["mean", "blur"]
TENTHS = tuple(share / 10 for share in range(1, 10))
_EVERY_TWENTIETH = tuple(share / 20 for share in range(21))


@dataclass(frozen=True, eq=False)
class Curve:
    """A score as more and more pixels are changed.

    Attributes:
        kind: what was done.
        shares: of the pixels, rising.
        values: the score of each image at each share, float64 `(B, shares)`.
    """

    kind: str
    shares: tuple[float, ...]
    values: Tensor

    @property
    def mean(self) -> Tensor:
        """Over the images, `(shares,)`."""
        return self.values.mean(dim=0)

    @property
    def auc(self) -> float:
        """Area under the mean curve over the width of its shares: the mean height, in the unit of the score."""
        shares = torch.tensor(self.shares, dtype=torch.float64)
        return float(torch.trapezoid(self.mean.cpu(), shares) / (shares[-1] - shares[0]))

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "shares": list(self.shares), "mean": self.mean.tolist(), "auc": self.auc}

    def __str__(self) -> str:
        return f"{self.kind}: AUC {self.auc:.4f} over {len(self.values)} images"


def deletion(
    score: Score, pixels: Tensor, maps: Tensor, shares: Sequence[float] = _EVERY_TWENTIETH, fill: float | Fill = 0.0
) -> Curve:
    """Take the most important pixels away first; a map that is right makes the score fall fast, so lower is better.

    RISE (Petsiuk et al., 2018, arXiv:1806.07421). `score` is best a probability.
    """
    return _curve("deletion", score, pixels, maps, shares, "most", fill, insert=False)


def insertion(
    score: Score, pixels: Tensor, maps: Tensor, shares: Sequence[float] = _EVERY_TWENTIETH, fill: float | Fill = "blur"
) -> Curve:
    """Give the most important pixels first, starting from a blurred image, as RISE does; higher is better."""
    return _curve("insertion", score, pixels, maps, shares, "most", fill, insert=True)


def positive_perturbation(
    score: Score, pixels: Tensor, maps: Tensor, shares: Sequence[float] = TENTHS, fill: float | Fill = 0.0
) -> Curve:
    """Black out 10 to 90 % of the pixels, the most important first (Chefer et al., 2021, arXiv:2012.09838).

    `score` is 1 where an image is still classified rightly and 0 elsewhere. Lower is better.
    """
    return _curve("positive perturbation", score, pixels, maps, shares, "most", fill, insert=False)


def negative_perturbation(
    score: Score, pixels: Tensor, maps: Tensor, shares: Sequence[float] = TENTHS, fill: float | Fill = 0.0
) -> Curve:
    """The same, the least important first. Higher is better."""
    return _curve("negative perturbation", score, pixels, maps, shares, "least", fill, insert=False)


def perturbed(
    pixels: Tensor,
    maps: Tensor,
    share: float,
    first: Order = "most",
    fill: float | Fill = 0.0,
    *,
    insert: bool = False,
) -> Tensor:
    """Pixels `(B, C, height, width)`, uint8 or float, with a share of them changed in the order of `maps (B, gh, gw)`.

    The chosen pixels become `fill`; with `insert` they alone stay. `fill` is a value in the unit of the pixels, `mean`
    (each image's mean colour) or `blur`. Within a patch, and of equal patches, the first in reading order goes first.

    Raises InputError for maps and pixels that do not go together, and a share outside [0, 1].
    """
    return _Ordered(pixels, maps, first, fill)(share, insert)


class _Ordered:
    """The order of an image's pixels and what stands for a missing one, found once for all shares."""

    def __init__(self, pixels: Tensor, maps: Tensor, first: Order, fill: float | Fill):
        if pixels.dim() != 4 or maps.dim() != 3 or len(pixels) != len(maps):
            raise InputError(
                f"pixels {tuple(pixels.shape)} and maps {tuple(maps.shape)}: (B, C, height, width) and (B, gh, gw)"
            )
        if first not in ("most", "least"):
            raise InputError(f"first is {first!r}; choose most or least")
        if not maps.isfinite().all():
            raise InputError("a map holds a value that is not finite, which has no place in an order")
        heat = on_pixels(maps, (pixels.shape[2], pixels.shape[3])).flatten(1)
        order = heat.argsort(dim=1, descending=first == "most", stable=True)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        self.rank = torch.zeros_like(order).scatter(1, order, places).view(len(pixels), 1, *pixels.shape[2:])
        self.pixels, self.filled = pixels, _filled(pixels, fill)

    def __call__(self, share: float, insert: bool) -> Tensor:
        if not 0 <= share <= 1:
            raise InputError(f"share is {share}; it must lie in [0, 1]")
        chosen = self.rank.to(self.pixels.device) < round(share * self.rank[0].numel())
        return torch.where(chosen ^ insert, self.filled, self.pixels)


@torch.no_grad()
def _curve(
    kind: str,
    score: Score,
    pixels: Tensor,
    maps: Tensor,
    shares: Sequence[float],
    first: Order,
    fill: float | Fill,
    *,
    insert: bool,
) -> Curve:
    if len(shares) < 2 or list(shares) != sorted(set(shares)):
        raise InputError(f"shares are {list(shares)}; give at least two, each larger than the one before")
    change, values = _Ordered(pixels, maps, first, fill), []
    for share in shares:
        scored = score(change(share, insert))
        if scored.shape != (len(pixels),):
            raise InputError(f"score returned {tuple(scored.shape)}; it must return one value per image, (B,)")
        values.append(scored.double())
    return Curve(kind, tuple(shares), torch.stack(values, dim=1))


def _filled(pixels: Tensor, fill: float | Fill) -> Tensor:
    if fill == "mean":
        whole = pixels.double().mean(dim=(2, 3), keepdim=True).expand(pixels.shape)
    elif fill == "blur":
        whole = _blurred(pixels.double())
    elif isinstance(fill, (int, float)):
        whole = torch.full_like(pixels, fill, dtype=torch.float64)
    else:
        raise InputError(f"fill is {fill!r}; give a value, 'mean' or 'blur'")
    return (whole if pixels.is_floating_point() else whole.round().clamp(0, 255)).to(pixels.dtype)


def _blurred(pixels: Tensor) -> Tensor:
    """Gaussian blur of a tenth of the shorter side: nothing but a colour here and there is left."""
    sigma = min(pixels.shape[2:]) / 10
    for axis in (2, 3):
        reach = min(int(3 * sigma) + 1, pixels.shape[axis] - 1)
        bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=pixels.device) / sigma) ** 2).double()
        kernel = (bell / bell.sum()).view(1, 1, *((-1, 1) if axis == 2 else (1, -1)))
        around = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        padded = F.pad(pixels, around, mode="reflect")
        pixels = F.conv2d(padded.flatten(0, 1)[:, None], kernel).view(pixels.shape)
    return pixels
