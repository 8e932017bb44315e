"""Pictures with their evidence: attention over an image, one panel per word or head, as PNG.

Colours are perceptually uniform, the panels of a line share the scale its heading states, and next to each map stand
the masses that tell whether to trust it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from regard.crossattn import Answer
from regard.vit import AttentionRows, Preprocess
from regard.vit.errors import InputError
from regard.vit.files import write_atomically

# Inches.
_PANEL, _GAP, _TITLE, _HEADING = 2.1, 0.12, 0.36, 0.34
_DPI = 110
_ACROSS, _LINES = 8, 48
"""Panels side by side, and lines of them in one picture: what a screen and the memory still hold."""
_TITLE_LETTERS, _HEADING_LETTERS = 32, 26
"""Letters that fit above a panel, and for each panel of a line into its heading."""
_COLOURS = "magma"


@dataclass(frozen=True)
class _Panel:
    """The picture, under its map if there is one."""

    title: str
    heat: Tensor | None = None


def word_figure(image: Image.Image, preprocess: Preprocess, answers: Sequence[Answer]) -> Figure:
    """For each of the first `questions_drawn(answers)` questions the picture, then a panel per word.

    `image` is upright RGB.
    """
    groups = []
    for answer in answers[: questions_drawn(answers)]:
        panels = [_Panel(f"{_plain(answer.text, _TITLE_LETTERS - 8)}  {answer.probability:.1%}")]
        for place in _drawn_words(answer):
            word, heat = answer.attention.words[place], answer.attention.map(place)
            unknown = " (unknown word)" if word in answer.unknown else ""
            mass = {k: share for k, share in answer.attention.mass(place).items() if k != "patches" and share > 0}
            panels.append(
                _Panel(f"{_plain(word, _TITLE_LETTERS - len(unknown))}{unknown}\n{_evidence(heat, mass)}", heat)
            )
        groups.append((answer.question, panels))
    return _sheet(groups, _as_seen(image, preprocess))


def questions_drawn(answers: Sequence[Answer]) -> int:
    """How many of the questions, from the first, one picture holds: at least one."""
    drawn = lines = 0
    for answer in answers:
        lines += -(-(1 + len(_drawn_words(answer))) // _ACROSS)
        if drawn and lines > _LINES:
            break
        drawn += 1
    return drawn


def head_figure(image: Image.Image, preprocess: Preprocess, rows: AttentionRows, title: str) -> Figure:
    """The class token's attention in one layer: the picture, the mean of the heads, then each head."""
    maps = rows.patches[0, 0, :, 0]
    masses = _masses(rows)
    mean = _evidence(maps.mean(dim=0), {name: mass.mean() for name, mass in masses.items()})
    panels = [_Panel(""), _Panel(f"mean of heads\n{mean}", maps.mean(dim=0))]
    for head, heat in enumerate(maps):
        evidence = _evidence(heat, {name: mass[head] for name, mass in masses.items()})
        panels.append(_Panel(f"head {head}\n{evidence}", heat))
    return _sheet([(title, panels)], _as_seen(image, preprocess))


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG, whole or not at all. Raises InputError where the place cannot be written."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: pictures are written as PNG; give a name ending in .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it is drawn as a box
            write_atomically(path, lambda file: FigureCanvasAgg(figure).print_png(file))
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}); choose another --out") from error
    return path


def _drawn_words(answer: Answer) -> list[int]:
    """The places of the words that are more than punctuation; as many as one picture holds."""
    places = [i for i, word in enumerate(answer.attention.words) if any(c.isalnum() for c in word)]
    return places[: _ACROSS * _LINES - 1]


def _as_seen(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """The picture in the frame the model saw: itself where it was squashed, the cut where it was cropped."""
    if preprocess.size is not None and (preprocess.fit == "crop" or preprocess.crop_ratio != 1):
        image = Image.fromarray(preprocess.pixels(image).permute(1, 2, 0).numpy())
    # Twice as sharp as a panel is enough; every panel would draw a photo's millions of pixels anew.
    shrink = 2 * _PANEL * _DPI / max(image.size)
    if shrink >= 1:
        return image
    width, height = (max(1, round(side * shrink)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX, reducing_gap=2.0)


def _masses(rows: AttentionRows) -> dict[str, Tensor]:
    masses = {} if rows.cls is None else {"cls": rows.cls[0, 0, :, 0]}
    if rows.registers.shape[-1]:
        masses["registers"] = rows.registers[0, 0, :, 0].sum(dim=-1)
    return masses


def _evidence(heat: Tensor, mass: dict[str, float] | dict[str, Tensor]) -> str:
    """The peak that a map's colours end at, and what of the attention fell beside the patches."""
    return f"peak {heat.max():.0%}" + "".join(f", {name} {float(share):.0%}" for name, share in mass.items())


def _plain(text: str, letters: int) -> str:
    """`text` on one line, and cut where there is no room."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


@matplotlib.rc_context(matplotlib.rcParamsDefault)  # a person's own matplotlibrc may typeset every text as TeX
def _sheet(groups: Sequence[tuple[str, Sequence[_Panel]]], seen: Image.Image) -> Figure:
    """Groups of panels one below the other, each under its heading, long ones on several lines.

    Every place is computed here: matplotlib's layout engines take minutes for some hundred panels, and give up
    where a text is too wide.
    """
    tall = _PANEL * min(max(seen.height / seen.width, 0.3), 3.0)
    columns = min(_ACROSS, max(len(panels) for _, panels in groups))
    lines = sum(-(-len(panels) // columns) for _, panels in groups)
    width = columns * (_PANEL + _GAP) + _GAP
    height = len(groups) * _HEADING + lines * (tall + _TITLE + _GAP) + _GAP
    figure = Figure(figsize=(width, height), dpi=_DPI)
    top = height - _GAP
    for heading, panels in groups:
        # One scale for a group: a map that is nearly even must not glow as brightly as one with a peak.
        peak = max((float(panel.heat.max()) for panel in panels if panel.heat is not None), default=0.0) or 1.0
        scale = f"   colours: 0 to {peak:.0%} of the attention"
        heading = _plain(heading, max(columns * _HEADING_LETTERS - len(scale), 12)) + scale
        figure.text(_GAP / width, top / height, heading, fontsize=10, va="top", parse_math=False)
        top -= _HEADING
        for number, panel in enumerate(panels):
            line, column = divmod(number, columns)
            bottom = top - line * (tall + _TITLE + _GAP) - _TITLE - tall
            left = _GAP + column * (_PANEL + _GAP)
            axes = figure.add_axes((left / width, bottom / height, _PANEL / width, tall / height))
            axes.set_axis_off()
            bold = "normal" if panel.heat is not None else "bold"
            axes.set_title(panel.title, fontsize=8, fontweight=bold, pad=3, parse_math=False)
            if panel.heat is None:
                axes.imshow(np.asarray(seen))
            else:
                _overlay(axes, seen, panel.heat, peak)
        top -= -(-len(panels) // columns) * (tall + _TITLE + _GAP)
    return figure


def _overlay(axes: Axes, seen: Image.Image, heat: Tensor, peak: float) -> None:
    """The map over the greyed picture, coloured from 0 to `peak`; patches keep their hard edges."""
    extent = (-0.5, seen.width - 0.5, seen.height - 0.5, -0.5)
    axes.imshow(np.asarray(seen.convert("L")), cmap="gray", vmin=0, vmax=255)
    values = heat.float().cpu().numpy()
    alpha = 0.2 + 0.6 * values / peak
    axes.imshow(values, cmap=_COLOURS, vmin=0, vmax=peak, alpha=alpha, extent=extent, interpolation="nearest")
