"""Turn heads or registers off and see what becomes of everything behind them.

A head is taken away where it hands over: its output is replaced before the heads are joined, so that all else, the
fused kernel and the maps included, runs as always. "Off" has several meanings that give different results (Michel et
al., 2019, arXiv:1905.10650, set outputs to 0; masking logits, as in work on retrieval heads, arXiv:2404.15574, makes
attention uniform instead), so each has its name.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, Edit, KeysValues
from regard.vit.blocks import Block
from regard.vit.errors import InputError
from regard.vit.maps.trace import plain
from regard.vit.model import ViT

How = Literal["zero", "mean", "shuffle", "uniform"]
HowRegisters = Literal["zero", "mean", "shuffle", "noise"]
Part = Literal["vit", "words"]
Heads = Mapping[int, Any] | Iterable[tuple[int, int]]


@contextmanager
def knock_out(
    model: nn.Module | Sequence[Attention],
    heads: Heads,
    how: How = "zero",
    *,
    part: Part | None = None,
    means: Sequence[Tensor] | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Within the `with` block the named heads are off; afterwards, also after an exception, all is as before.

    Blocks may stand within each other: a head is then edited from the outermost to the innermost. Gradients flow.

    Args:
        model: a `ViT`, compiled or not, an `ImageQA`, any module with `Attention` in it, or these themselves.
        heads: `{layer: [heads]}` or pairs (layer, head); numbers below 0 count from the end.
        how: what stands for the output of a head, `(B, H, T, K)` before the output projection:
            `zero`: 0;
            `mean`: one vector per head, the mean of its output over all images and tokens of the batch, padded
            questions included, or `means`;
            `shuffle`: its output for another image of the same batch, at the same token;
            `uniform`: what it would hand over if it looked everywhere alike, the mean of all N values offered.
            These are all tokens of a ViT; in a memory of differently sized images the padding counts too.
        part: of an `ImageQA`, its `vit` or its `words`, the cross-attention, whose layers are counted from 0.
        means: for `mean`, each layer's `(H, K)`, as `head_means` gives them for a whole set.
        seed: chooses whose output `shuffle` gives to whom.

    Raises InputError for a layer or head that does not exist, and within the block where `shuffle` meets one image.
    """
    _check_how(how, How)
    if means is not None and how != "mean":
        raise InputError(f"means are for how='mean', not for {how!r}")
    layers = attentions(model, part)
    chosen = pairs(layers, heads)
    if means is not None and len(means) != len(layers):
        raise InputError(f"{len(means)} means do not fit {len(layers)} layers; take what head_means gave for this part")
    before = [(attn, attn.edit) for attn in layers]
    try:
        for number, attn in enumerate(layers):
            off = frozenset(head for layer, head in chosen if layer == number)
            if off:
                attn.edit = _Off(off, how, None if means is None else means[number], seed, attn.edit)
        yield
    finally:
        for attn, edit in before:
            attn.edit = edit


@torch.no_grad()
def head_means(
    model: nn.Module | Sequence[Attention],
    batches: Iterable[Any],
    run: Callable[[Any], Any] | None = None,
    *,
    part: Part | None = None,
) -> list[Tensor]:
    """What each head puts out on average over a set, all images and tokens alike: per layer `(H, K)`, in float64.

    `run(batch)` is one forward pass; by default the model is called with the batch.
    Raises InputError where no batch reached the attention.
    """
    layers = attentions(model, part)
    sums: list[Any] = [0.0] * len(layers)
    counts = [0] * len(layers)

    def add(layer: int) -> Edit:
        def look(z: Tensor, kv: KeysValues) -> Tensor:
            sums[layer] = sums[layer] + z.double().sum(dim=(0, 2))
            counts[layer] += z.shape[0] * z.shape[2]
            return z

        return look

    with watched(layers, add):
        for batch in batches:
            run(batch) if run is not None else cast(nn.Module, model)(batch)
    if not all(counts):
        raise InputError("no batch reached every attention layer, so there is no mean; give at least one batch")
    return [total / count for total, count in zip(sums, counts, strict=True)]


