"""Frozen dataclasses as plain JSON values and back, every value checked against its field's annotation.

A passport, a recipe and a flag of the command line are the same thing here.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from regard.vit.errors import InputError

Config = TypeVar("Config")

# Metadata of a field that came later: a passport from before does not state it, and means its default.
LATER = {"later": True}


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with some fields changed; for a field that is a dataclass, a mapping changes some of its fields.

    Values may be Python's or JSON's (a list for a tuple). Raises InputError naming the field at fault.
    """
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    kind = type(config).__name__
    if unknown := sorted(set(changes) - known):
        raise InputError(f"{kind} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    values = {}
    for name, value in changes.items():
        own = getattr(config, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(own):
            value = changed(own, value)
        values[name] = value
    hints = typing.get_type_hints(type(config))
    checked = {name: from_json(_plain(value), hints[name], f"{kind}.{name}") for name, value in values.items()}
    return dataclasses.replace(config, **checked)  # type: ignore[type-var]


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`; where both hold a mapping the two are merged in the same way."""
    both = {n: merged(old[n], v) for n, v in new.items() if isinstance(v, Mapping) and isinstance(old.get(n), Mapping)}
    return {**old, **new, **both}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    return list(value) if isinstance(value, tuple) else value


def to_json(config: Any) -> dict[str, Any]:
    """A frozen dataclass as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: Any, kind: Any, where: str) -> Any:
    """JSON values back to the annotated type `kind`. Raises InputError naming the field at fault."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(values, dict):
            raise InputError(f"{where}: expected an object for {kind.__name__}, found {values!r}")
        every = typing.get_type_hints(kind)
        hints = {field.name: every[field.name] for field in dataclasses.fields(kind)}  # no ClassVar
        if unknown := sorted(set(values) - set(hints)):
            raise InputError(f"{where}: unknown field {unknown[0]!r}; {kind.__name__} has {', '.join(hints)}")
        later = {field.name for field in dataclasses.fields(kind) if field.metadata.get("later")}
        if missing := sorted(set(hints) - set(values) - later):
            raise InputError(f"{where}: field {missing[0]!r} of {kind.__name__} is missing")
        fields = {name: from_json(value, hints[name], f"{where}, {name}") for name, value in values.items()}
        try:
            return kind(**fields)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if values is None and type(None) in arguments:
            return None
        (kind,) = [a for a in arguments if a is not type(None)]
        return from_json(values, kind, where)
    if origin is tuple:
        if not isinstance(values, list):
            raise InputError(f"{where}: expected a list, such as [64, 64], found {values!r}")
        kinds = [arguments[0]] * len(values) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(values):
            raise InputError(f"{where}: expected {len(kinds)} values, found {len(values)}")
        return tuple(from_json(v, k, where) for v, k in zip(values, kinds, strict=True))
    if origin is dict:
        if not isinstance(values, dict):
            raise InputError(f"{where}: expected a mapping, found {values!r}")
        return values
    if origin is typing.Literal:
        if values not in arguments:
            raise InputError(f"{where} is {values!r}; choose one of {', '.join(map(str, arguments))}")
        return values
    if kind is float and isinstance(values, int | float) and not isinstance(values, bool):
        if not math.isfinite(values):
            raise InputError(f"{where}: {values} is not a finite number")
        return float(values)
    if not isinstance(values, kind) or (isinstance(values, bool) and kind is not bool):
        raise InputError(f"{where}: expected {kind.__name__}, found {values!r}")
    return values
