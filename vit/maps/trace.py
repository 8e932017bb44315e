"""What passes through the layers of a ViT: an ordinary forward that shows each wanted layer at work.

No hook is set and nothing is computed twice: the queries, keys and values are those that the layer itself goes on with,
and `out` is what its fused kernel made of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from regard.vit.attention import Attention, KeysValues
from regard.vit.blocks import Block
from regard.vit.model import ViT


@dataclass(frozen=True, eq=False)
class Passage:
    """One layer at work.

    Attributes:
        layer: its number.
        block: the block.
        x: the residual stream that came in `(B, S, D)`.
        q, kv: queries, keys and values after norm and rope, `(B, H, S, K)`.
        out: what each head put out before the output projection, `(B, H, S, K)`.
        grid: (grid height, grid width).
    """

    layer: int
    block: Block
    x: Tensor
    q: Tensor
    kv: KeysValues
    out: Tensor
    grid: tuple[int, int]

    @property
    def attn(self) -> Attention:
        return self.block.attn


def passages(model: ViT, images: Tensor, layers: int | Sequence[int] | Literal["all"]) -> Iterator[Passage]:
    """The wanted layers of one forward pass, from the first to the last; those behind the last are not run."""
    wanted = set(model.layer_numbers(layers))
    x, grid = model.embed(images)
    rotary = model.rotary(grid, x.device)
    for number in range(max(wanted, default=-1) + 1):
        block = cast(Block, model.blocks[number])
        if number not in wanted:
            x = block(x, rotary)
            continue
        q, kv = block.attn.project(block.norm1(x), rotary=rotary)
        out = block.attn.mix(q, kv)
        yield Passage(number, block, x, q, kv, out, grid)
        if number < max(wanted):
            x = block.finish(x, out, kv)
        del q, kv, out  # the next layer makes its own; together they are four times the stream


def plain(model: torch.nn.Module) -> ViT:
    """The ViT itself, taken out of a wrapper of torch.compile or of a parallel strategy."""
    while not isinstance(model, ViT):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise TypeError(f"maps are of a ViT, not of a {type(model).__name__}")
        model = inner
    return model
