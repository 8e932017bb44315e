"""Where a patch lies: learned tables resampled by grid, fixed sine-cosine tables, rotary positions.

All three are computed in fp32 from whole numbers for the grid at hand; nothing that a checkpoint could miss is kept
with the weights. Rows run over patches in reading order. D width, K head width, N tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit.config import PositionResize, RopeRecipe


def resize_table(table_ND: Tensor, old: tuple[int, int], new: tuple[int, int], recipe: PositionResize) -> Tensor:
    """A learned table for the grid `old` (height, width), resampled to the grid `new`: `(N, D) -> (N', D)`.

    The same grid is the identity; an equal number of patches in another shape is not.
    """
    if old == new:
        return table_ND
    image = table_ND.float().unflatten(0, old).permute(2, 0, 1)[None]
    if recipe.offset:
        scale = [(n + recipe.offset) / o for n, o in zip(new, old, strict=True)]
        image = F.interpolate(image, scale_factor=scale, mode=recipe.mode, antialias=recipe.antialias)
    else:
        corners = recipe.align_corners
        image = F.interpolate(image, size=new, mode=recipe.mode, antialias=recipe.antialias, align_corners=corners)
    if tuple(image.shape[2:]) != new:
        raise ValueError(f"position resize gave {tuple(image.shape[2:])} instead of {new}")
    return image[0].permute(1, 2, 0).flatten(0, 1).to(table_ND.dtype)


def sincos_table(grid: tuple[int, int], native: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """Fixed two-dimensional sine-cosine table `(N, D)`: rows in the first half of D, columns in the second.

    On another grid than the native one the coordinates are stretched, so that the image keeps its extent.
    Follows Vaswani et al., 2017, once per axis, with the base 10000.
    """
    halves = []
    for length, base_length in zip(grid, native, strict=True):
        place = (torch.arange(length, device=device).float() + 0.5) * (base_length / length) - 0.5
        frequency = 10000.0 ** -(torch.arange(dim // 4, device=device).float() / (dim // 4))
        angle = place[:, None] * frequency
        halves.append(torch.cat((angle.sin(), angle.cos()), dim=1))
    rows, columns = halves
    return torch.cat((rows.repeat_interleave(grid[1], dim=0), columns.repeat(grid[0], 1)), dim=1)


class Rope:
    """Rotary positions in two dimensions on the patches of a sequence; other tokens are left as they are.

    Half of the K/2 rotated pairs turn with the row, half with the column, and pairs are (i, i + K/2), after Su et
    al., 2021 (arXiv:2104.09864). What they turn by is the recipe's. `before` and `after` count the tokens without a
    place around the patches.
    """

    def __init__(
        self, grid: tuple[int, int], head_dim: int, recipe: RopeRecipe, before: int, after: int, device: torch.device
    ):
        rows, columns = (_angles(grid, axis, head_dim // 4, recipe, device) for axis in (0, 1))
        angles = torch.cat((rows.repeat_interleave(grid[1], dim=0), columns.repeat(grid[0], 1)), dim=1)
        # Tokens without a place turn by angle 0, so that no sequence is split and joined again.
        angles = F.pad(angles, (0, 0, before, after))
        cos, sin = angles.cos(), angles.sin()
        self.half = head_dim // 2
        self.cos, self.sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)  # (N, K)

    def __call__(self, x_BHNK: Tensor) -> Tensor:
        wide = x_BHNK.to(torch.promote_types(x_BHNK.dtype, torch.float32))
        # Each element's partner of its pair, turned where it lies: one new tensor, three passes.
        return wide.roll(self.half, dims=-1).mul_(self.sin).addcmul_(wide, self.cos).to(x_BHNK.dtype)


def _angles(grid: tuple[int, int], axis: int, count: int, recipe: RopeRecipe, device: torch.device) -> Tensor:
    """Angles `(length of the axis, count)` in fp32."""
    length = grid[axis]
    if recipe.periods is not None:
        period = torch.tensor(recipe.periods, device=device)
    else:
        period = recipe.base ** (torch.arange(count, device=device).float() / count)
    place = torch.arange(length, device=device).float()
    if recipe.coordinates == "centred":
        return 2 * torch.pi * ((place + 0.5) / length * 2 - 1)[:, None] / period
    if recipe.reference is not None:
        place = place / length * recipe.reference[axis]
    return place[:, None] / period
