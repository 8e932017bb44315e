"""LoRA: train a low-rank change of some linear layers and nothing else, then fold it in (Hu et al., 2022,
arXiv:2106.09685).

A layer `W x + b` becomes `W x + b + (alpha / rank) U D x` with `D (rank, in)` and `U (out, rank)`, U being 0 at first.
"""

import fnmatch
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit import fused
from regard.vit.errors import InputError


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter, `(…, in) -> (…, out)`.

    Args:
        base: the layer, which is frozen.
        rank: rank of the change.
        alpha: the change is scaled by alpha / rank.
        dropout: on what the adapter is given, in training.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)
        bound = base.in_features**-0.5
        nn.init.uniform_(self.down, -bound, bound)

    @property
    def weight(self) -> Tensor:
        """The weight of the plain layer that this one equals in inference mode, `(out, in)`."""
        return self.base.weight + self.change()

    @property
    def bias(self) -> Tensor | None:
        """That layer's bias `(out,)`."""
        return self.base.bias

    def change(self) -> Tensor:
        """What the adapter adds to the weight, `(out, in)`."""
        return self.scale * (self.up @ self.down)

    def forward(self, x: Tensor) -> Tensor:
        return fused.linear(x, self.base) + self.scale * F.linear(F.linear(self.dropout(x), self.down), self.up)


def add_lora(
    model: nn.Module,
    targets: Sequence[str] = ("to_q", "to_v"),
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
) -> list[str]:
    """Put adapters on linear layers of `model`, in place, and freeze everything else; returns the layers' names.

    The outputs stay as they are, to the bit, until the adapters are trained. (A residual sum that inference on a CPU
    makes inside a matrix product is made after it where that layer has an adapter, which may round the last bit
    another way.)

    Args:
        targets: a layer's name (`to_q`), the end of its dotted name (`cross.attn.to_q`), or a pattern of it
            (`vit.blocks.1?.attn.*`).
        rank, alpha, dropout: as in `LoRALinear`.

    Raises:
        InputError: a target that names no linear layer; a model that has adapters; a number out of its range.
    """
    if isinstance(targets, str) or not targets:
        raise InputError(f"LoRA targets are {targets!r}; give a list of names of linear layers, such as to_q, to_v")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"the LoRA rank is {rank!r}; it must be a whole number of at least 1")
    if not 0 < alpha < math.inf:
        raise InputError(f"LoRA alpha is {alpha}; it must be above 0")
    if not 0 <= dropout < 1:
        raise InputError(f"LoRA dropout is {dropout}; it must lie in [0, 1)")
    if has_lora(model):
        raise InputError("this model has LoRA adapters already; merge them first")
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    chosen: list[str] = []
    for target in targets:
        found = [n for n in layers if fnmatch.fnmatchcase(n, target) or fnmatch.fnmatchcase(n, f"*.{target}")]
        if not found:
            there = ", ".join(sorted({name.split(".")[-1] for name in layers}))
            raise InputError(f"LoRA target {target!r} names no linear layer of this model; there are {there}")
        chosen += [name for name in found if name not in chosen]
    model.requires_grad_(False)
    for name in chosen:
        _replace(model, name, LoRALinear(layers[name], rank, alpha, dropout))
    return chosen


def has_lora(model: nn.Module) -> bool:
    """Whether any layer has an adapter."""
    return any(isinstance(layer, LoRALinear) for layer in model.modules())


@torch.no_grad()
def merge_lora(model: nn.Module) -> list[str]:
    """Fold every adapter into its layer, in place; returns their names.

    The layers are plain ones then, the outputs those of inference mode up to rounding. Weights stay frozen as they are.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    for name, layer in layers.items():
        wide = torch.promote_types(layer.base.weight.dtype, torch.float32)
        change = layer.scale * (layer.up.to(wide) @ layer.down.to(wide))
        layer.base.weight.copy_(layer.base.weight.to(wide) + change)
        _replace(model, name, layer.base)
    return list(layers)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    layer.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), last, layer)
