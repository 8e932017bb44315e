"""Registers for a model that was trained without them (Jiang et al., 2025, arXiv:2506.08010).

A few units of the MLPs write the great length of outlier patches. Let them write it to a token that is appended for the
purpose, and the patches are clean: nothing is trained, and the model itself stays as it is.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from regard.vit.blocks import Block, Mlp
from regard.vit.errors import InputError
from regard.vit.maps.norms import ROBUST, Images, OutlierRule, token_norms
from regard.vit.maps.report import Report, table
from regard.vit.maps.rows import as_tensor
from regard.vit.maps.trace import passages, plain
from regard.vit.maps.twin import twin
from regard.vit.model import ViT


@dataclass(frozen=True)
class RegisterUnit:
    """One hidden unit of one MLP, an input of its last linear layer, and how active it is at outlier patches."""

    layer: int
    unit: int
    score: float


@dataclass(frozen=True)
class RegisterUnits(Report):
    """The units that write outlier patches, the most active first.

    Attributes:
        units: layer, number and score of each.
        layer: after which layer the outliers were sought, by `rule`.
        images: how many images had any; `without`: how many had none and say nothing.
    """

    units: tuple[RegisterUnit, ...]
    layer: int
    rule: OutlierRule
    images: int
    without: int

    def by_layer(self) -> dict[int, list[int]]:
        """The numbers of the units of each layer."""
        found: dict[int, list[int]] = {}
        for unit in self.units:
            found.setdefault(unit.layer, []).append(unit.unit)
        return found

    def __str__(self) -> str:
        rows = [[unit.layer, unit.unit, unit.score] for unit in self.units]
        return (
            f"Register units by mean |activation| at the outliers after layer {self.layer} ({self.rule}) of"
            f" {self.images} images; {self.without} had none\n{table(['layer', 'unit', 'score'], rows)}"
        )


@torch.no_grad()
def find_register_units(
    model: nn.Module,
    images: Images | Iterable[Tensor],
    *,
    layer: int = -2,
    top_layer: int | None = None,
    top_k: int = 10,
    rule: OutlierRule = ROBUST,
    quiet: float | None = None,
) -> RegisterUnits:
    """The MLP units that are most active where outlier patches are: algorithm 1 of arXiv:2506.08010.

    A unit's score is the mean over images of the mean of |activation| over the image's outlier patches. The class
    token and registers are no outliers.

    Args:
        images: preprocessed `(B, C, height, width)`, pictures, or an iterable of batches; the paper takes hundreds.
        layer: after which layer outliers are sought; the paper takes -2 for DINOv2-L and -1 for CLIP-B.
        top_layer: the last layer whose units count, default `layer`; the paper takes 17 of 24 and 5 of 12.
        top_k: how many units; the paper takes 50 for DINOv2-L and 10 for CLIP-B.
        rule: which patches are outliers.
        quiet: keep only units whose |activation| is below it on at least half of the patches; the paper takes 0.5.

    Raises InputError where no image has an outlier, and for a layer or number of units that does not exist.
    """
    vit = plain(model)
    (layer,) = vit.layer_numbers(layer)
    (top,) = vit.layer_numbers(layer if top_layer is None else top_layer)
    if top > layer:
        raise InputError(f"top_layer {top} lies behind layer {layer}, where outliers are sought: it cannot cause them")
    width = _width(vit)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= width * (top + 1):
        raise InputError(f"top_k is {top_k!r}; up to layer {top} there are {width * (top + 1)} units")
    where = vit.tokenizer.proj.weight.device
    score = torch.zeros(top + 1, width, dtype=torch.float64, device=where)
    silent = torch.zeros_like(score)
    seen = without = patches = 0
    for batch in _batches(vit, images):
        found = rule(token_norms(vit, batch, layer).patches[:, 0])  # (B, gh, gw)
        has = found.any(-1).any(-1)
        seen, without, patches = seen + int(has.sum()), without + int((~has).sum()), patches + found.numel()
        share = (found / found.sum((-2, -1), keepdim=True).clamp_min(1)).flatten(1).double()
        for number, activations in _activations(vit, batch, top):  # (B, N, hidden)
            score[number] += torch.einsum("bn,bnu->u", share, activations.double())
            if quiet is not None:
                silent[number] += (activations < quiet).sum((0, 1))
    if not seen:
        raise InputError(
            f"none of {without} images has an outlier patch after layer {layer} ({rule}); try another layer or rule"
        )
    score /= seen
    if quiet is not None:
        score = score.masked_fill(silent < patches / 2, -1.0)
    best = [
        i for i in score.flatten().argsort(descending=True, stable=True)[:top_k].tolist() if score.flatten()[i] >= 0
    ]
    units = tuple(RegisterUnit(i // width, i % width, score.flatten()[i].item()) for i in best)
    return RegisterUnits(units, layer, rule, seen, without)


def random_units(model: nn.Module, units: RegisterUnits, seed: int = 0) -> RegisterUnits:
    """As many other units of the same layers, drawn at random: the control of every claim about `units`."""
    vit = plain(model)
    generator = torch.Generator().manual_seed(seed)
    width, drawn = _width(vit), []
    for layer, taken in units.by_layer().items():
        free = sorted(set(range(width)) - set(taken))
        if len(free) < len(taken):
            raise InputError(f"layer {layer} has {width} units, too few for {len(taken)} others")
        chosen = torch.randperm(len(free), generator=generator)[: len(taken)].tolist()
        drawn += [RegisterUnit(layer, free[i], float("nan")) for i in chosen]
    return dataclasses.replace(units, units=tuple(drawn))


class MovedViT(ViT):
    """A ViT with test-time registers; see `with_test_time_registers`. An experiment, not a model to be written."""

    def save_pretrained(self, folder: str | Path) -> None:
        raise InputError("test-time registers are no weights; save the model itself and keep the units (as_dict)")

    def export(self, path: str | Path, layout: str, **options: Any) -> Any:
        raise InputError("test-time registers are no weights; export the model itself")

    def as_encoder(self) -> ViT:
        raise InputError("call as_encoder on the model itself and give its result test-time registers")

    def with_registers(self, count: int = 4) -> ViT:
        raise InputError("call with_registers on the model itself")


class _MovedMlp(Mlp):
    """An MLP some of whose units act on the test-time registers, and on no patch."""

    def __init__(self, mlp: Mlp, units: list[int], patches: slice, registers: slice, moves: bool):
        nn.Module.__init__(self)
        self.fc1, self.gate, self.act, self.norm, self.fc2 = mlp.fc1, mlp.gate, mlp.act, mlp.norm, mlp.fc2
        self.patches, self.registers, self.moves = patches, registers, moves
        self.register_buffer("units", torch.tensor(units, device=mlp.fc1.weight.device), persistent=False)

    def inner(self, x: Tensor) -> Tensor:
        inner = super().inner(x)
        units = cast(Tensor, self.units)
        acting = inner.index_select(2, units)
        patches = inner[:, self.patches].index_select(2, units)  # (B, N, U)
        largest = patches.gather(1, patches.abs().argmax(1, keepdim=True))  # with its sign, per image and unit
        acting[:, self.patches] = 0
        acting[:, self.registers] = largest if self.moves else 0
        return inner.index_copy(2, units, acting)


def with_test_time_registers(
    model: nn.Module, units: RegisterUnits, count: int = 1, *, how: Literal["move", "zero"] = "move"
) -> MovedViT:
    """The same weights with `count` registers that take what `units` write: algorithm 2 of arXiv:2506.08010.

    A zero token without a position is appended (behind the model's own registers, if it has any). In each of the units
    it gets the activation of largest magnitude among the patches, with its sign, per unit and image; the patches get
    0 and the class token is left alone. `Tokens.registers` holds it last. All maps and reports work on the result.

    `how="zero"` takes the activation from the patches and gives it to nobody: the control, which should hurt.

    Raises InputError for a unit that the model does not have, and a count below 1.
    """
    vit = plain(model)
    if isinstance(vit, MovedViT):
        raise InputError("this ViT has test-time registers already; give them to the model itself")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"with_test_time_registers takes a count of at least 1, not {count!r}")
    if how not in ("move", "zero"):
        raise InputError(f"how {how!r} is unknown; 'move', or 'zero' for the control")
    for unit in units.units:
        if not (0 <= unit.layer < vit.config.depth and 0 <= unit.unit < _width(vit)):
            raise InputError(f"this ViT has no unit {unit.unit} in a layer {unit.layer}")
    config, dim = vit.config, vit.config.dim
    place = config.registers_place if config.registers else "end"
    rows = config.position_rows
    if rows == "cls+registers+patches" and not config.registers:
        rows = "cls+patches"  # a table with rows for no registers stays as it is
    changed = {"registers": vit.tokenizer.proj.weight.new_zeros(config.registers + count, dim)}
    if vit.registers is not None:
        changed["registers"][: config.registers] = vit.registers.detach()
    if rows == "cls+registers+patches" and vit.positions is not None:
        table, first = vit.positions.detach(), config.class_token + config.registers
        changed["positions"] = torch.cat((table[:first], table.new_zeros(count, dim), table[first:]))
    new = dataclasses.replace(config, registers=config.registers + count, registers_place=place, position_rows=rows)
    moved = twin(vit, new, changed, MovedViT)
    lead = moved._leading
    behind = new.class_token + new.registers - lead
    patches = slice(lead, -behind if behind else None)
    registers = slice(-count, None) if place == "end" else slice(lead - count, lead)
    for layer, numbers in units.by_layer().items():
        block = cast(Block, moved.blocks[layer])
        block.mlp = _MovedMlp(block.mlp, numbers, patches, registers, how == "move")
    return moved


def _width(vit: ViT) -> int:
    """How many hidden units each MLP has."""
    return cast(Block, vit.blocks[0]).mlp.fc2.in_features


def _batches(vit: ViT, images: Images | Iterable[Tensor]) -> Iterator[Tensor]:
    several = isinstance(images, (list, tuple))
    if isinstance(images, (Tensor, np.ndarray, Image.Image)) or (several and not all(map(_is_batch, images))):
        yield as_tensor(vit, cast(Images, images))
        return
    for batch in images:
        yield as_tensor(vit, batch)


def _is_batch(images: Any) -> bool:
    return isinstance(images, Tensor) and images.dim() == 4


def _activations(vit: ViT, images: Tensor, top: int) -> Iterator[tuple[int, Tensor]]:
    """What the last linear layer of each MLP is given at the patches, in magnitude, `(B, N, hidden)`."""
    for passage in passages(vit, images, range(top + 1)):
        block = passage.block
        x = passage.x + block.scale1(block.attn.out(block.attn.joined(passage.out, passage.kv)))
        inner = block.mlp.inner(block.norm2(x))
        yield passage.layer, vit.name(inner, passage.grid).patches.abs()
