"""`regard look`: where the tokens of a ViT look, head by head, in a picture, a folder, an animation or a video."""

import contextlib
import dataclasses
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from regard.datasets import open_image
from regard.models import DEMO, open_vit
from regard.pictures import panels as drawing
from regard.pictures.arrays import Precision, save_arrays
from regard.pictures.maps import Ask, Maps, basis_of, check, default_query, maps_of
from regard.pictures.series import Scale, Through, Work, known_files, work_through
from regard.pictures.sheet import Sheet, check_png, save
from regard.pictures.sources import Source, source_of
from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.files import require_another, typed_path
from regard.vit.maps.pca import PatchBasis
from regard.vit.preprocess import check_size
from regard.vit.pretrained.report import LoadReport

_WHOSE = {"cls": "class token", "registers": "registers", "patches": "mean of the patches"}
_WHAT = {"rows": "attention"}
_MOST_LINES = 40
_NARROWEST, _WIDEST = 32, 2048
_FITTED = 32  # pictures whose patches the PCA of a folder or a video is fitted on


@dataclass(frozen=True)
class Looked:
    """What `look` found in one picture.

    `query` says whose attention it is: what was asked for, by default `cls`, or in a model without a class token
    `registers` or `patches` (their mean). `layer` is None where the method runs through all layers. `loaded` tells how
    a model of another library was opened. `against` holds the maps of the second model.
    """

    image: Path
    model: str
    layer: int | list[int] | None
    query: str
    maps: Maps
    picture: Path | None
    arrays: Path | None = None
    loaded: LoadReport | None = None
    against: Maps | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a program to read: every map, and the mass on the class token and registers."""
        return {
            "image": str(self.image),
            "model": self.model,
            "layer": self.layer,
            "query": self.query,
            "method": self.maps.method,
            "layout": None if self.loaded is None else self.loaded.layout,
            "picture": None if self.picture is None else str(self.picture),
            "arrays": None if self.arrays is None else str(self.arrays),
            "box": list(self.maps.frame.box),
            "heads": self.maps.entries(),
            "against": None if self.against is None else self.against.entries(),
        }

    def __str__(self) -> str:
        lines = [] if self.loaded is None or self.loaded.layout == "regard" else [str(self.loaded)]
        for maps in [self.maps] if self.against is None else [self.maps, self.against]:
            lines += _told(maps)
        return "\n".join([*lines, *(f"maps: {path}" for path in (self.picture, self.arrays) if path is not None)])


@dataclass(frozen=True)
class LookedThrough:
    """What `look` made of a folder, an animation or a video: numbered pictures in `folder`."""

    source: Path
    model: str
    folder: Path
    made: int
    kept: int
    skipped: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a program to read."""
        return {**vars(self), "source": str(self.source), "folder": str(self.folder), "skipped": dict(self.skipped)}

    def __str__(self) -> str:
        before = f", {self.kept} were there already" if self.kept else ""
        lines = [f"{self.made} drawn{before}, {len(self.skipped)} skipped"]
        lines += [f"  skipped {name}: {why}" for name, why in list(self.skipped.items())[:_MOST_LINES]]
        if len(self.skipped) > _MOST_LINES:
            lines.append(f"  and {len(self.skipped) - _MOST_LINES} more (--json names all)")
        return "\n".join([*lines, f"maps: {self.folder}"])


