"""What every diagnosis is given back as: a frozen dataclass that prints as a table and turns into JSON values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Report:
    """A frozen dataclass of tensors and plain values; a subclass says in `__str__` how it is read."""

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values: a tensor becomes nested lists, and what is not a number becomes None."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of equal width, numbers to three digits, a dash for what is not a number."""
    lines = [list(header), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def mean_where(values: Tensor, chosen: Tensor, dim: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Mean of the chosen values over `dim`, not a number where none is."""
    return torch.where(chosen, values, 0).sum(dim) / chosen.sum(dim)


def _plain(value: Any) -> Any:
    if isinstance(value, Report):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else "-"
    return str(value)
