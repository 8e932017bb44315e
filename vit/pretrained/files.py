"""Reading a checkpoint: a file or a folder of any library, a hub repository. Nothing in a file is executed."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.vit.checkpoint import CONFIG, WEIGHTS, is_ours, read_config
from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path
from regard.vit.pretrained import hub, settings, torch_file
from regard.vit.pretrained.source import Source
from regard.vit.pretrained.unwrap import tensors_of

# In order of preference; a folder may hold several of them.
_WEIGHTS = (
    "model.safetensors", "open_clip_model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "open_clip_pytorch_model.bin",
)  # fmt: skip
_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".tar")
_ZIP = b"PK\x03\x04"
# Pickles of any protocol; before the second they have no mark, and begin with a container or a name.
_PICKLES = (b"\x80", b"(", b"c", b"}", b"]")
_HEADER_MOST = 100_000_000  # bytes that safetensors allows its header
# What lies under the name of a checkpoint and is none, by how it begins.
_NO_WEIGHTS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`",
    b"<!doctype html": "a web page, not a checkpoint; download the file itself",
    b"<html": "a web page, not a checkpoint; download the file itself",
    b"{": "JSON, not a checkpoint",
}
_BESIDE = (CONFIG, "preprocessor_config.json", "processor_config.json", "open_clip_config.json")


def locate(source: str | Path) -> Path:
    """The file or folder of a model: a local one, a training run's, or a hub repository or timm name, fetched once.

    Raises InputError naming what was looked for.
    """
    path = typed_path(source)
    if path.is_file():
        if path.name in (CONFIG, WEIGHTS) and is_ours(path.parent):
            raise InputError(f"{path}: a model is a folder with {CONFIG} and {WEIGHTS}, not a file; name the folder")
        return path
    if path.is_dir():
        run = path / "model"  # a training run keeps its model there
        if not (path / CONFIG).exists() and (run / CONFIG).exists():
            return run
        saved = (path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))  # of one that is not finished
        return next((file for file in saved if file.is_file()), path)
    if path.suffix in _SUFFIXES:  # never the name of a repository
        raise InputError(f"no model at {str(source)!r}: no such file")
    return hub.fetch(str(source), _BESIDE, _WEIGHTS)


def read(path: Path, label: str, part: str | None = None) -> Source:
    """All tensors of a file or folder, with the configuration that lies beside them.

    Raises InputError for a file that is unreadable or that holds more than tensors and plain values.
    """
    folder = path if path.is_dir() else path.parent
    file = _weights(path) if path.is_dir() else path
    content, where = _content(file), label if path.is_file() else f"{label} ({file.name})"
    tensors, extra, notes = tensors_of(content, where, part)
    if "tokenizer.proj.weight" in tensors:  # ours, without a passport, or with one that is told of best by itself
        read_config(folder, object)
    source = Source(where=where, tensors=tensors, unwrapped=notes)
    if path.is_dir() or file.name in _WEIGHTS:  # a file by any other name need not belong to what lies beside it
        named = {name: _json(folder / name) for name in _BESIDE}
        # transformers 5 writes a processor of pictures and text as one, and prefers it.
        joint = named["processor_config.json"].get("image_processor")
        source.settings, source.processor = named[CONFIG], joint or named["preprocessor_config.json"]
        source.settings |= {"open_clip": named["open_clip_config.json"]} if named["open_clip_config.json"] else {}
    if not source.settings:
        source.settings = {"run": {str(name): value for name, value in extra.items()}}
        source.sizes = settings.image_sizes(extra)
    source.stated = settings.stated(source.settings)
    return source


def _weights(folder: Path) -> Path:
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is not None:
        return found
    others = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if len(others) == 1:
        return others[0]
    holds = (
        f"several files with weights ({', '.join(f.name for f in others[:3])}); name one" if others else "no weights"
    )
    raise InputError(
        f"{folder}: it holds {holds}; Regard reads {', '.join(_WEIGHTS[:2])} and {', '.join(_SUFFIXES)} files"
    )


def _content(file: Path) -> Any:
    """What is in a file, told by its first bytes."""
    if file.name.endswith(".index.json"):
        return _shards(file)
    try:
        with file.open("rb") as opened:
            head = opened.read(512)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({reason(error)})") from error
    if _is_safetensors(head):  # first: the length it begins with may look like the mark of a pickle
        return _safetensors(file)
    if head.startswith(_ZIP) and _is_npz(file):
        return _npz(file)
    if head.startswith((_ZIP, *_PICKLES)) or head[257:262] == b"ustar":  # a tar is the oldest form of torch
        return torch_file.read(file)
    kind = next((kind for mark, kind in _NO_WEIGHTS.items() if head.lstrip().lower().startswith(mark)), None)
    raise InputError(
        f"{file}: {kind or 'neither safetensors, nor a checkpoint of torch, nor .npz' if head else 'empty'}"
    )


def _is_safetensors(head: bytes) -> bool:
    """A length in eight bytes, then JSON of that length."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _HEADER_MOST


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        # Copied out of the mapped file: a program that overwrites the file in place would kill this one.
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{file}: a safetensors file that is damaged or cut short ({reason(error)}); fetch it again"
        ) from error


def _shards(index: Path) -> dict[str, Tensor]:
    names = _json(index).get("weight_map")
    if not isinstance(names, dict):
        raise InputError(f"{index}: no weight_map is in it")
    tensors: dict[str, Tensor] = {}
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise InputError(f"{index}: it names {name!r}, which is not there")
        tensors |= tensors_of(_content(index.parent / name), str(index.parent / name))[0]
    if missing := sorted(set(names) - set(tensors)):
        raise InputError(f"{index}: it names tensor {missing[0]!r}, which {names[missing[0]]} does not hold")
    return tensors


def _is_npz(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        return bool(names) and all(name.endswith(".npy") for name in names)
    except zipfile.BadZipFile:
        return False


def _npz(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return {name: _from_numpy(array) for name, array in arrays.items()}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{file}: not a readable .npz of plain arrays ({reason(error)})") from error


def _from_numpy(array: np.ndarray) -> Tensor:
    # numpy has no bfloat16, and keeps JAX's as two bytes without a meaning.
    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({reason(error)})") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds no JSON object")
    return content
