"""Attention rows packed into one page, which opens from a file and fetches nothing."""

import base64
import html
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor

from regard.vit import AttentionRows
from regard.vit.errors import InputError
from regard.vit.files import typed_path, write_atomically

LIMIT_MB = 20.0
"""Megabytes that a mail server commonly takes."""
_PICTURE_SIDE = 1280  # pixels; a larger picture would only be scaled down by the browser
_COLOURS = "magma"


@dataclass(frozen=True)
class Group:
    """Queries under one heading, such as the words of a question."""

    label: str
    names: tuple[str, ...]


def write_viewer(
    path: str | Path,
    picture: Image.Image,
    rows_by_layer: Iterable[Iterable[AttentionRows]],
    *,
    groups: Sequence[Group],
    patches: bool = False,
    title: str,
    what: str = "",
    choice: str = "",
    head_names: Sequence[str] | None = None,
    mean_name: str = "mean of the heads",
    limit_mb: float = LIMIT_MB,
) -> Path:
    """Write a page that shows every given row; its size grows with layers x heads x queries x patches.

    A row is kept as one byte per patch: the square root of its share of the row's peak, in 255 steps, so that what one
    spike leaves to the others can still be told apart. A weight is off by at most 1/255 of its row's peak. The masses
    on other tokens are kept as float32. Layers and heads are packed by themselves (zlib) and unpacked when looked at.

    Args:
        path: a name ending in .html.
        picture: RGB, in the frame that the grid of patches covers.
        rows_by_layer: for each layer the rows of one image, `(1, 1, H, Q, grid height, grid width)`, whole or in
            blocks along Q. They are taken one at a time and not kept.
        groups: the names of the queries in the order of their rows.
        patches: whether, after these, every patch asks, in reading order.
        title, what: the page's heading, and a line about model and picture.
        choice: which layers and heads these are out of how many.
        head_names: of the heads, if other than their numbers.
        mean_name: what the mean over them is called.
        limit_mb: the file is not written if it would be larger.

    Raises InputError for a page above the limit, which tells what to leave out, and for a place that cannot be written.
    """
    path = typed_path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{path}: the viewer is a web page; give a name ending in .html")
    seen = _jpeg(picture)
    packer = _Packer(sum(len(group.names) for group in groups), patches, len(seen), limit_mb)
    for blocks in rows_by_layer:
        packer.add(blocks)
    packer.finish()
    facts = {
        "title": title,
        "what": what,
        "choice": f"{choice} {packer.kept()}".strip(),
        "picture": f"data:image/jpeg;base64,{seen}",
        "grid": packer.grid,
        "layers": [str(layer) for layer in packer.layers],
        "heads": [str(head) for head in packer.heads] if head_names is None else list(head_names),
        "meanName": mean_name,
        "masses": packer.masses,
        "groups": [{"label": group.label, "names": list(group.names)} for group in groups],
        "patches": patches,
        # A patch in the middle, where there is no token with a name.
        "first": 0 if packer.named else packer.grid[0] // 2 * packer.grid[1] + packer.grid[1] // 2,
        "colours": _text(_palette()),
    }
    # "<" may stand nowhere in a script, whatever a picture or a question is called.
    told = json.dumps(facts).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    page = resources.files("regard.viewer").joinpath("page.html").read_text(encoding="utf-8")
    page = page.replace("@@ROWS@@", "\n".join(packer.scripts)).replace("@@TITLE@@", html.escape(title))
    before, after = page.split("@@FACTS@@")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write((before + told + after).encode("utf-8")))
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}); choose another place") from error
    return path


