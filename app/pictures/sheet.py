"""Panels on a sheet: groups one below the other, each with its heading, its stated scale and a colour bar.

Every place is computed here: the layout engines of plotting libraries take minutes for some hundred panels.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from regard.pictures.colours import blended
from regard.vit.errors import InputError
from regard.vit.files import write_atomically

ACROSS, LINES = 8, 48
"""Panels side by side, and lines of them in one picture: what a screen and the memory still hold."""
_WIDE, _WIDER = 232, 320  # a panel in pixels; the wider one where few stand side by side
_LEVEL = 3  # half the time of the default 6, for a file that is a twentieth larger
_GAP, _LINE = 12, 17  # between panels; a line of text
_BAR = (120, 11)
_INK, _FAINT, _PAPER = (20, 20, 20), (95, 95, 95), (255, 255, 255)


class Unwritable(InputError):
    """The place of an output cannot be written; the next picture would meet the same."""


@dataclass(frozen=True, eq=False)
class Panel:
    """A picture of any size, which is scaled to the panel, and the lines above it."""

    title: str
    picture: Image.Image
    bold: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """Panels that share a heading.

    Attributes:
        scale: what the ends of the colour bar are, and for which maps: (low, high, note). None draws no bar.
        legend: (colour, text) pairs, drawn in place of a bar.
    """

    heading: str
    panels: Sequence[Panel]
    scale: tuple[str, str, str] | None = None
    colours: str = "magma"
    legend: Sequence[tuple[tuple[int, int, int], str]] = ()


@dataclass(frozen=True, eq=False)
class Sheet:
    """The drawn sheet, and where each panel of each group lies on it: (left, top, right, bottom)."""

    image: Image.Image
    boxes: list[list[tuple[int, int, int, int]]] = field(default_factory=list)


def panel_width(panels: int) -> int:
    """How wide a panel of the widest group is drawn; pictures of this width lose nothing."""
    return _WIDER if panels <= 3 else _WIDE


def panel_size(picture: tuple[int, int], panels: int, width: int | None = None) -> tuple[int, int]:
    """(height, width) of the panels for a picture of (height, width); very long pictures are squeezed."""
    width = width or panel_width(panels)
    return max(1, round(width * min(max(picture[0] / picture[1], 0.3), 3.0))), width


def draw(groups: Sequence[Group], width: int | None = None) -> Sheet:
    """Draw groups of panels of this width; long groups take several lines, and short ones stand side by side."""
    most = max(len(group.panels) for group in groups)
    columns = -(-most // -(-most // ACROSS))  # nine panels are five and four, not eight and one
    width = width or panel_width(most)
    total = columns * (width + _GAP) + _GAP
    plans, top, bottom, used = [], _GAP, _GAP, columns
    for group in groups:
        if used + len(group.panels) > columns:
            top, used = bottom, 0
        tall = max(panel.picture.height * width // panel.picture.width for panel in group.panels)
        text = _LINE * max(1 + panel.title.count("\n") for panel in group.panels)
        head = _LINE * (1 + bool(group.scale or group.legend)) + 4
        lines = -(-len(group.panels) // columns)
        plans.append((group, top, used, head, text, tall))
        bottom = max(bottom, top + head + lines * (text + tall + _GAP) + _GAP)
        used += len(group.panels)
    sheet = Sheet(Image.new("RGB", (total, bottom), _PAPER))
    pen = ImageDraw.Draw(sheet.image)
    for group, top, used, head, text, tall in plans:
        start = _GAP + used * (width + _GAP)
        end = min(start + len(group.panels) * (width + _GAP), total) - _GAP
        alone = used == 0 and not any(other[1] == top and other[2] for other in plans)
        end = total - _GAP if alone else end
        _write(pen, (start, top), group.heading, end - start, bold=True)
        _draw_scale(sheet.image, pen, group, (start, top + _LINE + 1), end)
        boxes = []
        for number, panel in enumerate(group.panels):
            line, column = divmod(number, columns)
            left = start + column * (width + _GAP)
            above = top + head + line * (text + tall + _GAP)
            for row, words in enumerate(panel.title.split("\n")):
                _write(pen, (left, above + row * _LINE), words, width, bold=panel.bold and row == 0, faint=row > 0)
            size = (width, max(1, panel.picture.height * width // panel.picture.width))
            kept = panel.picture.size == size
            picture = panel.picture if kept else panel.picture.resize(size, Image.Resampling.BOX, reducing_gap=2.0)
            sheet.image.paste(picture, (left, above + text))
            boxes.append((left, above + text, left + size[0], above + text + size[1]))
        sheet.boxes.append(boxes)
    return sheet


def save(sheet: Sheet | Image.Image, path: str | Path, notes: dict[str, str] | None = None) -> Path:
    """Write a PNG, whole or not at all, with `notes` as its text fields.

    Raises Unwritable where the place cannot be written.
    """
    path = check_png(path)
    image = sheet.image if isinstance(sheet, Sheet) else sheet
    info = PngInfo()
    for name, text in (notes or {}).items():
        info.add_itxt(name, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: image.save(file, "PNG", pnginfo=info, compress_level=_LEVEL))
    except OSError as error:
        raise Unwritable(f"cannot write {path} ({error.strerror or error}); choose another --out") from error
    return path


def check_png(path: str | Path) -> Path:
    """Raise InputError for a name of another kind of picture."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: pictures are written as PNG; give a name ending in .png")
    return path


def plain(text: str) -> str:
    """`text` on one line, without what would not print."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def number(value: float, share: bool) -> str:
    """A value of a map as text: a share of the attention in per cent, anything else with three digits."""
    if not share:
        return f"{value:.3g}"
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}" if value >= 0.01 or value == 0 else f"{value:.2%}"


def _draw_scale(image: Image.Image, pen: ImageDraw.ImageDraw, group: Group, at: tuple[int, int], end: int) -> None:
    left, top = at
    if group.scale:
        low, high, note = group.scale
        left += _write(pen, (left, top), low, end - left) + 5
        wide = min(_BAR[0], (end - left) // 2)
        ramp = np.broadcast_to(np.linspace(0, 1, wide), (_BAR[1], wide))
        bar = blended(np.full(ramp.shape, 128, np.uint8), ramp, group.colours)
        image.paste(Image.fromarray(bar), (left, top + 2))
        pen.rectangle((left - 1, top + 1, left + wide, top + 2 + _BAR[1]), outline=_FAINT)
        left += wide + 6
        left += _write(pen, (left, top), high, end - left) + 12
        if left + pen.textlength(note, font=_font(False)) <= end:
            _write(pen, (left, top), note, end - left, faint=True)
    for colour, text in group.legend:
        if left + 30 > end:
            break
        pen.rectangle((left, top + 2, left + 11, top + 13), fill=colour)
        left += 15 + _write(pen, (left + 15, top), text, end - left - 15) + 10


def _write(
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, room: int, *, bold: bool = False, faint: bool = False
) -> int:
    """Write one line, cut where there is no room; returns its width."""
    font = _font(bold)
    text = plain(text)
    if room < 20:
        return 0
    text = text[: room // 2]  # no letter that matters is narrower
    if pen.textlength(text, font=font) > room:
        while text and pen.textlength(f"{text}…", font=font) > room:
            text = text[:-1]
        text += "…"
    pen.text(at, text, fill=_FAINT if faint else _INK, font=font)
    return round(pen.textlength(text, font=font))


@functools.cache
def _font(bold: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that matplotlib brings along; Pillow's own where it is missing."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    try:
        return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), 12)
    except OSError:
        return ImageFont.load_default()
