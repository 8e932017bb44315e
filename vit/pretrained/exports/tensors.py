"""Our tensors brought to a target's form without changing a number."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.vit.config import ViTConfig
from regard.vit.pretrained import rules

if TYPE_CHECKING:
    from regard.vit.model import ViT


def laid_out(
    vit: "ViT", rows: str, *, biases: str = "qkv", scales: bool = False
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Our tensors on the CPU, and their configuration, with a position table that has these rows.

    A row that the target's table does not have is added to its token, as the forward pass does; one that ours does not
    have is 0. Biases on these projections that ours does not have are 0, and with `scales` its layer scales are 1.
    """
    config = vit.config
    tensors = {name: tensor.detach().cpu() for name, tensor in vit.state_dict().items()}
    if config.has_table:
        special = {"cls": int(config.class_token), "registers": config.registers}
        held = {name: count if name in config.position_rows else 0 for name, count in special.items()}
        wanted = {name: count if name in rows else 0 for name, count in special.items()}
        at_cls, at_registers, at_patches = tensors["positions"].split(
            [held["cls"], held["registers"], len(tensors["positions"]) - sum(held.values())]
        )
        table = []
        for name, values in (("cls", at_cls), ("registers", at_registers)):
            if wanted[name]:
                table.append(values if held[name] else at_patches.new_zeros(wanted[name], config.dim))
            elif held[name]:
                tensors[name] = (tensors[name] + values).reshape(tensors[name].shape)
        tensors["positions"] = torch.cat([*table, at_patches])
    for block in range(config.depth):
        for part in biases:
            weight = tensors[f"blocks.{block}.attn.to_{part}.weight"]
            tensors.setdefault(f"blocks.{block}.attn.to_{part}.bias", weight.new_zeros(len(weight)))
        for part in ("scale1", "scale2") if scales else ():
            tensors.setdefault(f"blocks.{block}.{part}.gamma", torch.ones(config.dim, dtype=vit.dtype))
    return tensors, dataclasses.replace(config, position_rows=rows)  # type: ignore[arg-type]


def renamed(table: Iterable[rules.Rule], tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names; none may be left over."""
    theirs, left = rules.write(table, tensors, config)
    assert not left, f"no rule writes {left}"
    return {name: tensor.contiguous().clone() for name, tensor in theirs.items()}


def ratio(hidden: int, dim: int) -> float:
    """`hidden / dim`, such that rounding down `dim * ratio` gives `hidden` again."""
    exact = hidden / dim
    while int(dim * exact) < hidden:
        exact += 1e-9
    return exact


def native(config: ViTConfig) -> tuple[int, int]:
    """The native (height, width) in whole patches."""
    return config.grid[0] * config.patch_size, config.grid[1] * config.patch_size