@contextmanager
def knock_out_registers(
    model: nn.Module,
    which: int | Sequence[int] | Literal["all"] = "all",
    how: HowRegisters = "zero",
    *,
    layers: int | Sequence[int] | Literal["all"] = "all",
    seed: int = 0,
) -> Iterator[None]:
    """Within the `with` block the named registers carry nothing of the image from one block to the next, nor out.

    After each of the `layers` what the registers gathered is replaced: what later blocks, the final norm and words that
    ask the image find there. Zeros alone prove little, for no block was trained on them; the other ways keep what a
    register looks like and take away what it knows of this image (arXiv:2604.14433).

    Args:
        model: a `ViT`, compiled or not, or an `ImageQA`, whose image side is meant.
        which: numbers of registers, below 0 from the end, or `all`.
        how: `zero`; `mean`, the mean of the same register over the batch's images; `shuffle`, the same register of
            another image; `noise`, normal noise with the mean and spread of that register's numbers.
        layers: after which blocks.
        seed: of `shuffle` and `noise`.

    Raises InputError for a register that does not exist, and within the block where `mean` or `shuffle` has one image.
    """
    _check_how(how, HowRegisters)
    vit = _image_side(model)
    config, blocks = vit.config, [cast(Block, vit.blocks[number]) for number in vit.layer_numbers(layers)]
    asked = list(range(config.registers)) if which == "all" else [which] if isinstance(which, int) else list(which)
    if not config.registers:
        raise InputError("this ViT has no registers to knock out; ViT.with_registers makes one that has")
    for register in asked:
        _check_number("register", register, config.registers)
    numbers = sorted({int(register) % config.registers for register in asked})
    first = int(config.class_token) if config.registers_place == "after_cls" else -config.registers
    noise = torch.Generator().manual_seed(seed)
    before = [(block, block.edit) for block in blocks]
    try:
        for block in blocks if numbers else []:
            block.edit = _RegistersOff([first + n for n in numbers], how, seed, noise, block.edit)
        yield
    finally:
        for block, edit in before:
            block.edit = edit


def attentions(model: nn.Module | Sequence[Attention], part: Part | None = None) -> list[Attention]:
    """The attention layers whose heads are meant, in order: a ViT's blocks, or that part of an `ImageQA`.

    Raises InputError where a part must be named, does not exist, or there is no `Attention` at all.
    """
    if not isinstance(model, nn.Module):
        if wrong := [layer for layer in model if not isinstance(layer, Attention)]:
            raise InputError(f"a list of layers holds Attention modules, not a {type(wrong[0]).__name__}")
        return list(model)
    inner = _unwrapped(model)
    if isinstance(inner, ViT):
        if part == "words":
            raise InputError("a ViT alone has no words; part is 'vit' or left out")
        return [cast(Block, block).attn for block in inner.blocks]
    asking = getattr(getattr(inner, "text", None), "asking", None)  # an ImageQA, which this room does not import
    if asking is not None:
        if part not in get_args(Part):
            raise InputError(f"part is {part!r}; say whose heads are meant: 'vit' or 'words', the cross-attention")
        return [cross.attn for cross in asking] if part == "words" else attentions(cast(Any, inner).vit)
    if part is not None:
        raise InputError(f"a {type(inner).__name__} has no part {part!r}; pass its Attention modules")
    found = [module for module in inner.modules() if isinstance(module, Attention)]
    if not found:
        raise InputError(f"there is no Attention in this {type(inner).__name__}; only Regard's heads can be turned off")
    return found


def pairs(layers: Sequence[Attention], heads: Heads) -> list[tuple[int, int]]:
    """`heads` as (layer, head) pairs counted from 0, each once, in order. Raises InputError for what does not exist."""
    if isinstance(heads, Mapping):
        named = [(layer, head) for layer, of in heads.items() for head in ([of] if isinstance(of, int) else of)]
    else:
        named = list(heads)
    chosen = set()
    for pair in named:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"heads hold {pair!r}; give pairs (layer, head), or {{layer: [heads]}}")
        layer, head = pair
        _check_number("layer", layer, len(layers))
        _check_number(f"head of layer {layer}", head, layers[layer].heads)
        chosen.add((layer % len(layers), head % layers[layer].heads))
    return sorted(chosen)