def look(
    image: str | Path,
    *,
    model: str | Path = DEMO,
    query: str | None = None,
    layer: int | Literal["all"] = -1,
    head: int | Literal["all", "mean", "max", "auto"] = "all",
    method: str = "rows",
    target: int | None = None,
    panels: str = "maps",
    size: str | tuple[int, int] | None = None,
    size_policy: Literal["resize", "crop", "pad", "error"] | None = None,
    scale: Literal["shared", "each", "global", "running"] | None = None,
    against: str | Path | None = None,
    arrays: Literal["float32", "float16"] | None = None,
    panel: int | None = None,
    out: str | Path | None = None,
    vit: dict[str, Any] | None = None,
    device: str = "auto",
) -> Looked | LookedThrough:
    """Draw where tokens look in a picture, one panel per head; also in a folder of pictures, an animation or a video.

    Args:
        image: picture file; a folder, an animated GIF, PNG or WebP, a TIFF of several pages, a video.
        model: any ViT or ImageQA: folder, run, file (.safetensors, .pth, .npz, .ckpt), hub name, timm name; default:
            what `regard demo` trained.
        query: who looks: cls, registers, reg2, patches (their mean), "12,30" (a patch's row and column), pixel:Y,X
            (of the picture file); default: cls, without one registers, without those patches.
        layer: layer counted from 0, or from the end if negative; or all.
        head: all, a number, mean, max, or auto (the mean of the heads that see one thing together).
        method: rows (attention), value (times the length of what is fetched), rollout, relevance, legrad; the last
            three run through all layers and make one map.
        target: class that relevance and legrad ask about; default: the model's own answer.
        panels: one or several of maps, composite (one colour per head), norms, pca, as in maps,composite.
        size: H,W in pixels that the whole picture is brought to, or own to leave it as it is; default: resized and cut
            as the model was trained.
        size_policy: where patches do not divide the size: resize, crop, pad or error; default: the model's.
        scale: colours run to the peak of the maps of a picture (shared), of each map (each), of all pictures (global)
            or of the pictures so far (running); default: shared, for several pictures global.
        against: a second model, drawn below the first.
        arrays: also write the maps as .npz, as float32 or float16.
        panel: width of each panel in pixels; default: 320, where many stand side by side 232.
        out: .png, .npz or .html (a page on which every patch can be asked where it looks), or a folder; default:
            IMAGE-look.png in the current folder, for several pictures the folder IMAGE-look. What such a folder holds
            already is not made again.
        vit: what the model's file does not tell of itself: --vit.image_size "[384, 288]", --vit.heads 6.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable picture or model, a layer or head that does not exist, an unwritable place, a folder
            that holds pictures of other settings.
    """
    image = typed_path(image)
    kinds = _kinds(panels)
    place = None if out is None else typed_path(out)
    if place is not None:
        require_another(place, image)
    if panel is not None and not _NARROWEST <= panel <= _WIDEST:
        raise InputError(f"panel is {panel}; it must be {_NARROWEST} to {_WIDEST} pixels")
    ask = Ask(query, layer, head, method, target, "norms" in kinds, "pca" in kinds)
    folder = Path(f"{image.name if image.is_dir() else image.stem}-look") if place is None else place
    source = source_of(image, known_files(folder) if folder.is_dir() and image.is_dir() else (), folder)
    picture = open_image(image) if source is None else None
    if source is not None and place is not None and place.suffix.lower() in (".png", ".npz", ".html"):
        raise InputError(
            f"{image} holds {source.total or 'several'} {source.unit}; --out must be a folder, not {place}"
        )
    names = [str(model)] if against is None else [str(model), str(against)]
    told: list[dict[str, Any]] = [vit or {}, {}]
    vits = [_opened(name, device, size, size_policy, own) for name, own in zip(names, told, strict=False)]
    for opened in vits:
        check(opened, ask)
    if source is not None:
        scale = scale or "global"
        weights = {f"weights of {name}": _fingerprint(vit) for name, vit in zip(names, vits, strict=True)}
        asked = {**vars(ask), "size": size, "size_policy": size_policy}
        drawn_as = {"panels": list(kinds), "scale": scale, "panel": panel, "arrays": arrays}
        settings = {"source": str(image.resolve()), "models": names, **weights, **asked, **drawn_as}
        done = _through(source, folder, settings, vits, names, ask, kinds, scale, arrays, panel)
        return LookedThrough(image, str(model), folder, done.made, done.kept, done.skipped)
    assert picture is not None
    scale = scale or "shared"
    maps = [maps_of(vit, picture, ask, name) for vit, name in zip(vits, names, strict=True)]
    drawn, written = _places(place, image, arrays)
    if drawn is not None and drawn.suffix.lower() == ".html":
        _page(picture, vits[0], drawn, ask, names[0])
    elif drawn is not None:
        sides = [drawing.Side(vit, part) for vit, part in zip(vits, maps, strict=True)]
        peaks = None if scale == "each" else drawing.peaks_of(sides)
        save(drawing.sheet(picture, sides, kinds, peaks, _NOTES[scale], image.name, panel), drawn)
    if written is not None:
        for part, name in zip(maps, (written, written.with_name(f"{written.stem}-against.npz")), strict=False):
            save_arrays(part, name, arrays or "float32")
    layers = list(maps[0].layers)
    number = None if not layers else layers[0] if len(layers) == 1 else layers
    asked_query = query or default_query(vits[0])
    second = maps[1] if len(maps) > 1 else None
    return Looked(image, str(model), number, asked_query, maps[0], drawn, written, vits[0].report, second)


_NOTES = {
    "shared": "one scale for this line's maps",
    "each": "each map its own scale",
    "global": "one scale for all pictures",
    "running": "the greatest so far",
}