class _Packer:
    """Takes rows and keeps what goes into the page: text, already packed."""

    def __init__(self, named: int, patches: bool, spent: int, limit_mb: float):
        self.named, self.patches = named, patches
        self.limit, self.size = limit_mb * 1e6, spent
        self.scripts: list[str] = []
        self.layers: list[int] = []
        self.heads: tuple[int, ...] = ()
        self.masses: list[str] = []
        self.grid = (0, 0)

    def add(self, blocks: Iterable[AttentionRows]) -> None:
        """One layer."""
        maps: list[_Stream] = []
        layer: int | None = None
        rows = 0
        for block in blocks:
            if not maps:
                layer = block.layers[0]
                self._meet(block)
                maps = [_Stream() for _ in self.heads]
            rows += block.patches.shape[3]
            for head, stream in enumerate(maps):
                stream.add(_array(block.patches[0, 0, head]), _masses(block, head))
            self._check(sum(stream.size for stream in maps), rows)
        if layer is None or rows != self._queries():
            raise ValueError(f"{rows} rows for {self._queries()} queries")
        for head, stream in enumerate(maps):
            for kind, packed in zip(("maps", "masses"), stream.finish(), strict=True):
                name = f"{kind}-{len(self.layers)}-{head}"
                self.scripts.append(f'<script type="text/plain" id="{name}">{_text(packed)}</script>')
                self.size += len(self.scripts[-1])
        self.layers.append(layer)

    def finish(self) -> None:
        if not self.layers:
            raise ValueError("there are no rows to show")
        self._check(0, 0)

    def kept(self) -> str:
        return (
            "Each row is kept in 255 steps of the square root of its share of the row's peak:"
            " a weight is off by at most 1/255 of the peak."
        )

    def _meet(self, block: AttentionRows) -> None:
        if block.patches.shape[:2] != (1, 1):
            raise ValueError("rows of one image and one layer at a time")
        if not self.layers:
            self.grid, self.heads = block.grid, block.heads
            self.masses = ["class token"] * (block.cls is not None)
            self.masses += [f"register {i}" for i in range(block.registers.shape[-1])]
            self.masses += ["sink (on nothing)"] * (block.sink is not None)
        if (block.grid, block.heads) != (self.grid, self.heads):
            raise ValueError("all layers need the same grid and heads")

    def _queries(self) -> int:
        return self.named + self.patches * self.grid[0] * self.grid[1]

    def _check(self, packed: int, rows: int) -> None:
        """Stop as soon as the page is too large, and say how large one layer of one head is."""
        size = self.size + packed * 4 / 3
        if size <= self.limit:
            return
        layers = len(self.layers) + rows / max(self._queries(), 1)
        each = size / (layers * len(self.heads))
        fit = max(int(self.limit / each), 0)
        can = f"so {fit} of them fit" if fit else "so not even one fits: show fewer or larger patches"
        raise InputError(
            f"the page would be larger than {self.limit / 1e6:g} MB: {self._queries()} rows of"
            f" {self.grid[0]} x {self.grid[1]} patches take {each / 1e6:.1f} MB for each layer and head, {can};"
            " choose fewer layers or heads, heads='mean', or a smaller picture"
        )


class _Stream:
    """The rows of one layer and head, packed as they come."""

    def __init__(self) -> None:
        self._maps, self._masses = zlib.compressobj(9), zlib.compressobj(9)
        self._parts: tuple[list[bytes], list[bytes]] = ([], [])
        self._last: np.ndarray | None = None
        self.size = 0

    def add(self, maps: np.ndarray, masses: np.ndarray) -> None:
        """`maps (Q, grid height, grid width)` and `masses (Q, other tokens)`."""
        flat = maps.reshape(len(maps), -1)
        peak = flat.max(axis=1, keepdims=True)
        levels = np.rint(255 * np.sqrt(flat / np.maximum(peak, 1e-30))).astype(np.uint8)
        # Neighbours look at much the same: differences to the row before (modulo 256) pack an eighth smaller.
        before = np.zeros_like(levels[:1]) if self._last is None else self._last
        steps, self._last = levels - np.concatenate((before, levels[:-1])), levels[-1:]
        numbers = np.concatenate((peak, masses), axis=1).astype("<f4")
        self._keep(self._maps.compress(steps.tobytes()), self._masses.compress(numbers.tobytes()))

    def finish(self) -> tuple[bytes, bytes]:
        self._keep(self._maps.flush(), self._masses.flush())
        return b"".join(self._parts[0]), b"".join(self._parts[1])

    def _keep(self, maps: bytes, masses: bytes) -> None:
        self._parts[0].append(maps)
        self._parts[1].append(masses)
        self.size += len(maps) + len(masses)


def _masses(block: AttentionRows, head: int) -> np.ndarray:
    """Mass on each token that is no patch, `(Q, tokens)`, in the order of their names."""
    parts = [] if block.cls is None else [_array(block.cls[0, 0, head])[:, None]]
    parts.append(_array(block.registers[0, 0, head]))
    if block.sink is not None:
        parts.append(_array(block.sink[0, 0, head])[:, None])
    return np.concatenate(parts, axis=1)


def _array(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def _jpeg(picture: Image.Image) -> str:
    picture = picture.convert("RGB")
    shrink = _PICTURE_SIDE / max(picture.size)
    if shrink < 1:
        width, height = (max(1, round(side * shrink)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=2.0)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=88)
    return _text(file.getvalue())


def _palette() -> bytes:
    return (matplotlib.colormaps[_COLOURS](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8).tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
