"""Maps of one picture, by any method: what is drawn, written as arrays and told as JSON.

L layers, Q queries, M maps of each query (its heads, or one that they are fused into), gh x gw patches.
"""

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from regard.vit import ViT, attention_rows
from regard.vit.errors import InputError
from regard.vit.maps.grid import Frame
from regard.vit.maps.pca import PatchBasis, fit_basis, pca_colours, pca_maps
from regard.vit.maps.queries import Pixel
from regard.vit.maps.rows import AttentionRows, head_numbers
from regard.vit.tokens import Tokens

FUSED = ("mean", "max", "auto")
_HOMES = {
    "rows": "rows",
    "value": "weighted",
    "rollout": "rollout",
    "relevance": "relevance",
    "legrad": "legrad",
}
METHODS = tuple(name for name, home in _HOMES.items() if importlib.util.find_spec(f"regard.vit.maps.{home}"))
_LAYERED = ("rows", "value")  # the others run through all layers and fuse the heads on their way
_GRADED = ("relevance", "legrad")
_PAIR = re.compile(r"\(?\s*(\d+)\s*[,x]\s*(\d+)\s*\)?")


@dataclass(frozen=True)
class Ask:
    """What is asked of every picture.

    Attributes:
        query: a name, "row,column" of a patch, or "pixel:Y,X" of the picture; None for the token that stands for all.
        layer: its number, or "all".
        head: a number, "all", "mean", "max" or "auto".
        method: one of METHODS.
        target: class that a gradient is taken of; None for the model's own answer.
        norms: also the lengths of the tokens after each layer.
        pca: also the patches' first three principal components as colours.
    """

    query: str | None = None
    layer: int | str = -1
    head: int | str = "all"
    method: str = "rows"
    target: int | None = None
    norms: bool = False
    pca: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.layer != "all" and (not isinstance(self.layer, int) or isinstance(self.layer, bool)):
            raise InputError(f"layer is {self.layer!r}; look draws one layer, given by its number, or 'all'")
        if not isinstance(self.head, int) and self.head not in ("all", *FUSED):
            raise InputError(f"head is {self.head!r}; choose a number, all, {', '.join(FUSED)}")


@dataclass(frozen=True, eq=False)
class Maps:
    """Maps of one picture.

    Attributes:
        maps: `(L, Q, M, gh, gw)`, float32.
        cls: mass on the class token `(L, Q, M)`, or None.
        registers: mass on each register `(L, Q, M, R)`.
        sink: mass that a learned sink took `(L, Q, M)`, or None.
        layers: their numbers; empty where the method runs through all of them.
        queries: the name of each query.
        heads: the number of each map's head, -1 for a fused one.
        names: what each map is called, `[l][q][m]`.
        share: whether the values are shares of the query's attention, which sum to 1 with the masses.
        frame: where the patches lie in the picture.
        model, method: what they were made by.
        norms: lengths of the patches after each layer, before the final norm `(L', gh, gw)`, if asked for.
        special_norms: the same of class token and registers `(L', 1 + R)`.
        colours: principal components of the patches as colours `(gh, gw, 3)` in 0..1, if asked for.
    """

    maps: Tensor
    cls: Tensor | None
    registers: Tensor
    sink: Tensor | None
    layers: tuple[int, ...]
    queries: tuple[str, ...]
    heads: tuple[int, ...]
    names: list[list[list[str]]]
    share: bool
    frame: Frame
    model: str = ""
    method: str = "rows"
    norms: Tensor | None = None
    special_norms: Tensor | None = None
    norm_layers: tuple[int, ...] = ()
    colours: Tensor | None = None

    def mass(self, layer: int, query: int, index: int) -> dict[str, float]:
        """The shares beside the patches, by name, where there are any."""
        at = (layer, query, index)
        if not self.share:
            return {}
        found = {} if self.cls is None else {"cls": float(self.cls[at])}
        if self.registers.shape[-1]:
            found["registers"] = float(self.registers[at].sum())
        if self.sink is not None:
            found["sink"] = float(self.sink[at])
        return found

    def entries(self) -> list[dict[str, Any]]:
        """Every map with its masses as plain values."""
        found = []
        for (i, layer), (j, query) in (
            (a, b) for a in enumerate(self.layers or [None]) for b in enumerate(self.queries)
        ):
            for m, head in enumerate(self.heads):
                found.append(
                    {
                        "layer": layer,
                        "query": query,
                        "name": self.names[i][j][m],
                        "head": None if head < 0 else head,
                        "map": self.maps[i, j, m].tolist(),
                        "cls": None if self.cls is None else self.cls[i, j, m].item(),
                        "registers": self.registers[i, j, m].tolist(),
                        "sink": None if self.sink is None else self.sink[i, j, m].item(),
                    }
                )
        return found


