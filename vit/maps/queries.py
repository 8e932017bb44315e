"""Whose rows are asked for: a token by name, a patch, a pixel, the patches under a mask."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.model import ViT

_REGISTER = re.compile(r"reg(\d+)")


@dataclass(frozen=True)
class Pixel:
    """The patch that holds a pixel, counted from the top left of the image as the model gets it."""

    y: int
    x: int


Query = str | tuple[int, int] | Pixel | Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Asked:
    """One row that is asked for: its name, and the tokens `(n,)` whose rows it is the mean of."""

    name: str
    tokens: Tensor


def resolve(model: ViT, queries: Query | Sequence[Query], grid: tuple[int, int], device: torch.device) -> list[Asked]:
    """The rows that `queries` stand for, in their order; `registers` gives one for each.

    Raises InputError for a token that the model does not have and a place outside of the grid.
    """
    several = isinstance(queries, list) or (isinstance(queries, tuple) and not _is_patch(queries))
    asked = [row for query in (queries if several else [queries]) for row in _one(model, query, grid, device)]  # type: ignore[union-attr]
    if not asked:
        raise InputError("no queries were asked for; name at least one, such as 'cls'")
    return asked


def _one(model: ViT, query: Any, grid: tuple[int, int], device: torch.device) -> list[Asked]:
    config = model.config
    count = config.class_token + config.registers + grid[0] * grid[1]
    # Positions in the sequence, under the names that the model itself gives them.
    places = model.name(torch.arange(count, device=device)[None, :, None], grid)
    patches, registers = places.patches.flatten(), places.registers.flatten()
    if isinstance(query, str):
        if query == "cls" and places.cls is not None:
            return [Asked("cls", places.cls.flatten())]
        if query == "registers" and config.registers:
            return [Asked(f"reg{i}", registers[i : i + 1]) for i in range(config.registers)]
        found = _REGISTER.fullmatch(query)
        if found and int(found[1]) < config.registers:
            return [Asked(query, registers[int(found[1]) : int(found[1]) + 1])]
        if query == "patches":
            return [Asked("patches", patches)]
        if query in ("cls", "registers") or found:
            has = f"cls {int(config.class_token)}, registers {config.registers}"
            raise InputError(f"this ViT has no {query}: its special tokens are {has}")
        raise InputError(
            f"queries {query!r} is unknown; ask for 'cls', 'registers', 'reg0', 'patches', a patch (row, column),"
            " a Pixel(y, x), or a mask"
        )
    if isinstance(query, Pixel):
        patch = config.patch_size
        if not (0 <= query.y < grid[0] * patch and 0 <= query.x < grid[1] * patch):
            raise InputError(f"{query} lies outside of the image of {grid[0] * patch} x {grid[1] * patch} px")
        where = query.y // patch * grid[1] + query.x // patch
        return [Asked(f"pixel ({query.y}, {query.x})", patches[where : where + 1])]
    if _is_patch(query):
        row, column = query
        if not (0 <= row < grid[0] and 0 <= column < grid[1]):
            raise InputError(f"patch ({row}, {column}) lies outside of the grid of {grid[0]} x {grid[1]} patches")
        where = row * grid[1] + column
        return [Asked(f"patch ({row}, {column})", patches[where : where + 1])]
    if isinstance(query, (Tensor, np.ndarray)):
        return [Asked("mask", patches[_under(torch.as_tensor(query), grid, config.patch_size).to(device)])]
    raise InputError(f"queries {query!r} is no token, patch, pixel or mask")


def _under(mask: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The patches `(N,)` of which a mask, of the grid's size or the image's, covers at least half."""
    size = (grid[0] * patch, grid[1] * patch)
    if mask.dim() != 2 or tuple(mask.shape) not in (grid, size):
        raise InputError(f"a mask is {grid} patches or {size} pixels, not {tuple(mask.shape)}")
    share = mask.float() if tuple(mask.shape) == grid else F.avg_pool2d(mask.float()[None], patch)[0]
    chosen = share.flatten() >= 0.5
    if not chosen.any():
        raise InputError("the mask covers no patch by half or more")
    return chosen


def _is_patch(query: Any) -> bool:
    return isinstance(query, tuple) and len(query) == 2 and all(isinstance(part, int) for part in query)
