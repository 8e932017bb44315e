"""`Source`: tensors under their owner's names, and all that was said beside them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from regard.vit.errors import InputError

# Head counts of published widths. A width that is not here does not tell its heads: they must be stated.
PUBLISHED_HEADS = {
    192: 3, 320: 5, 384: 6, 512: 8, 640: 10, 768: 12, 832: 13, 896: 14,
    1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16, 4096: 32,
}  # fmt: skip


@dataclass
class Source:
    """What was read, before anything is renamed.

    Attributes:
        where: the file, folder, hub name or module, for messages.
        tensors: the vision transformer's tensors, with wrappers and prefixes gone.
        beside: tensors that stood outside the vision transformer: a text tower, a classifier, a loss.
        settings: the owner's own configuration: `config.json`, a live module's, a run's hyper-parameters.
        stated: `ViTConfig` fields that `settings` state, under our names.
        processor: the owner's own preprocessing: `preprocessor_config.json`, or timm's `pretrained_cfg`.
        changes: `ViTConfig` fields that the caller gave; they win over everything.
        sizes: image sizes that a run's hyper-parameters name; the native one is the one that fits the position table.
        prefix: what stood before every name, such as `model.`; messages give it back.
        own: what the file calls a tensor whose name is another one here.
        unwrapped, folded, resized, assumed: what was done on the way, for the report.
    """

    where: str
    tensors: dict[str, Tensor]
    beside: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    prefix: str = ""
    own: dict[str, str] = field(default_factory=dict)
    unwrapped: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Source":
        return replace(self, tensors=tensors)

    def own_name(self, name: str) -> str:
        """What the file itself calls a tensor."""
        return self.own.get(name, self.prefix + name)

    def need(self, name: str) -> Tensor:
        """A tensor that the layout cannot do without. Raises InputError naming it."""
        if name not in self.tensors:
            raise InputError(f"{self.where}: tensor {self.own_name(name)!r} is missing")
        return self.tensors[name]

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there. Raises InputError where it has not `dims` dimensions."""
        shape = tuple(self.need(name).shape)
        if len(shape) != dims:
            raise InputError(f"{self.where}: {self.own_name(name)} has shape {shape}; {dims} dimensions were expected")
        return shape

    def has(self, *patterns: str) -> bool:
        """Whether any tensor matches any pattern, in which `#` stands for a number."""
        regexes = [pattern_of(pattern) for pattern in patterns]
        return any(regex.fullmatch(name) for name in self.tensors for regex in regexes)

    def depth(self, block: str) -> int:
        """How many blocks there are; `block` is their prefix, such as `blocks.#.`."""
        regex = re.compile(re.escape(block).replace(r"\#", r"(\d+)"))
        numbers = {int(found[1]) for name in self.tensors if (found := regex.match(name))}
        if not numbers:
            raise InputError(f"{self.where}: no tensor {block}... is there")
        return max(numbers) + 1

    @property
    def self_distilled(self) -> bool:
        """Whether a teacher or student stood there without a classifier, or the head that DINO trains with."""
        paired = any(note.startswith(("wrapper 'teacher'", "wrapper 'student'")) for note in self.unwrapped)
        parted = bool({"teacher", "student"} & set(re.split(r"[./]", self.prefix)))
        names = (*map(self.own_name, self.tensors), *self.beside)
        head = any(re.search(r"(^|\.)head\.(mlp\.\d+|last_layer)\.", name) for name in names)
        return head or ((paired or parted) and not self.has("head.*"))

    def fact(self, name: str, default: Any = None) -> Any:
        """A `ViTConfig` field as the caller or the source's settings state it."""
        return self.changes.get(name, self.stated.get(name, default))

    def assume(self, name: str, value: Any, why: str) -> Any:
        """A field as stated, or else `value`, which the report then tells of."""
        if self.fact(name) is not None:
            return self.fact(name)
        self.tell(f"{name} {value!r}: {why}")
        return value

    def tell(self, assumption: str) -> None:
        """Have the report say what the source did not, once."""
        if assumption not in self.assumed:
            self.assumed.append(assumption)

    def heads(self, dim: int, head_dim: int | None = None) -> int:
        """The number of heads as stated, as a head's width gives it, or as every published model of this width has."""
        stated = self.fact("heads")
        if stated is not None:
            if PUBLISHED_HEADS.get(dim, stated) != stated:
                self.tell(f"heads {stated}: as stated; published models of width {dim} have {PUBLISHED_HEADS[dim]}")
            return int(stated)
        if head_dim:
            return dim // head_dim
        if dim not in PUBLISHED_HEADS:
            raise InputError(
                f"{self.where}: the tensors do not tell the number of heads, and no published model has width {dim};"
                " pass heads="
            )
        return int(self.assume("heads", PUBLISHED_HEADS[dim], f"as published models of width {dim} have"))

    def size_of(self, patches: int, patch_size: int) -> tuple[int, int] | None:
        """The stated image size, (height, width) in pixels, whose grid has this many patches.

        Raises InputError for a size from the caller that is none.
        """
        given = self.changes.get("image_size")
        if given is not None and pair(given) is None:
            raise InputError(f"image_size is {given!r}; it must be (height, width) in pixels")
        said = [given] if given is not None else [self.stated.get("image_size"), *self.sizes]
        for height, width in filter(None, map(pair, said)):
            if (height // patch_size) * (width // patch_size) == patches:
                return height, width
        return None

    def image_size(self, patches: int, patch_size: int) -> tuple[int, int]:
        """The native (height, width) in pixels of a position table with rows for this many patches.

        It is the one that was stated, or a square where the number is one. Raises InputError where neither fits.
        """
        size = self.size_of(patches, patch_size)
        if size is not None:
            if size in self.sizes:
                self.tell(f"image_size {size}: as the hyper-parameters say")
            return size
        given = pair(self.changes.get("image_size"))
        if given is not None:
            raise InputError(
                f"{self.where}: image_size {given} has {given[0] // patch_size} x {given[1] // patch_size}"
                f" patches of {patch_size} px; the position table has rows for {patches}"
                f"{fitting_sizes(patches, patch_size)}"
            )
        side = square_side(patches)
        if side is None:
            raise InputError(
                f"{self.where}: the position table has rows for {patches} patches, which is no square grid;"
                f" pass image_size=(height, width){fitting_sizes(patches, patch_size)}"
            )
        self.tell(f"image_size {(side * patch_size,) * 2}: a square, as nothing tells the grid of the position table")
        return side * patch_size, side * patch_size


def square_side(count: int) -> int | None:
    """The side of a square of so many patches, or None where they make none."""
    side = next((side for side in range(1, count + 1) if side * side >= count), 0)
    return side if side and side * side == count else None


def pair(size: Any) -> tuple[int, int] | None:
    """A size as (height, width): one number is a square, three are channels, height, width."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size, size
    if isinstance(size, (list, tuple)) and len(size) in (2, 3):
        sides = tuple(size)[-2:]
        if all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
            return int(sides[0]), int(sides[1])
    return None


def fitting_sizes(patches: int, patch_size: int) -> str:
    """The least elongated sizes with so many patches, as the end of a message."""
    heights = [h for h in range(1, patches + 1) if h * h <= patches and patches % h == 0][-2:]
    sizes = [(h * patch_size, patches // h * patch_size) for h in reversed(heights)]
    both = [size for h, w in sizes for size in dict.fromkeys(((h, w), (w, h)))]
    return f", such as {' or '.join(map(str, both))}" if both else ""


def pattern_of(template: str) -> re.Pattern[str]:
    """`#` is a number, `*` weight or bias, `**` anything."""
    escaped = re.escape(template).replace(r"\#", r"(\d+)")
    return re.compile(escaped.replace(r"\*\*", r".+").replace(r"\*", r"(weight|bias)"))


def first_match(names: Iterable[str], *templates: str) -> str | None:
    """The first name that one of the templates matches."""
    regexes = [pattern_of(template) for template in templates]
    return next((name for name in names if any(regex.fullmatch(name) for regex in regexes)), None)