@contextmanager
def watched(layers: Sequence[Attention], edit: Callable[[int], Edit]) -> Iterator[None]:
    """Let `edit(layer)` see, behind any knock-out that is in force, what the heads of each layer put out."""
    before = [(attn, attn.edit) for attn in layers]
    try:
        for number, attn in enumerate(layers):
            attn.edit = _After(attn.edit, edit(number))
        yield
    finally:
        for attn, old in before:
            attn.edit = old


@dataclass(frozen=True, eq=False)
class _After:
    first: Edit | None
    then: Edit

    def __call__(self, z: Tensor, kv: KeysValues) -> Tensor:
        return self.then(z if self.first is None else self.first(z, kv), kv)


@dataclass(frozen=True, eq=False)
class _Off:
    """The edit that turns heads of one layer off."""

    heads: frozenset[int]
    how: How
    means: Tensor | None
    seed: int
    before: Edit | None

    def __call__(self, z: Tensor, kv: KeysValues) -> Tensor:
        if self.before is not None:
            z = self.before(z, kv)
        off = torch.tensor([head in self.heads for head in range(z.shape[1])], device=z.device)[:, None, None]
        return torch.where(off, self._instead(z, kv).to(z.device, z.dtype), z)

    def _instead(self, z: Tensor, kv: KeysValues) -> Tensor:
        if self.how == "zero":
            return z.new_zeros(())
        if self.how == "uniform":
            return kv.v.mean(dim=2, keepdim=True)
        if self.how == "shuffle":
            return z[others(len(z), self.seed)]
        return z.mean(dim=(0, 2), keepdim=True) if self.means is None else self.means[:, None]


@dataclass(frozen=True, eq=False)
class _RegistersOff:
    """The edit of the stream `(B, S, D)` that leaves a block."""

    places: list[int]
    how: HowRegisters
    seed: int
    noise: torch.Generator
    before: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x)
        places = [place % x.shape[1] for place in self.places]
        index = torch.tensor(places, device=x.device)
        return x.index_copy(1, index, self._instead(x[:, places]))

    def _instead(self, held: Tensor) -> Tensor:
        if self.how == "zero":
            return torch.zeros_like(held)
        if self.how == "noise":
            drawn = torch.randn(held.shape, generator=self.noise).to(held)
            spread, centre = torch.std_mean(held, dim=(0, 2), keepdim=True)
            return centre + spread * drawn
        if self.how == "shuffle":
            return held[others(len(held), self.seed)]
        _need_several(len(held), "mean")
        return held.mean(dim=0, keepdim=True).expand_as(held)


def others(count: int, seed: int) -> list[int]:
    """For each of `count` images another one, each taken once. Raises InputError for a single image."""
    _need_several(count, "shuffle")
    order = random.Random(seed).sample(range(count), count)
    donor = dict(zip(order, order[1:] + order[:1], strict=True))  # one ring through all: nobody meets itself
    return [donor[image] for image in range(count)]


def _need_several(images: int, how: str) -> None:
    if images < 2:
        raise InputError(f"how={how!r} takes from other images of the batch, and there is one; pass at least two")


def _check_how(how: str, kinds: Any) -> None:
    if how not in get_args(kinds):
        raise InputError(f"how is {how!r}; choose one of {', '.join(get_args(kinds))}")


def _check_number(what: str, number: Any, count: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not -count <= number < count:
        raise InputError(f"{what} {number!r} does not exist: there are {count}, 0 to {count - 1}")


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model


def _image_side(model: nn.Module) -> ViT:
    inner = _unwrapped(model)
    return plain(inner if isinstance(inner, ViT) else getattr(inner, "vit", inner))
