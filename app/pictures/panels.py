"""What `regard look` draws of one picture: the picture, what the model saw of it, and its maps placed back in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from regard.pictures.colours import ATTENTION, NORMS, composite, head_colours, overlay, painted
from regard.pictures.maps import Maps
from regard.pictures.sheet import ACROSS, LINES, Group, Panel, Sheet, draw, number, panel_size
from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.maps.grid import Frame

KINDS = ("maps", "composite", "norms", "pca")
_OUTLINE = (0, 200, 255)
Peaks = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Side:
    """A model and its maps of the picture that is drawn; a sheet may hold two of them."""

    vit: ViT
    maps: Maps


def peaks_of(sides: Sequence[Side]) -> dict[str, float]:
    """The greatest value of each line of maps, over both models; the name of a line stays the same over pictures."""
    found: dict[str, float] = {}
    for side in sides:
        maps = side.maps
        for i, j in ((i, j) for i in range(maps.maps.shape[0]) for j in range(maps.maps.shape[1])):
            name = f"query {j}" if maps.maps.shape[2] == 1 else f"layer {i}, query {j}"
            heats = maps.maps[i, j]
            found[name] = max(found.get(name, 0.0), float(heats.max()))
        if maps.norms is not None:
            found["norms"] = max(found.get("norms", 0.0), float(maps.norms.max()))
    return found


def sheet(
    picture: Image.Image,
    sides: Sequence[Side],
    kinds: Sequence[str],
    peaks: Peaks | None,
    note: str,
    title: str,
    panel: int | None = None,
) -> Sheet:
    """Draw an upright RGB picture.

    Args:
        picture: upright RGB, at its own size.
        sides: one model, or two side by side.
        kinds: of KINDS.
        peaks: where the colours of each line end; None for a scale of its own for each map.
        note: what the scale holds for, such as "one scale for this picture".
        title: what was asked of which picture.
        panel: width of a panel in pixels.

    Raises InputError for more panels than a picture holds.
    """
    plans = [plan for side in sides for plan in _plans(side, kinds, title, len(sides) > 1)]
    count = max(len(plan.cells) for plan in plans) + 2
    lines = sum(-(-(len(plan.cells) + 2) // ACROSS) for plan in plans)
    if lines > LINES:
        panels = sum(len(plan.cells) for plan in plans)
        raise InputError(f"{panels} maps do not fit into one picture; ask for one layer or head, or --out NAME.npz")
    height, width = panel_size((picture.height, picture.width), count, panel)
    small = picture.resize((width, height), Image.Resampling.BOX, reducing_gap=2.0)
    groups, last = [], None
    for plan in plans:
        lead = []
        if plan.side is not last:  # what the model saw is told once
            lead = [_original(small, plan.side.maps.frame), _seen(plan.side, picture, small.size)]
        last = plan.side
        groups.append(_group(plan, lead, small, peaks, note))
    return draw(groups, width)


@dataclass(frozen=True, eq=False)
class _Cell:
    title: str
    heat: Tensor
    beside: str = ""


@dataclass(frozen=True, eq=False)
class _Plan:
    side: Side
    heading: str
    kind: str
    key: str
    cells: Sequence[_Cell]
    heads: Sequence[str] = ()


def _plans(side: Side, kinds: Sequence[str], title: str, several: bool) -> list[_Plan]:
    maps, plans = side.maps, []
    layers, queries, count = maps.maps.shape[:3]
    whose = f"{maps.model}: " if several else ""
    title = f"{whose}{title}"
    what = "attention" if maps.method == "rows" else maps.method
    if "maps" in kinds and count == 1:
        for j in range(queries):
            cells = [_cell(maps, i, j, 0, _layer(maps, i)) for i in range(layers)]
            plans.append(_Plan(side, f"{title} · {what} of {maps.queries[j]}", "maps", f"query {j}", cells))
    for i, j in ((i, j) for i in range(layers) for j in range(queries)):
        heading = " · ".join(part for part in (title, f"{what} of {maps.queries[j]}", _layer(maps, i)) if part)
        if "maps" in kinds and count > 1:
            cells = [_cell(maps, i, j, m) for m in range(count)]
            beside = _beside([maps.mass(i, j, m) for m in range(count)])
            cells.insert(0, _Cell("mean of heads", maps.maps[i, j].mean(dim=0), beside))
            plans.append(_Plan(side, heading, "maps", f"layer {i}, query {j}", cells))
        if "composite" in kinds:
            if count < 2:
                raise InputError("the composite has one colour for each head; ask for it with --head all, method rows")
            cell = _Cell("all heads, one colour each", maps.maps[i, j])
            plans.append(_Plan(side, f"{whose}heads of {_layer(maps, i)}", "composite", "", [cell], maps.names[i][j]))
    if "norms" in kinds and maps.norms is not None and maps.special_norms is not None:
        cells = []
        for i, layer in enumerate(maps.norm_layers):
            special = ", ".join(f"{length:.0f}" for length in maps.special_norms[i].tolist())
            beside = f", median {maps.norms[i].median():.0f}"
            beside += f"\ncls and registers: {special}" if special else ""
            cells.append(_Cell(f"after layer {layer}", maps.norms[i], beside))
        plans.append(_Plan(side, f"{whose}token norms", "norms", "norms", cells))
    if "pca" in kinds and maps.colours is not None:
        cell = _Cell("components 1, 2, 3", maps.colours)
        plans.append(_Plan(side, f"{whose}PCA of the patches", "pca", "", [cell]))
    return plans


def _cell(maps: Maps, i: int, j: int, m: int, where: str = "") -> _Cell:
    called = maps.names[i][j][m]
    called = where if called == maps.method else ", ".join(filter(None, (where, called)))
    return _Cell(called or maps.method, maps.maps[i, j, m], _beside([maps.mass(i, j, m)]))


def _beside(masses: Sequence[Mapping[str, float]]) -> str:
    """What of the attention fell beside the patches: the mean over these maps."""
    return "".join(f", {name} {sum(mass[name] for mass in masses) / len(masses):.0%}" for name in masses[0])


def _layer(maps: Maps, index: int) -> str:
    return f"layer {maps.layers[index]}" if maps.layers else ""


def _group(plan: _Plan, lead: list[Panel], small: Image.Image, peaks: Peaks | None, note: str) -> Group:
    frame, share = plan.side.maps.frame, plan.side.maps.share and plan.kind == "maps"
    if plan.kind == "composite":
        colour, alpha = composite(plan.cells[0].heat)
        panel = Panel(f"{plan.cells[0].title}\neach stretched", painted(small, colour, alpha, frame))
        legend = [
            (c, name.removeprefix("head ")) for c, name in zip(head_colours(len(plan.heads)), plan.heads, strict=True)
        ]
        return Group(plan.heading, [*lead, panel], legend=legend)
    if plan.kind == "pca":
        heat = plan.cells[0].heat
        panel = Panel(plan.cells[0].title, painted(small, heat, torch.ones_like(heat[..., 0]), frame))
        return Group(plan.heading, [*lead, panel])
    colours = NORMS if plan.kind == "norms" else ATTENTION
    panels = list(lead)
    for cell in plan.cells:
        peak = float(cell.heat.max()) if peaks is None else peaks[plan.key]
        top = number(float(cell.heat.max()), share)
        panels.append(Panel(f"{cell.title}\npeak {top}{cell.beside}", overlay(small, cell.heat, frame, peak, colours)))
    unit = " of the attention" if share else ""
    high = "its own peak" if peaks is None else f"{number(peaks[plan.key], share)}{unit}"
    return Group(plan.heading, panels, ("0", high, "each map its own scale" if peaks is None else note), colours)


def _original(small: Image.Image, frame: Frame) -> Panel:
    """The picture, with a line around what the model saw where that is less or more."""
    size = f"{frame.picture[0]} x {frame.picture[1]} px"
    if frame.whole:
        return Panel(f"picture\n{size}", small, bold=True)
    lined = small.copy()
    down, across = small.height / frame.picture[0], small.width / frame.picture[1]
    top, left, bottom, right = frame.box
    edges = [max(left * across, 0), max(top * down, 0)]
    edges += [min(right * across, small.width) - 1, min(bottom * down, small.height) - 1]
    ImageDraw.Draw(lined).rectangle(edges, outline=_OUTLINE, width=2)
    return Panel(f"picture\n{size}, seen inside the line", lined, bold=True)


def _seen(side: Side, picture: Image.Image, room: tuple[int, int]) -> Panel:
    """The very pixels that the model got: resized, cut or padded, after its size policy; in the room of a panel."""
    preprocess, vit, frame = side.vit.preprocess, side.vit, side.maps.frame
    pixels = vit.tokenizer.fit(preprocess(picture))[0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    levels = ((pixels * std + mean) * 255).round().clamp(0, 255).byte().expand(3, -1, -1).movedim(0, -1)
    title = f"as the model saw it\n{frame.seen[0]} x {frame.seen[1]} px\n{frame.grid[0]} x {frame.grid[1]} patches"
    seen = ImageOps.contain(Image.fromarray(np.ascontiguousarray(levels.numpy())), room)
    panel = Image.new("RGB", room, "white")
    panel.paste(seen, ((room[0] - seen.width) // 2, (room[1] - seen.height) // 2))
    return Panel(title, panel, bold=True)
