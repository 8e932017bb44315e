"""How well maps and boxes agree with what people drew: Jaccard, pointing game, mass in a mask, CorLoc.

H heads, O objects, (gh, gw) the grid of a map, (height, width) the pixels of an object's mask. A map is laid on the
pixels patch by patch, each patch's value on its whole square, as published measurements of attention maps do.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.maps.mass import keep_mass


@dataclass(frozen=True)
class Jaccard:
    """How well masks made of a set's maps cover its objects: mean IoU over each image's objects, then over images.

    Attributes:
        oracle: with the best head for each object, chosen by looking at the truth: an upper bound, and what papers call
            the best head.
        fixed: with the one head that is best over the whole set.
        fixed_head: its number.
        mean_map: with the mean of all heads' maps.
        heads: each head alone.
        images, objects: counts.
        share: of the mass that a mask keeps.
    """

    oracle: float
    fixed: float
    fixed_head: int
    mean_map: float
    heads: tuple[float, ...]
    images: int
    objects: int
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"Jaccard of the masks of {self.share:.0%} mass, {self.objects} objects on {self.images} images:"
            f" oracle head {self.oracle:.1%}, fixed head {self.fixed_head} {self.fixed:.1%},"
            f" mean map {self.mean_map:.1%}"
        )


def jaccard(maps: Sequence[Tensor], objects: Sequence[Tensor], share: float = 0.6) -> Jaccard:
    """The protocol of DINO (Caron et al., 2021, arXiv:2104.14294), its oracle told apart from what could be used.

    Args:
        maps: for each image every head's map `(H, gh, gw)`; grids may differ.
        objects: for each image the masks of its objects, bool `(O, height, width)`.
        share: of a map's mass that its mask keeps (`keep_mass`).

    Raises InputError where the lists do not fit each other.
    """
    if not maps or len(maps) != len(objects):
        raise InputError(f"{len(maps)} images' maps and {len(objects)} images' objects; one of each per image")
    if len({len(m) for m in maps}) > 1:
        raise InputError(f"the images have maps of {sorted({len(m) for m in maps})} heads; they must agree")
    scores = []  # per image (O, H + 1), the mean map last
    for heads, masks in zip(maps, objects, strict=True):
        if heads.dim() != 3 or masks.dim() != 3 or not len(heads) or not len(masks):
            raise InputError(
                f"maps {tuple(heads.shape)} and objects {tuple(masks.shape)}: (H, gh, gw) and (O, height, width), not"
                " empty"
            )
        every = torch.cat((heads.double(), heads.double().mean(dim=0, keepdim=True)))
        kept = on_pixels(keep_mass(every, share), (masks.shape[1], masks.shape[2]))
        scores.append(mask_iou(masks[:, None], kept[None]))
    per_head = torch.stack([of_image.mean(dim=0) for of_image in scores]).mean(dim=0)
    best = torch.stack([of_image[:, :-1].amax(dim=1).mean() for of_image in scores]).mean()
    alone = per_head[:-1]
    return Jaccard(
        best.item(),
        alone.max().item(),
        int(alone.argmax()),
        per_head[-1].item(),
        tuple(alone.tolist()),
        len(maps),
        sum(len(of_image) for of_image in scores),
        share,
    )


def mask_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of masks, bool `(…, height, width)`, broadcast; float64, 0 where both are empty."""
    a, b = a.bool(), b.bool()
    both, either = (a & b).sum(dim=(-2, -1)).double(), (a | b).sum(dim=(-2, -1))
    return both / either.clamp_min(1)


