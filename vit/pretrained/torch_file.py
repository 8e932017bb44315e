"""Reading what `torch.save` wrote without running any of it.

Such a file is a program for a small stack machine. torch's own reader, restricted to weights, builds tensors and plain
values and calls nothing else. What checkpoints commonly hold beside tensors (arguments of a run, settings, paths,
numbers of numpy) is let through as values; a name of anything else becomes a stand-in that keeps what the file says of
it, and that refuses to be called.
"""

import argparse
import collections
import datetime
import functools
import pathlib
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.vit.errors import InputError, reason

# Settings that hyper-parameters are kept in, and parts of a recipe: a call of these is remembered, not made.
_SETTINGS = (
    "addict.", "collections.deque", "easydict.", "functools.partial", "fvcore.common.config.", "lightning.",
    "lightning_fabric.", "ml_collections.", "omegaconf.", "pytorch_lightning.", "yacs.",
)  # fmt: skip
_SAVE_AGAIN = "save its weights alone: torch.save(model.state_dict(), path)"
_NAMED = re.compile(r"GLOBAL ([\w.]+)")
# Module and name as two lines, or in newer protocols as two short strings, each perhaps remembered.
_LOOKED_UP = (
    re.compile(rb"c([\w.]{2,200})\n([\w.]{3,200})\n"),
    re.compile(rb"\x8c.([\w.]{1,200})\x94?\x8c.([\w.]{1,200})\x94?\x93", re.DOTALL),
)
_CONTENT_MOST = 1 << 24


class Refused(Exception):
    """A file wanted `name` to be called."""

    def __init__(self, name: str):
        super().__init__(f"a call of {name}")
        self.name = name


class Inert:
    """Stands in for an object of a library that is not imported: its attributes are kept, its methods are not there."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.__dict__.update({str(name): value for name, value in part.items()})


class InertDict:
    """Stands in for a dict of a library that is not imported: torch's reader fills none but plain ones."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return collections.OrderedDict()


class _Uncallable(type):
    stands_for: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise Refused(cls.stands_for)


def read(file: Path) -> Any:
    """The content of a checkpoint of torch: mappings, lists and plain values around tensors.

    Raises InputError for a file that would run something, naming it, and for one that cannot be read.
    """
    stand_ins = {name: _stand_in(name) for name in _globals_in_zip(file)}
    while True:
        try:
            allowed = [*_harmless(), *((stand_in, name) for name, stand_in in stand_ins.items())]
            # Opened here: torch would go by the file's name.
            with file.open("rb") as opened, torch.serialization.safe_globals(allowed), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what it may not be able to read; it says so in the end
                return torch.load(opened, map_location="cpu", weights_only=True, mmap=False)
        except Exception as error:  # the reader's own kinds are many, and all mean that the file cannot be used
            found = _NAMED.search(str(error))
            name = _full_name(found[1]) if found else None
            # Files from before 2020 are no zip archives, and tell one name after the other.
            if name is not None and name not in stand_ins and "is blocked" not in str(error):
                stand_ins[name] = _stand_in(name)
                continue
            raise _explained(file, error, error.name if isinstance(error, Refused) else name) from error


def _explained(file: Path, error: Exception, name: str | None) -> InputError:
    if _is_program(file):
        return InputError(
            f"{file}: a program of torch.export, not weights alone; run it with torch.export.load, and open the weights"
            " it was made of"
        )
    if _is_torchscript(file):
        return InputError(
            f"{file}: a TorchScript archive, which is a program: refused, and nothing in it was run; open its weights"
            " in another form, such as the hub's safetensors"
        )
    if name is None and "Unsupported operand" in str(error):
        called = sorted(_looked_up(file))
        if not called:
            return InputError(f"{file}: pickled in a way that torch reads only by running it: refused; {_SAVE_AGAIN}")
        name = called[0]
    if name is not None:
        return InputError(f"{file}: it would run {name} when opened: refused, and nothing in it was run; {_SAVE_AGAIN}")
    with file.open("rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"
    if zipped and not zipfile.is_zipfile(file):
        return InputError(f"{file}: cut short: it begins as a zip archive and lacks the end; fetch it again")
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip()  # what stands before is advice on running it
    return InputError(f"{file}: not a readable checkpoint of torch ({reason(Exception(said or error))})")


def _is_program(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith(("archive_format", "models/model.json")) for name in archive.namelist())


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any("/code/" in name or name.endswith("constants.pkl") for name in archive.namelist())


def _globals_in_zip(file: Path) -> list[str]:
    """The names in a file that torch would not take by itself, found without reading the tensors."""
    try:
        with file.open("rb") as opened, torch.serialization.safe_globals([*_harmless()]):
            return list(torch.serialization.get_unsafe_globals_in_checkpoint(opened))
    except Exception:  # whatever cannot be read is told of by torch.load
        return []


def _looked_up(file: Path) -> set[str]:
    """Names that a pickle looks up in a way that torch does not follow; read as bytes, for the message alone."""
    with file.open("rb") as opened:
        head = opened.read(_CONTENT_MOST)
    pairs = (pair for pattern in _LOOKED_UP for pair in pattern.findall(head))
    found = {f"{module.decode()}.{name.decode()}" for module, name in pairs}
    return {name for name in found if not name.startswith(("argparse.", "collections.", "numpy.", "torch."))}


def _full_name(name: str) -> str:
    """What torch's message names, with the `builtins.` that it leaves out."""
    return name if "." in name else f"builtins.{name}"


def _stand_in(name: str) -> type:
    plain = name.rsplit(".", 1)[-1]
    if name.startswith(_SETTINGS):
        return InertDict if plain.endswith(("Dict", "CfgNode")) else Inert
    return _Uncallable("Uncallable", (Inert,), {"stands_for": name})


class _List:
    def __new__(cls, values: Any = (), *args: Any) -> Any:
        return list(values)


@functools.cache
def _harmless() -> tuple[Any, ...]:
    """Plain containers and values of Python and numpy; building one runs nothing."""
    core = np._core if hasattr(np, "_core") else np.core
    dtypes = {type(np.dtype(name)) for name in ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")}
    numpy = [
        (getattr(core.multiarray, name), f"numpy.{place}.multiarray.{name}")
        for name in ("scalar", "_reconstruct")
        for place in ("core", "_core")
    ]
    paths = [
        (kind, f"{module}.{name}")
        for kind, names in {
            pathlib.PurePosixPath: ("PosixPath", "PurePosixPath"),
            pathlib.PureWindowsPath: ("WindowsPath", "PureWindowsPath"),
        }.items()
        for name in names
        for module in ("pathlib", "pathlib._local")
    ]
    builtins = [(kind, f"builtins.{kind.__name__}") for kind in (bool, dict, float, int, list, set, str, tuple)]
    return (
        argparse.Namespace,
        datetime.datetime,
        datetime.timedelta,
        np.dtype,
        np.ndarray,
        *dtypes,
        *numpy,
        *paths,
        *builtins,
        (InertDict, "collections.defaultdict"),
        (_List, "collections.deque"),
        (Inert, "typing.Any"),
    )
