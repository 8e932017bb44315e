"""Where in the picture a patch lies: back through the size policy, the cut and the resize that made the tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.model import ViT


@dataclass(frozen=True)
class Frame:
    """The part of a picture that a grid of patches covers; y and x are edges, so pixel 0 lies between 0 and 1.

    Attributes:
        picture: (height, width) of the picture as it stands in its file, upright.
        seen: (height, width) of the tensor that the patches are cut from, after the size policy.
        grid: (grid height, grid width).
        box: (top, left, bottom, right) of the grid in pixels of the picture. It reaches beyond the picture where the
            model saw padding.
    """

    picture: tuple[int, int]
    seen: tuple[int, int]
    grid: tuple[int, int]
    box: tuple[float, float, float, float]

    @classmethod
    def of(cls, model: ViT, height: int, width: int) -> "Frame":
        """The frame of a picture of this size, as `model.preprocess` and the model's size policy treat it.

        Raises InputError for a size that the policy `error` or `crop` refuses.
        """
        top, left, bottom, right = model.preprocess.window(height, width)
        tall, wide = model.preprocess.size or (height, width)
        # The tokenizer itself says what becomes of the size; one row and one column of it tell both sides.
        fitted = model.tokenizer.fit(torch.empty(1, model.config.channels, tall, wide, device="meta"))
        seen = (fitted.shape[2], fitted.shape[3])
        if model.tokenizer.size_policy != "resize":  # what is cut off or added lies at the bottom and right
            bottom = top + (bottom - top) * seen[0] / tall
            right = left + (right - left) * seen[1] / wide
        patch = model.config.patch_size
        return cls((height, width), seen, (seen[0] // patch, seen[1] // patch), (top, left, bottom, right))

    @property
    def whole(self) -> bool:
        """Whether the grid covers the picture to within half a pixel, no more and no less."""
        return all(abs(at - edge) < 0.5 for at, edge in zip(self.box, (0, 0, *self.picture), strict=True))

    def patch_box(self, row: int, column: int) -> tuple[float, float, float, float]:
        """(top, left, bottom, right) of a patch in pixels of the picture."""
        top, left, bottom, right = self.box
        tall, wide = (bottom - top) / self.grid[0], (right - left) / self.grid[1]
        return top + row * tall, left + column * wide, top + (row + 1) * tall, left + (column + 1) * wide

    def patch_at(self, y: int, x: int) -> tuple[int, int]:
        """(row, column) of the patch that holds the middle of a pixel of the picture.

        Raises InputError for a pixel outside of the picture, and for one that the model did not see.
        """
        if not (0 <= y < self.picture[0] and 0 <= x < self.picture[1]):
            raise InputError(
                f"pixel ({y}, {x}) lies outside of the picture of {self.picture[0]} x {self.picture[1]} px"
            )
        top, left, bottom, right = self.box
        row = (y + 0.5 - top) / (bottom - top) * self.grid[0]
        column = (x + 0.5 - left) / (right - left) * self.grid[1]
        if not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise InputError(
                f"pixel ({y}, {x}) was cut away before the model saw the picture: it saw rows {top:.0f} to {bottom:.0f}"
                f" and columns {left:.0f} to {right:.0f}; take another pixel, or --size own"
            )
        return int(row), int(column)

    def places(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """For each row and column of the picture drawn at another size, the patch's row and column; -1 if not seen."""
        top, left, bottom, right = self.box
        y = (torch.arange(height, dtype=torch.float64) + 0.5) / height * self.picture[0]
        x = (torch.arange(width, dtype=torch.float64) + 0.5) / width * self.picture[1]
        row = ((y - top) / (bottom - top) * self.grid[0]).floor().long()
        column = ((x - left) / (right - left) * self.grid[1]).floor().long()
        row[(row < 0) | (row >= self.grid[0])] = -1
        column[(column < 0) | (column >= self.grid[1])] = -1
        return row, column

    def place(self, heat: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        """A map `(..., grid height, grid width)` over the whole picture `(..., height, width)`; NaN where not seen.

        Patches keep their hard edges. The size is the picture's own by default.
        """
        row, column = self.places(height or self.picture[0], width or self.picture[1])
        placed = heat[..., row.clamp_min(0), :][..., column.clamp_min(0)].clone()
        placed[..., (row < 0)[:, None] | (column < 0)[None]] = float("nan")
        return placed