def points(maps: Tensor, objects: Tensor, tolerance: float = 15.0) -> Tensor:
    """Whether a map peaks on the object, `(…, gh, gw)` and `(…, height, width) -> bool (…)` (the pointing game).

    The peak is the centre of the strongest patch; the first in reading order of equals. It hits where a pixel of the
    object lies within `tolerance` pixels of it (Zhang et al., 2016, arXiv:1608.00507, take 15).

    Raises InputError for a negative tolerance.
    """
    if tolerance < 0:
        raise InputError(f"tolerance is {tolerance} pixels; it must be 0 or more")
    down, across = objects.shape[-2] / maps.shape[-2], objects.shape[-1] / maps.shape[-1]
    strongest = maps.flatten(-2).argmax(dim=-1)
    row = (strongest // maps.shape[-1]).double() * down + (down - 1) / 2
    column = (strongest % maps.shape[-1]).double() * across + (across - 1) / 2
    y = torch.arange(objects.shape[-2], device=objects.device).double()[:, None] - row[..., None, None]
    x = torch.arange(objects.shape[-1], device=objects.device).double() - column[..., None, None]
    # A peak between pixels, in the middle of an even patch, stands on each of the pixels around it.
    distance = ((y.abs() - 0.5).clamp_min(0) ** 2 + (x.abs() - 0.5).clamp_min(0) ** 2).sqrt()
    return ((distance <= tolerance) & objects.bool()).flatten(-2).any(dim=-1)


def pointing_game(maps: Sequence[Tensor], objects: Sequence[Tensor], tolerance: float = 15.0) -> float:
    """Share of `points` over pairs of a map `(gh, gw)` and an object's mask `(height, width)`, of any sizes."""
    if not maps or len(maps) != len(objects):
        raise InputError(f"{len(maps)} maps and {len(objects)} objects; one object is needed for each map")
    hits = [bool(points(heat, mask, tolerance)) for heat, mask in zip(maps, objects, strict=True)]
    return sum(hits) / len(hits)


def mass_in_mask(maps: Tensor, mask: Tensor) -> Tensor:
    """The share of a map's mass that lies in a mask, `(…, gh, gw)` and `(height, width) -> float64 (…)`.

    A patch that the mask covers in part counts in part. A map of zeros has 0 there.
    """
    grid = (maps.shape[-2], maps.shape[-1])
    covered = F.adaptive_avg_pool2d(mask.double()[None], grid)[0]
    total = maps.double().sum(dim=(-2, -1))
    return (maps.double() * covered).sum(dim=(-2, -1)) / torch.where(total == 0, 1.0, total)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of each box of `a (n, 4)` with each of `b (m, 4)`: float64 `(n, m)`.

    A box is two corners, the lower one first and the far one exclusive: (left, top, right, bottom), or (top, left,
    bottom, right), the same for both. Raises InputError for a far corner that lies before the near one.
    """
    a, b = a.double().reshape(-1, 4), b.double().reshape(-1, 4)
    for boxes in (a, b):
        if len(wrong := boxes[(boxes[:, 2:] < boxes[:, :2]).any(dim=1)]):
            raise InputError(f"box {wrong[0].tolist()} ends before it begins; give two corners, the near one first")
    near = torch.maximum(a[:, None, :2], b[None, :, :2])
    far = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (far - near).clamp_min(0).prod(dim=-1)
    areas = (a[:, 2:] - a[:, :2]).prod(dim=1)[:, None] + (b[:, 2:] - b[:, :2]).prod(dim=1)
    return shared / (areas - shared).clamp_min(1e-12)


def corloc(boxes: Sequence[Tensor], truths: Sequence[Tensor], threshold: float = 0.5) -> float:
    """CorLoc: the share of images whose found box `(4,)` has an IoU of at least `threshold` with any true one `(n, 4)`.

    Boxes are as in `box_iou`. An image without a true box counts as missed.
    """
    if not boxes or len(boxes) != len(truths):
        raise InputError(f"{len(boxes)} boxes and {len(truths)} images' true boxes; one box is needed for each image")
    hits = [bool((box_iou(box, true) >= threshold).any()) for box, true in zip(boxes, truths, strict=True)]
    return sum(hits) / len(hits)


def on_pixels(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps or masks `(…, gh, gw)` laid on pixels, each with the value of its patch: `(…, height, width)`."""
    rows = torch.arange(size[0], device=maps.device) * maps.shape[-2] // size[0]
    columns = torch.arange(size[1], device=maps.device) * maps.shape[-1] // size[1]
    return maps[..., rows[:, None], columns]