def default_query(vit: ViT) -> str:
    """The token that stands for the whole image, in a model without a class token its registers or patches."""
    return "cls" if vit.config.class_token else "registers" if vit.config.registers else "patches"


def maps_of(vit: ViT, picture: Image.Image, ask: Ask, name: str = "", basis: PatchBasis | None = None) -> Maps:
    """Look at one upright RGB picture; its colours are those of `basis`, or of a basis of its own.

    Raises InputError for a layer, head, token or place that does not exist.
    """
    frame = Frame.of(vit, picture.height, picture.width)
    query, called = _query(vit, ask.query or default_query(vit), frame)
    vit.layer_numbers(ask.layer)  # type: ignore[arg-type]
    images = vit.preprocess(picture).to(next(vit.parameters()).device)
    rows = _rows(vit, images, query, ask)
    maps, heads, names, masses = _fused(rows, ask)
    queries = rows.queries if called is None else (called,)
    more = _norms(vit, images, ask) if ask.norms else {}
    if ask.pca:
        (coordinates,) = pca_maps(vit, images, basis or basis_of(vit, images, ask))
        more["colours"] = pca_colours(coordinates).float().cpu()
    cls, registers, sink = masses
    return Maps(
        maps.float().cpu(),
        cls,
        registers,
        sink,
        rows.layers,
        queries,
        heads,
        names,
        share=ask.method in ("rows", "rollout"),
        frame=frame,
        model=name,
        method=ask.method,
        **more,
    )


def basis_of(vit: ViT, images: Any, ask: Ask) -> PatchBasis:
    """The principal components of the patches of these pictures together, in the layer that is looked at."""
    return fit_basis(vit, images, -1 if ask.layer == "all" else int(ask.layer))


def _query(vit: ViT, query: str, frame: Frame) -> tuple[Any, str | None]:
    """The query as `attention_rows` takes it, and a name that says more than its own."""
    query = query.strip()
    pair = _PAIR.fullmatch(query.removeprefix("pixel:"))
    if not pair:
        if query.startswith("pixel:"):
            raise InputError(f"query is {query!r}; give a pixel as pixel:Y,X")
        return query, None
    at = int(pair[1]), int(pair[2])
    if not query.startswith("pixel:"):
        return at, None
    row, column = frame.patch_at(*at)
    patch = vit.config.patch_size
    return Pixel(row * patch, column * patch), f"pixel ({at[0]}, {at[1]})"


def _rows(vit: ViT, images: Tensor, query: Any, ask: Ask) -> AttentionRows:
    if ask.method not in _LAYERED and ask.head not in ("all", "mean"):
        raise InputError(f"method {ask.method!r} makes one map of all heads; leave --head out")
    heads = ask.head if isinstance(ask.head, int) else "all"
    if ask.method == "rows":
        return attention_rows(vit, images, query, ask.layer, heads)  # type: ignore[arg-type]
    module = importlib.import_module(f"regard.vit.maps.{_HOMES[ask.method]}")
    if ask.method == "rollout":
        return module.rollout(vit, images, query)
    if ask.method == "value":
        return module.value_weighted(vit, images, query, ask.layer, heads)
    if ask.method == "relevance":
        return module.relevance(vit, images, _target(vit, ask.target), query)
    if ask.query is not None:
        raise InputError("method 'legrad' is of the whole image; leave --query out")
    heat = module.legrad(vit, images, _target(vit, ask.target))[:, None, None, None]
    return AttentionRows(heat, None, heat.new_zeros(1, 1, 1, 1, 0), None, ("image",))


