"""A model with its passport: `config.json` + `model.safetensors`, and nothing that could be executed.

`config.json` is a frozen dataclass as JSON under a format number. Every tensor is accounted for: a missing,
unused or misshapen one is an error that names it.
"""

import difflib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path, write_atomically, write_folder
from regard.vit.pretrained import hub
from regard.vit.values import from_json, to_json

FORMAT = 2
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAINED = "regard_model"
"""Where in a training checkpoint the passport of the model stands, with the `prefix` of its weights."""
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
    if not hub.is_name(name):
        raise InputError(f"no model at {name!r}: no such folder, and not a hub name of the form owner/name")
    return hub.snapshot(name, name, [CONFIG, WEIGHTS, hub.TOKENIZER])


def is_ours(folder: Path) -> bool:
    """Whether a folder's `config.json` is a passport, readable or not, rather than another library's configuration."""
    path = folder / CONFIG
    if not path.is_file():
        return False
    try:
        passport = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(passport, dict) and "format" in passport and "kind" in passport


def passport(config: Any) -> dict[str, Any]:
    """All that a model's numbers depend on besides its weights, as plain values."""
    return {"format": FORMAT, "kind": type(config).__name__, **to_json(config)}


def of_training(file: Path, config_type: type) -> tuple[Any, dict[str, Tensor]] | None:
    """Configuration and weights of the model in one of our training checkpoints; None for any other file."""
    if file.suffix != ".ckpt" or not file.is_file():
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        told = dict(content[TRAINED])
    except Exception:  # not ours, or no checkpoint at all: whoever reads it next says so
        return None
    prefix = told.pop("prefix")
    if told.pop("format") != FORMAT or told.pop("kind") != config_type.__name__:
        return None
    config = from_json(told, config_type, str(file))
    tensors = {n.removeprefix(prefix): t for n, t in content["state_dict"].items() if n.startswith(prefix)}
    return config, tensors


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
    text = json.dumps(passport(config), indent=2) + "\n"
    # Shared memory is written out once per name: the file stands for itself.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    files: dict[str, Callable[[Path], object]] = {
        CONFIG: lambda path: write_atomically(path, lambda file: file.write(text.encode())),
        WEIGHTS: lambda path: write_atomically(path, lambda file: file.write(to_safetensors(tensors))),
    }
    write_folder(folder, {**files, **(extra or {})})


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
    account(str(folder / WEIGHTS), expected, tensors)
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
    if number == 1:
        passport = _from_format_1(passport)
    elif number != FORMAT:
        raise InputError(
            f"{path}: format {number}, this version of Regard reads formats 1 to {FORMAT}; update Regard or re-export"
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


def _from_format_1(passport: dict[str, Any]) -> dict[str, Any]:
    """Format 2 knows more ways to build a ViT; what an older file does not mention it does not have."""
    vit = passport.get("vit", passport)
    if isinstance(vit, dict) and isinstance(vit.get("position_resize"), dict) and "rope_base" in vit:
        vit = dict(vit)
        base = vit.pop("rope_base")
        vit["position_resize"] = {"align_corners": False, **vit["position_resize"]}
        vit["rope"] = {"coordinates": "centred", "base": base, "reference": None, "periods": None}
        vit |= {"key_bias": True, "attn_norm": False, "mlp_norm": False, "norm_place": "tokens", "classes": 0}
        if isinstance(vit.get("preprocess"), dict):
            squash = {"crop_ratio": 1.0} if vit["preprocess"].get("fit") == "squash" else {}  # it had no meaning there
            vit["preprocess"] = {"crop_offset": "even", "resampler": "pillow", **vit["preprocess"], **squash}
    return {**passport, "vit": vit} if "vit" in passport else vit


def account(
    where: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], called: Callable[[str], str] = str
) -> None:
    """Raise InputError unless exactly the expected tensors are there, of their shapes, finite.

    `called` gives the name that the file itself has for a tensor.
    """
    missing = sorted({called(name) for name in expected.keys() - found.keys()})
    unused = sorted({called(name) for name in found.keys() - expected.keys()})
    if missing or unused:
        parts = []
        if missing:
            close = difflib.get_close_matches(missing[0], unused, 1)
            hint = f" (is it {close[0]!r} in the file?)" if close else ""
            parts.append(f"{len(missing)} missing: {some(missing)}{hint}")
        if unused:
            parts.append(f"{len(unused)} unused: {some(unused)}")
        raise InputError(f"{where}: tensors do not fit the configuration: {'; '.join(parts)}")
    for name, tensor in found.items():
        theirs = called(name)
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{where}: {theirs} has shape {tuple(tensor.shape)}, the configuration needs"
                f" {tuple(expected[name].shape)}"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise InputError(f"{where}: {theirs} holds {tensor.dtype}, the configuration needs {expected[name].dtype}")
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            raise InputError(f"{where}: {theirs} holds {tensor.dtype}, in which no layer computes; convert the file")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"{where}: {theirs} holds values that are not finite")


def some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _pickle_note(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    pickled = head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or head == b"PK\x03\x04"
    return "; it looks like a pickle, which can run code when opened: refused" if pickled else ""
