"""Pictures with their evidence: attention over an image, one panel per word or head, as PNG.

Colours are perceptually uniform, each map has the scale its title states, and next to it stand the masses
that tell whether to trust it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from regard.crossattn import Answer
from regard.vit import AttentionRows, Preprocess
from regard.vit.errors import InputError
from regard.vit.files import write_atomically

_PANEL = 2.1  # inches
_COLOURS = "magma"


def word_figure(image: Image.Image, preprocess: Preprocess, answers: Sequence[Answer]) -> Figure:
    """One row per question: the picture, then a panel per word. `image` is upright RGB."""
    seen = _as_seen(image, preprocess)
    words = [[w for w in answer.attention.words if any(c.isalnum() for c in w)] for answer in answers]
    figure, grid = _grid(len(answers), 1 + max(len(w) for w in words), seen, 0.75)
    for row, (answer, own) in enumerate(zip(answers, words, strict=True)):
        first = grid[row][0]
        first.imshow(seen)
        first.set_title(f"{answer.text}  {answer.probability:.1%}", fontsize=9, fontweight="bold")
        first.text(0, 1.28, answer.question, transform=first.transAxes, fontsize=10, ha="left")
        places = [i for i, w in enumerate(answer.attention.words) if any(c.isalnum() for c in w)]
        for axes, place, word in zip(grid[row][1:], places, own, strict=False):
            heat, mass = answer.attention.map(place), answer.attention.mass(place)
            _overlay(axes, seen, heat)
            other = "".join(f", {name} {share:.0%}" for name, share in mass.items() if name != "patches" and share > 0)
            axes.set_title(f"{word}\npeak {heat.max():.0%}{other}", fontsize=8)
    return figure


def head_figure(image: Image.Image, preprocess: Preprocess, rows: AttentionRows, title: str) -> Figure:
    """The class token's attention in one layer: the picture, the mean of the heads, then each head."""
    seen = _as_seen(image, preprocess)
    maps = rows.patches[0, 0, :, 0]
    figure, grid = _grid(1, 2 + len(maps), seen, 0.55)
    panels = grid[0]
    panels[0].imshow(seen)
    panels[0].set_title(title, fontsize=8)
    masses = _masses(rows)
    for axes, heat, mass, name in zip(
        panels[1:],
        [maps.mean(dim=0), *maps],
        [{k: v.mean() for k, v in masses.items()}, *({k: v[h] for k, v in masses.items()} for h in range(len(maps)))],
        ["mean of heads", *(f"head {h}" for h in range(len(maps)))],
        strict=True,
    ):
        _overlay(axes, seen, heat)
        other = "".join(f", {key} {float(share):.0%}" for key, share in mass.items())
        axes.set_title(f"{name}\npeak {heat.max():.0%}{other}", fontsize=8)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG, whole or not at all. Raises InputError where the place cannot be written."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: pictures are written as PNG; give a name ending in .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: FigureCanvasAgg(figure).print_png(file))
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}); choose another --out") from error
    return path


def _as_seen(image: Image.Image, preprocess: Preprocess) -> np.ndarray:
    """The picture in the frame the model saw: itself where it was squashed, the cut where it was cropped."""
    if preprocess.size is None or preprocess.fit == "squash":
        return np.asarray(image)
    return preprocess.pixels(image).permute(1, 2, 0).numpy()


def _masses(rows: AttentionRows) -> dict[str, Tensor]:
    masses = {} if rows.cls is None else {"cls": rows.cls[0, 0, :, 0]}
    if rows.registers.shape[-1]:
        masses["registers"] = rows.registers[0, 0, :, 0].sum(dim=-1)
    return masses


def _grid(rows: int, columns: int, seen: np.ndarray, header: float) -> tuple[Figure, list[list]]:
    aspect = min(max(seen.shape[0] / seen.shape[1], 0.3), 3.0)
    figure = Figure(figsize=(columns * _PANEL, rows * (_PANEL * aspect + header)), dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    return figure, [list(row) for row in grid]


def _overlay(axes: "object", seen: np.ndarray, heat: Tensor) -> None:
    """The map over the greyed picture, from 0 to its own peak; patches keep their hard edges."""
    grey = np.asarray(Image.fromarray(seen).convert("L"))
    extent = (-0.5, seen.shape[1] - 0.5, seen.shape[0] - 0.5, -0.5)
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255)  # type: ignore[attr-defined]
    values = heat.float().cpu().numpy()
    top = float(values.max()) or 1.0
    axes.imshow(  # type: ignore[attr-defined]
        values, cmap=_COLOURS, vmin=0, vmax=top, alpha=0.25 + 0.6 * values / top, extent=extent, interpolation="nearest"
    )