def _target(vit: ViT, target: int | None) -> Any:
    """A class; by default the one the model finds, and without a classifier the pooled vector along itself."""
    if target is not None:
        return target

    def own(tokens: Tokens, pooled: Tensor) -> Tensor:
        values = pooled if vit.head is None else vit.head(pooled)
        if vit.head is not None:
            return values.amax(dim=-1)
        return (values * torch.nn.functional.normalize(values.detach(), dim=-1)).sum(dim=-1)

    return own


def _fused(rows: AttentionRows, ask: Ask) -> tuple[Tensor, tuple[int, ...], list[list[list[str]]], tuple[Any, ...]]:
    """Maps `(L, Q, M, gh, gw)`, the head of each, its name, and the masses with the same axes."""
    patches = rows.patches[0].movedim(1, 2)  # (L, Q, H, gh, gw)
    masses = [None if m is None else m[0].movedim(1, 2).float().cpu() for m in (rows.cls, rows.registers, rows.sink)]
    layers, queries = patches.shape[:2]
    if ask.method not in _LAYERED:
        return patches, (-1,), _all([ask.method], layers, queries), tuple(masses)
    if ask.head == "all" or isinstance(ask.head, int):
        return patches, rows.heads, _all([f"head {h}" for h in rows.heads], layers, queries), tuple(masses)
    from regard.vit.maps.heads import fuse

    found = fuse(rows, ask.head)  # type: ignore[arg-type]
    taken = found.heads[0].cpu()  # (L, Q, k)
    # The masses beside a fused map are the mean over the heads it was made of.
    numbers = {head: place for place, head in enumerate(rows.heads)}
    index = torch.tensor([numbers[head] for head in taken.flatten().tolist()]).view(taken.shape)
    means = [None if m is None else _mean_over(m, index) for m in masses]
    names = [
        [[_called(str(ask.head), [rows.heads[i] for i in index[layer, q].tolist()])] for q in range(queries)]
        for layer in range(layers)
    ]
    return found.maps[0][:, :, None], (-1,), names, tuple(means)


def _mean_over(mass: Tensor, index: Tensor) -> Tensor:
    """Mean over the heads `index (L, Q, k)` of `(L, Q, H, ...)`, as `(L, Q, 1, ...)`."""
    wide = index.reshape(*index.shape, *[1] * (mass.dim() - 3)).expand(*index.shape, *mass.shape[3:])
    return mass.gather(2, wide).mean(dim=2, keepdim=True)


def _called(how: str, heads: list[int]) -> str:
    if how != "auto":
        return f"{how} of heads"
    return f"auto: heads {', '.join(map(str, heads))}"


def _all(names: list[str], layers: int, queries: int) -> list[list[list[str]]]:
    return [[names for _ in range(queries)] for _ in range(layers)]


def _norms(vit: ViT, images: Tensor, ask: Ask) -> dict[str, Any]:
    from regard.vit.maps.norms import token_norms

    found = token_norms(vit, images, ask.layer if ask.method in _LAYERED else "all")  # type: ignore[arg-type]
    parts = [found.registers[0]] if found.cls is None else [found.cls[0][:, None], found.registers[0]]
    return {
        "norms": found.patches[0].float().cpu(),
        "special_norms": torch.cat(parts, dim=1).float().cpu(),
        "norm_layers": found.layers,
    }


def check(vit: ViT, ask: Ask) -> None:
    """Raise InputError for a layer or head that the model does not have, before any picture is opened."""
    vit.layer_numbers(ask.layer)  # type: ignore[arg-type]
    if isinstance(ask.head, int):
        head_numbers(vit, ask.head)
