"""A model with its passport: `config.json` + `model.safetensors`, and nothing that could be executed.

`config.json` is a frozen dataclass as JSON under a format number. Every tensor is accounted for: a missing,
unused or misshapen one is an error that names it.
"""

import difflib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path, write_atomically
from regard.vit.values import from_json, to_json

FORMAT = 1
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
Model = TypeVar("Model", bound=nn.Module)


def find(source: str | Path) -> Path:
    """The folder of a saved model: a local one, a training run, or a hub repository `owner/name`, fetched once.

    Raises InputError naming what was looked for.
    """
    folder = typed_path(source)
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
        said = reason(error)
        raise InputError(f"no model called {name!r}: no such folder, and the hub did not give it ({said})") from error


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
    folder = typed_path(folder).resolve()
    require_place(folder, *(extra or {}))
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


def require_place(folder: Path, *extra: str) -> None:
    """Raise InputError where `folder` holds anything that no model of ours with the files `extra` would hold."""
    if not folder.exists():
        return
    odd = sorted({f.name for f in folder.iterdir()} - {CONFIG, WEIGHTS, *extra}) if folder.is_dir() else [folder.name]
    if odd:
        raise InputError(f"{folder}: exists and is no saved model ({odd[0]!r} is there); choose another folder")


def load(folder: Path, config_type: type, build: Callable[[Any], Model]) -> Model:
    """Read the passport, build the model, and fill in every tensor. The model comes in inference mode.

    Raises InputError for a file that is missing, unreadable, pickled, or of another format, and for any tensor that is
    missing, unused, of another shape or not finite.
    """
    config = read_config(folder, config_type)
    try:
        with torch.device("meta"):
            model = build(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise InputError(f"{folder / CONFIG}: no model can be built from it ({reason(error)})") from error
    tensors = read_tensors(folder / WEIGHTS)
    expected = model.state_dict()
    _account(folder / WEIGHTS, expected, tensors)
    # A file in half precision stays so; one that mixes precisions becomes the widest, for layers compute in one.
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floats) > 1:
        widest = functools.reduce(torch.promote_types, floats)
        tensors = {name: t.to(widest) if t.is_floating_point() else t for name, t in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True).eval()


def read_config(folder: Path, config_type: type) -> Any:
    """The passport of a model folder. Raises InputError naming the file and the field."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{path}: missing; a model folder holds {CONFIG} and {WEIGHTS}")
    try:
        passport = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(passport, dict) or "format" not in passport or "kind" not in passport:
        raise InputError(f"{path}: not a passport written by Regard (it states no format and kind)")
    number, kind = passport.pop("format"), passport.pop("kind")
    if number != FORMAT:
        raise InputError(
            f"{path}: format {number}, this version of Regard reads format {FORMAT}; update Regard or re-export"
        )
    if kind != config_type.__name__:
        hint = "; open it with ImageQA.from_pretrained, its ViT is .vit" if kind == "ImageQAConfig" else ""
        raise InputError(f"{path}: holds a {kind}, a {config_type.__name__} was asked for{hint}")
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
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            raise InputError(f"{path}: {name} holds {tensor.dtype}, in which no layer computes; convert the file")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"{path}: {name} holds values that are not finite")


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _pickle_note(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    pickled = head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or head == b"PK\x03\x04"
    return "; it looks like a pickle, which can run code when opened: refused" if pickled else ""