def _through(
    source: Source,
    folder: Path,
    settings: Mapping[str, Any],
    vits: Sequence[ViT],
    names: Sequence[str],
    ask: Ask,
    kinds: Sequence[str],
    scale: Scale,
    arrays: Precision | None,
    panel: int | None,
) -> Through:
    def sides(maps: Sequence[Maps]) -> list[drawing.Side]:
        return [drawing.Side(vit, part) for vit, part in zip(vits, maps, strict=True)]

    bases: list[PatchBasis | None] = [None] * len(vits)

    def look_at(picture: Image.Image) -> list[Maps]:
        if ask.pca and bases[0] is None:
            bases[:] = [_basis(source, folder, vit, ask, side) for side, vit in enumerate(vits)]
        return [maps_of(vit, picture, ask, name, basis) for vit, name, basis in zip(vits, names, bases, strict=True)]

    def draw(picture: Image.Image, name: str, maps: list[Maps], peaks: dict[str, float] | None) -> Sheet:
        return drawing.sheet(picture, sides(maps), kinds, peaks, _NOTES[scale], name, panel)

    work = Work(look_at, lambda maps: drawing.peaks_of(sides(maps)), draw, scale, len(vits), arrays)
    return work_through(source, folder, settings, work)


def _page(picture: Image.Image, vit: ViT, path: Path, ask: Ask, name: str) -> None:
    from regard.viewer import view

    if ask.method != "rows" or ask.head in ("max", "auto"):
        raise InputError("a page shows attention rows of heads or of their mean; leave --method and --head out")
    view(picture, vit, path, ask.layer, ask.head, model=name)  # type: ignore[arg-type]


def _basis(source: Source, folder: Path, vit: ViT, ask: Ask, side: int) -> PatchBasis:
    """One basis for the whole row, so that a colour means the same in all of it: of its first pictures, and kept."""
    path = folder / f"pca{'-against' if side else ''}.npz"
    if path.exists():
        return PatchBasis.load(path)

    def first() -> Iterator[Image.Image]:
        for item in itertools.islice(source.items(), _FITTED):
            with contextlib.suppress(InputError):  # it is told when its turn comes
                yield item.open()

    basis = basis_of(vit, first(), ask)
    basis.save(path)
    return basis


def _opened(
    name: str, device: str, size: str | tuple[int, int] | None, size_policy: str | None, told: dict[str, Any]
) -> ViT:
    vit = open_vit(name, device, **told).eval()
    if size is not None:
        # A person who names a size means the whole picture, whatever the model's own recipe cuts off.
        changed = dataclasses.replace(vit.preprocess, size=_size(size), fit="squash", crop_ratio=1.0)
        vit.config = dataclasses.replace(vit.config, preprocess=changed)
    if size_policy is not None:
        vit.config = dataclasses.replace(vit.config, size_policy=size_policy)  # type: ignore[arg-type]
        vit.tokenizer.size_policy = size_policy
    return vit


def _size(size: str | tuple[int, int]) -> tuple[int, int] | None:
    if size == "own":
        return None
    if isinstance(size, str):
        found = re.fullmatch(r"[\[(]?\s*(\d+)\s*[,x]\s*(\d+)\s*[\])]?", size.strip())
        if found is None:
            raise InputError(f"size is {size!r}; give H,W in pixels, or own")
        size = int(found[1]), int(found[2])
    size = tuple(size)  # type: ignore[assignment]
    check_size("size", size)
    return size


def _kinds(panels: str) -> list[str]:
    kinds = [kind.strip() for kind in panels.split(",")]
    for kind in kinds:
        if kind not in drawing.KINDS:
            raise InputError(f"panels has {kind!r}; choose among {', '.join(drawing.KINDS)}")
    return kinds


def _places(out: Path | None, image: Path, arrays: str | None) -> tuple[Path | None, Path | None]:
    """Where the picture and the arrays go."""
    if out is not None and out.suffix.lower() == ".npz":
        return None, out
    if out is None or out.is_dir() or not out.suffix:
        out = (out or Path()) / f"{image.stem}-look.png"
    if out.suffix.lower() != ".html":
        out = check_png(out)
    return out, out.with_suffix(".npz") if arrays else None


def _fingerprint(vit: ViT) -> str:
    """Tells other weights under the same name, such as of a run that went on; the first values of every tensor."""
    found = 0
    for tensor in vit.state_dict().values():
        found = zlib.crc32(tensor.detach().flatten()[:64].float().cpu().numpy().tobytes(), found)
    return f"{found:08x}"


def _told(maps: Maps) -> list[str]:
    lines = []
    for i in range(maps.maps.shape[0]):
        for j, query in enumerate(maps.queries):
            layer = f"layer {maps.layers[i]}" if maps.layers else "all layers"
            lines.append(f"{maps.model}: {layer}, {_WHAT.get(maps.method, maps.method)} of {_WHOSE.get(query, query)}")
            for m, called in enumerate(maps.names[i][j]):
                heat = maps.maps[i, j, m]
                parts = [f"patches {float(heat.sum()):.1%}"] if maps.share else [f"peak {float(heat.max()):.3g}"]
                parts += [f"{name} {share:.1%}" for name, share in maps.mass(i, j, m).items()]
                lines.append(f"  {called}: {', '.join(parts)}")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} lines more (--json has all)"]
    return lines
