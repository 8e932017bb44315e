"""A model with its passport: `config.json` + `model.safetensors`, and nothing that could be executed.

`config.json` is a frozen dataclass as JSON under a format number. Every tensor is accounted for: a missing,
unused or misshapen one is an error that names it.
"""

import dataclasses
import difflib
import json
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.files import write_atomically

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
Model = TypeVar("Model", bound=nn.Module)


def find(source: str | Path) -> Path:
    """The folder of a saved model: a local one, a training run, or a hub repository `owner/name`, fetched once.

    Raises InputError naming what was looked for.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        run = folder / "model"  # a training run keeps its model there
        return run if not (folder / CONFIG).exists() and (run / CONFIG).exists() else folder
    if folder.is_file():
        raise InputError(f"{folder}: a model is a folder with {CONFIG} and {WEIGHTS}, not a file{_pickle_note(folder)}")
    name = str(source)
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise InputError(f"no model at {name!r}: no such folder, and not a hub name of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, "tokenizer.json"]))
    except Exception as error:  # the hub's own kinds, and whatever the HTTP client beneath it lets through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"no model called {name!r}: no such folder, and the hub did not give it ({reason})") from error


def save(
    folder: str | Path,
    config: Any,
    model: nn.Module,
    extra: Mapping[str, Callable[[Path], object]] | None = None,
) -> None:
    """Write a model folder, whole or not at all; an older model in its place is replaced only at the end.

    `extra` maps further file names to functions that write them at a given path.
    Raises InputError where `folder` holds something else than a model; OSError as the file system gives it.
    """
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not (
        folder.is_dir() and {f.name for f in folder.iterdir()} <= {CONFIG, WEIGHTS, *(extra or {})}
    ):
        raise InputError(f"{folder}: exists and is no saved model; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        fresh.chmod(folder.stat().st_mode if folder.exists() else 0o755)
        passport = {"format": FORMAT, "kind": type(config).__name__, **to_json(config)}
        text = json.dumps(passport, indent=2) + "\n"
        write_atomically(fresh / CONFIG, lambda file: file.write(text.encode()))
        # Shared memory is written out once per name: the file stands for itself.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        write_atomically(fresh / WEIGHTS, lambda file: file.write(to_safetensors(tensors)))
        for name, write in (extra or {}).items():
            write(fresh / name)
        if folder.exists():
            old = fresh.with_suffix(".old")
            folder.rename(old)
            try:
                fresh.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def load(folder: Path, config_type: type, build: Callable[[Any], Model]) -> Model:
    """Read the passport, build the model, and fill in every tensor. The model comes in inference mode.

    Raises InputError for a file that is missing, unreadable, pickled, or of another format, and for any tensor that is
    missing, unused, of another shape or not finite.
    """
    config = read_config(folder, config_type)
    with torch.device("meta"):
        model = build(config)
    tensors = read_tensors(folder / WEIGHTS)
    expected = model.state_dict()
    _account(folder / WEIGHTS, expected, tensors)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True).eval()


def read_config(folder: Path, config_type: type) -> Any:
    """The passport of a model folder. Raises InputError naming the file and the field."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{path}: missing; a model folder holds {CONFIG} and {WEIGHTS}")
    try:
        passport = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(passport, dict) or "format" not in passport or "kind" not in passport:
        raise InputError(f"{path}: not a passport written by Regard (it states no format and kind)")
    number, kind = passport.pop("format"), passport.pop("kind")
    if number != FORMAT:
        raise InputError(
            f"{path}: format {number}, this version of Regard reads format {FORMAT}; update Regard or re-export"
        )
    if kind != config_type.__name__:
        raise InputError(f"{path}: holds a {kind}, a {config_type.__name__} was asked for")
    return from_json(passport, config_type, str(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises InputError; a pickle is refused, nothing in it runs."""
    if not path.is_file():
        raise InputError(f"{path}: missing; a model folder holds {CONFIG} and {WEIGHTS}")
    try:
        # Copied out of the mapped file: a program that overwrites the file in place would kill this one.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}){_pickle_note(path)}") from error


def _account(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing, unused = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unused:
        parts = []
        if missing:
            close = difflib.get_close_matches(missing[0], unused, 1)
            hint = f" (is it {close[0]!r} in the file?)" if close else ""
            parts.append(f"{len(missing)} missing: {_some(missing)}{hint}")
        if unused:
            parts.append(f"{len(unused)} unused: {_some(unused)}")
        raise InputError(f"{path}: tensors do not fit the configuration: {'; '.join(parts)}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the configuration needs {tuple(expected[name].shape)}"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise InputError(f"{path}: {name} holds {tensor.dtype}, the configuration needs {expected[name].dtype}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"{path}: {name} holds values that are not finite")


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _pickle_note(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    pickled = head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or head == b"PK\x03\x04"
    return "; it looks like a pickle, which can run code when opened: refused" if pickled else ""


def to_json(config: Any) -> dict[str, Any]:
    """A frozen dataclass as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: Any, kind: Any, where: str) -> Any:
    """JSON values back to the annotated type `kind`. Raises InputError naming the field at fault."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(values, dict):
            raise InputError(f"{where}: expected an object for {kind.__name__}, found {values!r}")
        hints = typing.get_type_hints(kind)
        if unknown := sorted(set(values) - set(hints)):
            raise InputError(f"{where}: unknown field {unknown[0]!r}; {kind.__name__} has {', '.join(hints)}")
        if missing := sorted(set(hints) - set(values)):
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
            raise InputError(f"{where}: expected a list, found {values!r}")
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
            raise InputError(f"{where}: {values!r} is none of {', '.join(map(str, arguments))}")
        return values
    if kind is float and isinstance(values, int) and not isinstance(values, bool):
        return float(values)
    if not isinstance(values, kind) or (isinstance(values, bool) and kind is not bool):
        raise InputError(f"{where}: expected {kind.__name__}, found {values!r}")
    return values
