"""A ViT made over without training: registers added, or its position table laid out for another native size.

Both give a new model and leave the old one as it is.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.vit.config import ViTConfig, changed_vit
from regard.vit.errors import InputError
from regard.vit.positions import resize_table, sincos_table
from regard.vit.preprocess import check_size

if TYPE_CHECKING:
    from regard.vit.model import ViT


def with_registers(vit: "ViT", count: int) -> "ViT":
    """What `ViT.with_registers` does; see there."""
    config = vit.config
    if config.registers:
        raise InputError(f"this ViT has {config.registers} registers already; with_registers is for one that has none")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"with_registers takes the number of registers, at least 1, not {count!r}")
    # A table with a row for every special token had one for the class token alone, and stays as it is.
    rows = "cls+patches" if config.position_rows == "cls+registers+patches" else config.position_rows
    config = dataclasses.replace(config, registers=count, registers_place="after_cls", position_rows=rows)
    registers = torch.empty(count, config.dim, dtype=vit.dtype, device=vit.tokenizer.proj.weight.device)
    nn.init.trunc_normal_(registers, std=0.02)
    return _rebuilt(vit, config, {"registers": registers})


def regridded(vit: "ViT", image_size: tuple[int, int], dtype: torch.dtype | None = None) -> "ViT":
    """The same model with `image_size` as its native size: the table is resampled once, as its recipe says.

    At that size its tokens are those of `vit`. A fixed sine-cosine table becomes a learned one of the same values.
    `dtype` is that of the new weights. Raises InputError for a size that is no multiple of the patch.
    """
    config, dtype = vit.config, dtype or vit.dtype
    image_size = tuple(image_size) if isinstance(image_size, list) else image_size
    check_size("image_size", image_size)
    if any(side % config.patch_size for side in image_size):
        raise InputError(f"image_size {image_size} is no multiple of the patches of {config.patch_size} px")
    changes: dict[str, Any] = {"image_size": image_size}
    grid = image_size[0] // config.patch_size, image_size[1] // config.patch_size
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        if vit.positions is not None:
            special = len(vit.positions) - config.grid[0] * config.grid[1]
            old = vit.positions.to(dtype)
            table = resize_table(old[special:], config.grid, grid, config.position_resize)
            tensors["positions"] = torch.cat((old[:special], table))
        elif config.positions == "sincos":
            changes |= {"positions": "learned", "position_rows": "patches"}
            table = sincos_table(grid, config.grid, config.dim, vit.tokenizer.proj.weight.device)
            tensors["positions"] = table.to(dtype)
    return _rebuilt(vit, changed_vit(config, changes), tensors, dtype)


def _rebuilt(vit: "ViT", config: ViTConfig, changed: dict[str, Tensor], dtype: torch.dtype | None = None) -> "ViT":
    """A ViT of another configuration with copies of the weights of `vit`, and these beside them or in their place."""
    with torch.device("meta"):
        made = type(vit)(config)
    tensors = {**vit.state_dict(), **changed}
    copies = {name: tensors[name].to(dtype or tensors[name].dtype, copy=True) for name in made.state_dict()}
    made.load_state_dict(copies, assign=True)
    needs = {name: parameter.requires_grad for name, parameter in vit.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(needs.get(name, True))
    for module, before in zip(made.modules(), vit.modules(), strict=True):
        module.training = before.training
    made.report = vit.report
    return made
