"""LOST: the box of one object, from how alike the patches of one picture are (Siméoni et al., 2021, arXiv:2109.14279).

Scores depend much on which features are compared, of which layer, and on a bias: all are arguments, and what was used
is told with each box. Likenesses are computed in blocks, never N x N. N patches, D width of the heads joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.images import to_rgb
from regard.vit.maps.grid import Frame
from regard.vit.maps.rows import BLOCK
from regard.vit.maps.trace import Passage, passages, plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture

Features = Literal["keys", "values", "queries"]


@dataclass(frozen=True)
class LostSettings:
    """What a box depends on besides model and picture.

    Attributes:
        features: which are compared, before rope: `keys` as for DINO and DINOv2, `values` as for DeiT-III and CLIP.
        layer: whose, counted from 0 once used.
        normalise: compare directions alone: each patch's vector is brought to length 1.
        bias: added to every likeness. Models with high-norm tokens need one below 0 (Darcet et al., 2024); with
            `normalise` it lies between -1 and 0.
        candidates: how many of the patches with the fewest likenesses may join the seed.
    """

    features: Features = "keys"
    layer: int = -1
    normalise: bool = False
    bias: float = 0.0
    candidates: int = 100

    def __post_init__(self) -> None:
        if self.features not in get_args(Features):
            raise InputError(f"LOST features {self.features!r} are unknown; choose keys, values or queries")
        if self.candidates < 1:
            raise InputError(f"LOST candidates is {self.candidates}; it must be at least 1")


@dataclass(frozen=True, eq=False)
class LostBox:
    """One object found.

    Attributes:
        box: (top, left, bottom, right) in pixels of the image that was given, none outside of it.
        seed: (row, column) of the patch that is like the fewest others.
        mask: the seed's part of the object, bool `(grid height, grid width)`.
        degrees: how many others each patch is like, `(grid height, grid width)`.
        settings: with what it was found.
    """

    box: tuple[float, float, float, float]
    seed: tuple[int, int]
    mask: Tensor
    degrees: Tensor
    settings: LostSettings


@torch.no_grad()
def lost_boxes(
    model: nn.Module,
    images: Tensor | Picture | Sequence[Picture],
    layer: int = -1,
    *,
    features: Features = "keys",
    normalise: bool = False,
    bias: float = 0.0,
    candidates: int = 100,
) -> list[LostBox]:
    """One box for each image.

    `images` is a preprocessed batch `(B, C, height, width)`, and boxes are in its pixels; or pictures, and boxes are in
    each picture's own pixels, through its resize and cut. For the other arguments see `LostSettings`.
    Raises InputError for a layer that does not exist, and a bias so low that no patch is like another.
    """
    vit = plain(model)
    (number,) = vit.layer_numbers(layer)
    settings = LostSettings(features, number, normalise, bias, candidates)
    if isinstance(images, Tensor) and images.dim() == 4:
        found = _found(vit, images, settings)
        return [_boxed(vit, part, (images.shape[2], images.shape[3]), None) for part in found]
    pictures: Sequence[Picture] = images if isinstance(images, (list, tuple)) else [images]  # type: ignore[list-item]
    boxes = []
    for picture in pictures:
        pixels = vit.preprocess(picture).to(vit.tokenizer.proj.weight)
        size = _size(picture)
        boxes += [_boxed(vit, part, size, Frame.of(vit, *size)) for part in _found(vit, pixels, settings)]
    return boxes


def _found(vit: ViT, images: Tensor, settings: LostSettings) -> list[LostBox]:
    """Objects, whose boxes still count patches."""
    (passage,) = passages(vit, images, settings.layer)
    patches = vit.name(_features(vit, passage, settings.features), passage.grid).patches.double()
    if settings.normalise:
        patches = torch.nn.functional.normalize(patches, dim=-1)
    return [_object(part, passage.grid, settings) for part in patches]


def _features(vit: ViT, passage: Passage, kind: Features) -> Tensor:
    """`(B, S, D)`, the heads side by side."""
    q, kv = passage.q, passage.kv
    if vit.config.has_rope:  # turned by place, two patches of one look would be unlike
        q, kv = passage.attn.project(passage.block.norm1(passage.x))
    chosen = {"keys": kv.k, "values": kv.v, "queries": q}[kind]
    return chosen.transpose(1, 2).flatten(2)


def _object(features: Tensor, grid: tuple[int, int], settings: LostSettings) -> LostBox:
    """From `features (N, D)` of one image."""
    own = features.square().sum(dim=-1) + settings.bias
    degrees = torch.cat([_degrees(features, first, settings.bias) for first in range(0, len(features), BLOCK)])
    lowest = degrees.argsort(stable=True)[: settings.candidates]
    seed = int(lowest[0])
    alike = features[lowest] @ features[seed] + settings.bias > 0
    if own[seed] <= 0:
        raise InputError(
            f"LOST bias {settings.bias} is so low that the patch least like others is not even like itself;"
            f" choose one above {settings.bias - float(own[seed]):.3g}"
        )
    group = lowest[alike]
    # The sum of the group's likenesses is the likeness to its sum.
    likeness = features @ features[group].sum(dim=0) + len(group) * settings.bias
    place = divmod(seed, grid[1])
    mask = component(likeness.unflatten(0, grid) > 0, place)
    rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
    box = (float(rows.min()), float(columns.min()), float(rows.max() + 1), float(columns.max() + 1))
    return LostBox(box, place, mask, degrees.unflatten(0, grid), settings)


def _degrees(features: Tensor, first: int, bias: float) -> Tensor:
    """How many others each patch of one block is like."""
    block = features[first : first + BLOCK]
    alike = block @ features.T + bias > 0
    alike.diagonal(first).fill_(False)
    return alike.sum(dim=1)


def component(mask: Tensor, seed: tuple[int, int]) -> Tensor:
    """The part of a bool `mask (height, width)` that hangs together with `seed` by sides, not corners; bool."""
    inside = mask.tolist()
    part = torch.zeros_like(mask)
    waiting = [seed] if inside[seed[0]][seed[1]] else []
    for row, column in waiting:
        inside[row][column] = False
    while waiting:
        row, column = waiting.pop()
        part[row, column] = True
        for y, x in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= y < len(inside) and 0 <= x < len(inside[0]) and inside[y][x]:
                inside[y][x] = False
                waiting.append((y, x))
    return part


def _boxed(vit: ViT, found: LostBox, size: tuple[int, int], frame: Frame | None) -> LostBox:
    """The same with its box in pixels of an image of `size` (height, width), clipped to it."""
    height, width = size
    if frame is None:
        tall, wide = (side * vit.config.patch_size for side in found.mask.shape)
        whole = (0.0, 0.0, float(tall), float(wide))
        if vit.config.size_policy == "resize":
            whole = (0.0, 0.0, float(height), float(width))
    else:
        whole = frame.box
    top, left, bottom, right = whole
    rows, columns = found.mask.shape
    y0, x0, y1, x1 = found.box
    box = (
        max(top + y0 * (bottom - top) / rows, 0.0),
        max(left + x0 * (right - left) / columns, 0.0),
        min(top + y1 * (bottom - top) / rows, float(height)),
        min(left + x1 * (right - left) / columns, float(width)),
    )
    return LostBox(box, found.seed, found.mask, found.degrees, found.settings)


def _size(picture: Picture) -> tuple[int, int]:
    """(height, width) of a picture, upright."""
    if isinstance(picture, Tensor):
        return picture.shape[-2], picture.shape[-1]
    if isinstance(picture, np.ndarray):
        return picture.shape[0], picture.shape[1]
    upright = to_rgb(picture)
    return upright.height, upright.width
