"""Maps as `.npz`, to be read without regard and without unpickling anything.

    with np.load("photo-look.npz") as file:
        maps = file["maps"]          # (L, Q, M, gh, gw), float32 or float16
        layers = file["layers"]      # (L,), empty where the method runs through all layers at once
        queries = file["queries"]    # (Q,) names: "cls", "reg0", "patch (12, 30)"
        heads = file["heads"]        # (M,), -1 for a map that heads are fused into
        names = file["names"]        # (L, Q, M): "head 3", "auto: heads 3, 0"
        cls = file["cls"]            # (L, Q, M) mass on the class token; size 0 without one
        registers = file["registers"]  # (L, Q, M, R) mass on each register
        sink = file["sink"]          # (L, Q, M) mass that a learned sink took; size 0 without one
        grid = file["grid"]          # (gh, gw)
        picture, seen = file["picture"], file["seen"]  # (height, width) of the file and of the model's input
        box = file["box"]            # (top, left, bottom, right) of the grid in the picture's pixels
        model, method = str(file["model"]), str(file["method"])
        share = bool(file["share"])  # maps and masses of a query sum to 1

With norms asked for `norms (L', gh, gw)`, `special_norms (L', 1 + R)` and `norm_layers (L',)`;
with PCA `colours (gh, gw, 3)`.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.pictures.maps import Maps
from regard.pictures.sheet import Unwritable
from regard.vit.errors import InputError
from regard.vit.files import write_atomically
from regard.vit.maps.grid import Frame

Precision = Literal["float32", "float16"]


def save_arrays(maps: Maps, path: Path, precision: Precision = "float32") -> Path:
    """Write the maps, whole or not at all. Raises Unwritable where the place cannot be written.

    The docstring of this module says what the file holds and how it is read.
    """
    kind = np.dtype(precision)

    def floats(tensor: Tensor | None) -> np.ndarray:
        return np.zeros(0, kind) if tensor is None else tensor.float().cpu().numpy().astype(kind)

    arrays = {
        "maps": floats(maps.maps),
        "cls": floats(maps.cls),
        "registers": floats(maps.registers),
        "sink": floats(maps.sink),
        "layers": np.array(maps.layers, np.int64),
        "heads": np.array(maps.heads, np.int64),
        "queries": np.array(maps.queries, np.str_),
        "names": np.array(maps.names, np.str_),
        "grid": np.array(maps.frame.grid, np.int64),
        "picture": np.array(maps.frame.picture, np.int64),
        "seen": np.array(maps.frame.seen, np.int64),
        "box": np.array(maps.frame.box, np.float64),
        "share": np.array(maps.share),
        "model": np.array(maps.model),
        "method": np.array(maps.method),
    }
    if maps.norms is not None:
        arrays["norms"], arrays["special_norms"] = floats(maps.norms), floats(maps.special_norms)
        arrays["norm_layers"] = np.array(maps.norm_layers, np.int64)
    if maps.colours is not None:
        arrays["colours"] = floats(maps.colours)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    except OSError as error:
        raise Unwritable(f"cannot write {path} ({error.strerror or error}); choose another --out") from error
    return path


def load_arrays(path: Path) -> Maps:
    """Read what `save_arrays` wrote. Raises InputError for a file that is none of these."""
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        frame = Frame(*(tuple(held[name].tolist()) for name in ("picture", "seen", "grid", "box")))
        maps = _tensor(held["maps"])
        assert maps is not None
        return Maps(
            maps,
            _tensor(held["cls"]),
            torch.from_numpy(held["registers"]).float(),
            _tensor(held["sink"]),
            tuple(held["layers"].tolist()),
            tuple(held["queries"].tolist()),
            tuple(held["heads"].tolist()),
            held["names"].tolist(),
            bool(held["share"]),
            frame,
            str(held["model"]),
            str(held["method"]),
            _tensor(held.get("norms")),
            _tensor(held.get("special_norms")),
            tuple(held["norm_layers"].tolist()) if "norm_layers" in held else (),
            _tensor(held.get("colours")),
        )
    except Exception as error:  # a zip that is cut off meets numpy with several kinds
        raise InputError(f"{path}: not the maps of regard look, or cut off; remove it") from error


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None or not array.size else torch.from_numpy(array).float()
