"""What a model keeps of images it has looked at: keys and values, projected once per layer."""

from dataclasses import dataclass

from torch import Tensor

from regard.vit.attention import KeysValues


@dataclass(frozen=True, eq=False)
class Memory:
    """B remembered images.

    Attributes:
        layers: keys and values of every layer that asks, each `(B, H, N, K)`; N counts the class token, then
            the registers, then the patches of the largest grid.
        visible: which of the N tokens exist, bool `(B, N)`; None when all do. A row of False is "no image".
        grids: each image's (grid height, grid width), None for "no image".
        cls, registers: how many of the leading tokens are class and register tokens.
    """

    layers: tuple[KeysValues, ...]
    visible: Tensor | None
    grids: tuple[tuple[int, int] | None, ...]
    cls: int
    registers: int

    def __len__(self) -> int:
        """Number of images."""
        return len(self.grids)

    def __getitem__(self, index: int) -> "Memory":
        """One image, as a memory of its own; nothing is copied."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of a memory of {len(self)}")
        row = slice(index % len(self), index % len(self) + 1)
        visible = None if self.visible is None else self.visible[row]
        return Memory(tuple(kv[row] for kv in self.layers), visible, self.grids[row], self.cls, self.registers)
