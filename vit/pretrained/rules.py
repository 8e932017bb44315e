"""Rename rules: how a layout's tensors become ours, and back.

A rule pairs a name of theirs with one of ours. `#` is a block's number and `*` stands for weight or bias, the same on
both sides; `{q,k,v}` on our side are several tensors of ours that theirs holds row-stacked. A `Shape` says what
happens to the values on the way in, and undoes it on the way out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.vit.config import ViTConfig
from regard.vit.pretrained.source import pattern_of

_Turn = Callable[[Tensor, ViTConfig], Tensor]


@dataclass(frozen=True)
class Shape:
    """How values are reshaped on the way in (`read`) and out (`write`)."""

    read: _Turn
    write: _Turn


SAME = Shape(lambda t, c: t, lambda t, c: t)
# A convolution whose stride is its size is a linear layer on flattened patches.
CONV = Shape(
    lambda t, c: t.flatten(1) if t.dim() == 4 else t,
    lambda t, c: t.unflatten(1, (c.channels, c.patch_size, c.patch_size)) if t.dim() == 2 else t,
)
TOKEN = Shape(lambda t, c: t.flatten() if t.shape[:-1].numel() == 1 else t, lambda t, c: t[None, None])
ROWS = Shape(lambda t, c: t[0] if t.dim() == 3 and len(t) == 1 else t, lambda t, c: t[None])


def turned_pairs(rows: int) -> Shape:
    """Rope on neighbouring pairs (2i, 2i + 1) as rope on (i, i + K/2): the rows of q and k in another order.

    `rows` is how many of the row-stacked parts (q, k, then v) are turned.
    """

    def order(t: Tensor, config: ViTConfig, back: bool) -> Tensor:
        if not config.has_rope or config.rope.coordinates == "centred":  # which turns halves already
            return t
        width = config.width_of_head
        if t.dim() == 0 or len(t) % width:  # of a wrong shape, which is found later on
            return t
        ours = torch.arange(width).unflatten(0, (-1, 2)).t().flatten()
        index = torch.argsort(ours) if back else ours
        parts = list(t.split(config.heads * width)) if rows else [t]
        for i in range(min(rows, len(parts)) if rows else 1):
            parts[i] = parts[i].unflatten(0, (-1, width))[:, index].flatten(0, 1)
        return torch.cat(parts)

    return Shape(lambda t, c: order(t, c, False), lambda t, c: order(t, c, True))


@dataclass(frozen=True)
class Rule:
    """One of their names and what it is called here.

    Several rules may lead to one name of ours, as where a layout has two dialects: all are read, and the first whose
    `when` holds is written. Of several rules for one name of theirs, the first whose `when` holds reads it.
    """

    theirs: str
    ours: str
    shape: Shape = SAME
    when: Callable[[ViTConfig], bool] = lambda config: True

    @property
    def parts(self) -> list[str]:
        """Our templates: one, or as many as `{...}` names."""
        found = re.search(r"\{(.+)\}", self.ours)
        if not found:
            return [self.ours]
        return [self.ours.replace(found[0], part) for part in found[1].split(",")]


@dataclass(frozen=True)
class Renamed:
    """The outcome of reading: our tensors, what each was called, and what no rule knew."""

    tensors: dict[str, Tensor]
    origin: dict[str, str]
    unknown: list[str]


def read(rules: Iterable[Rule], tensors: Mapping[str, Tensor], config: ViTConfig) -> Renamed:
    """Their tensors under our names."""
    compiled = [(pattern_of(rule.theirs), rule) for rule in sorted(rules, key=lambda rule: not rule.when(config))]
    ours: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    unknown = []
    for name, tensor in tensors.items():
        found = next(((match, rule) for regex, rule in compiled if (match := regex.fullmatch(name))), None)
        if found is None:
            unknown.append(name)
            continue
        match, rule = found
        values = rule.shape.read(tensor, config)
        parts = rule.parts
        stacked = len(parts) > 1 and values.dim() > 0 and len(values) % len(parts) == 0
        pieces = values.chunk(len(parts)) if stacked else [values] * len(parts)
        targets = [_fill(part, match.groups()) for part in parts]
        if any(target in ours for target in targets):  # the same twice, in two dialects
            unknown.append(name)
            continue
        for target, piece in zip(targets, pieces, strict=False):
            ours[target], origin[target] = piece, name
    return Renamed(ours, origin, unknown)


def write(
    rules: Iterable[Rule], tensors: Mapping[str, Tensor], config: ViTConfig
) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors under their names, and the names of ours that the layout has no place for."""
    theirs: dict[str, Tensor] = {}
    placed: set[str] = set()
    for rule in rules:
        if not rule.when(config):
            continue
        parts = rule.parts
        for part in parts:
            regex = pattern_of(part)
            for name in tensors:
                match = regex.fullmatch(name)
                if not match or _fill(rule.theirs, match.groups()) in theirs or name in placed:
                    continue
                names = [_fill(other, match.groups()) for other in parts]
                # A bias that our key projection does not have is 0 in a stack of three.
                pieces = [tensors[n] if n in tensors else torch.zeros_like(tensors[name]) for n in names]
                values = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                theirs[_fill(rule.theirs, match.groups())] = rule.shape.write(values, config)
                placed.update(names)
    return theirs, [name for name in tensors if name not in placed]


def their_name(rules: Iterable[Rule], ours: str, present: Iterable[str] = ()) -> str | None:
    """What a tensor of ours is called there; where a layout has several dialects, in the one of the names `present`."""
    found = [
        (rule.theirs, _fill(rule.theirs, match.groups()))
        for rule in rules
        for part in rule.parts
        if (match := pattern_of(part).fullmatch(ours))
    ]
    spoken = (name for theirs, name in found if any(map(pattern_of(theirs).fullmatch, present)))
    return next(spoken, found[0][1] if found else None)


def _fill(template: str, values: Iterable[str]) -> str:
    for value in values:
        place = "#" if value.isdigit() else "*"
        template = template.replace(place, value, 1)
    return template
