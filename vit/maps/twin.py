"""A ViT of other tokens over the same weights, for an experiment; the model itself is not touched."""

import dataclasses
from typing import TypeVar, cast

import torch
from torch import Tensor

from regard.vit.blocks import Block
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT

Kind = TypeVar("Kind", bound=ViT)


def twin(model: ViT, config: ViTConfig, changed: dict[str, Tensor], kind: type[Kind] = ViT) -> Kind:  # type: ignore[assignment]
    """A ViT of another configuration that shares the tensors of `model`, but for those in `changed`.

    A knock-out of heads that is in force stays so. Raises InputError where registers are knocked out: their places
    in the sequence are others in the twin.
    """
    if any(cast(Block, block).edit is not None for block in model.blocks):
        raise InputError("registers of this ViT are being knocked out; end that before its tokens are changed")
    with torch.device("meta"):
        made = kind(config)
    own = {**model.state_dict(), **changed}
    made.load_state_dict({name: own[name] for name in made.state_dict()}, assign=True)
    needs = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(needs.get(name, False))
    for ours, theirs in zip(made.blocks, model.blocks, strict=True):
        cast(Block, ours).attn.edit = cast(Block, theirs).attn.edit
    made.report = model.report
    return made.train(model.training)


def without_registers(model: ViT) -> ViT:
    """The same weights with the registers taken out of the sequence, so that no token can attend to them.

    Raises InputError for a model that has none.
    """
    config = model.config
    if not config.registers:
        raise InputError("this ViT has no registers to take out")
    changed: dict[str, Tensor] = {}
    rows = config.position_rows
    if rows == "cls+registers+patches":
        rows = "cls+patches"
        if model.positions is not None:
            table, first = model.positions.detach(), int(config.class_token)
            changed["positions"] = torch.cat((table[:first], table[first + config.registers :]))
    return twin(model, dataclasses.replace(config, registers=0, position_rows=rows), changed)
