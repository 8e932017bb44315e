"""Tokens with names: what a ViT returns, never one mixed tensor."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a batch of images, by name.

    Attributes:
        cls: class token `(B, D)`, or None for a model without one.
        registers: register tokens `(B, R, D)`; R may be 0.
        patches: patch tokens in reading order, `(B, N, D)` with N = grid height x grid width.
        grid: (grid height, grid width) in patches.
    """

    cls: Tensor | None
    registers: Tensor
    patches: Tensor
    grid: tuple[int, int]

    @property
    def patch_map(self) -> Tensor:
        """The patches where they lie in the image: `(B, D, grid height, grid width)`."""
        return self.patches.transpose(1, 2).unflatten(2, self.grid)
