"""Where a head looks: rows of the attention matrix, recomputed from that layer's own queries and keys.

The fused kernel runs as always and no hook is set. Only the rows asked for are computed, so memory is O(rows x N). Each
row is checked: its percentages times the values must give what the head really put out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, KeysValues
from regard.vit.errors import InputError
from regard.vit.maps.queries import Asked, Query, resolve
from regard.vit.maps.trace import Passage, passages, plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture

BLOCK = 256  # queries whose rows are held at once
Layers = int | Sequence[int] | Literal["all"]


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention from Q queries in L layers and H heads, by the name of the token they look at; a row's parts sum to 1.

    Attributes:
        patches: `(B, L, H, Q, grid height, grid width)`.
        cls: mass on the class token `(B, L, H, Q)`, or None for a model without one.
        registers: mass on each register `(B, L, H, Q, R)`.
        sink: mass that a learned sink took `(B, L, H, Q)`, or None for heads without one.
        queries: the name of each query.
        layers, heads: the number of each layer and head.
        logits: the same before the softmax, scaled and masked, where they were asked for.
    """

    patches: Tensor
    cls: Tensor | None
    registers: Tensor
    sink: Tensor | None = None
    queries: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    logits: "AttentionRows | None" = None

    @property
    def grid(self) -> tuple[int, int]:
        return self.patches.shape[-2], self.patches.shape[-1]

    def mass(self) -> dict[str, Tensor]:
        """The share on `patches`, `cls`, `registers` and `sink`, each `(B, L, H, Q)`; together they are 1."""
        nothing = torch.zeros_like(self.patches[..., 0, 0])
        return {
            "patches": self.patches.sum(dim=(-2, -1)),
            "cls": nothing if self.cls is None else self.cls,
            "registers": self.registers.sum(dim=-1),
            "sink": nothing if self.sink is None else self.sink,
        }


def checked_rows(
    attn: Attention, q: Tensor, kv: KeysValues, mask: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Rows of A `(B, H, T, N)` for the queries `q (B, H, T, K)`, proven against what the heads put out.

    `out (B, H, T, K)` is what they put out for these queries in the forward pass; where it is not at hand the fused
    kernel is run on them again.
    Raises RuntimeError where the rows do not reproduce it, which would mean a wrong map.
    """
    rows = attn.weights(q, kv.k, mask)
    real = attn.mix(q, kv, mask) if out is None else out
    if not rows.numel():
        return rows
    with torch.autocast(q.device.type, enabled=False):
        expected = rows @ kv.v.to(rows.dtype)
    # Half precision and TF32 round inputs and outputs; the bound follows the arithmetic that ran.
    exact = real.dtype in (torch.float32, torch.float64)
    tf32 = real.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    tolerance = 1e-4 if exact and not tf32 else 3e-2
    scale = kv.v.abs().amax().clamp_min(1e-12)
    worst = ((expected - real.to(rows.dtype)).abs().amax() / scale).item()
    if not worst <= tolerance:
        raise RuntimeError(f"attention rows differ from the head's output by {worst:.2g} of the largest value")
    return rows


@torch.no_grad()
def attention_rows(
    model: nn.Module,
    images: Tensor | Picture | Sequence[Picture],
    queries: Query | Sequence[Query] = "cls",
    layers: Layers = -1,
    heads: int | Sequence[int] | Literal["all"] = "all",
    *,
    logits: bool = False,
) -> AttentionRows:
    """Where tokens look, for the named layers and heads.

    Args:
        model: a `ViT`, compiled or not.
        images: a preprocessed float tensor `(B, C, height, width)`, or pictures as `Preprocess` takes them.
        queries: one, or a list of: `cls`; `registers`, each of them; `reg2`; a patch `(row, column)`; a `Pixel(y, x)`
            of the preprocessed image; `patches`, the mean of all patches' rows; a mask `(grid height, grid width)` or
            `(height, width)`, the mean over the patches under it. `patch_rows` gives every patch's row.
        layers: numbers, counted from the end if negative, or `all`.
        heads: numbers, or `all`.
        logits: also return the scores before the softmax.

    Raises InputError for a query token that the model does not have, and a layer, head or place that does not exist.
    """
    vit = plain(model)
    images = as_tensor(vit, images)
    wanted = vit.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    chosen = head_numbers(vit, heads)
    found: dict[int, AttentionRows] = {}
    for passage in passages(vit, images, wanted):
        asked = resolve(vit, queries, passage.grid, images.device)
        rows = rows_of(passage, asked)[:, chosen]
        scores = None
        if logits:
            scores = split(vit, _scores(passage, asked)[:, chosen], passage)
            if passage.attn.sink is not None:
                sink = passage.attn.sink[chosen].to(rows.dtype)[None, :, None].expand(rows.shape[:3])
                scores = replace(scores, sink=sink)
        found[passage.layer] = split(vit, rows, passage, asked, scores)
        del passage  # or it would outlive the next layer's start
    return stacked([found[layer] for layer in wanted], wanted, chosen)


@torch.no_grad()
def patch_rows(
    model: nn.Module, images: Tensor | Picture | Sequence[Picture], layer: int = -1, *, block: int = BLOCK
) -> Iterator[AttentionRows]:
    """The rows of every patch of one layer in reading order, at most `block` of them at once: memory O(block x N)."""
    vit = plain(model)
    (passage,) = passages(vit, as_tensor(vit, images), layer)
    places = resolve(vit, "patches", passage.grid, passage.x.device)[0].tokens
    for index, part in enumerate(places.split(block)):
        first = index * block
        names = [divmod(first + i, passage.grid[1]) for i in range(len(part))]
        asked = [Asked(f"patch {name}", part[i : i + 1]) for i, name in enumerate(names)]
        rows = split(vit, rows_of(passage, asked), passage, asked)
        yield stacked([rows], [passage.layer], list(range(vit.config.heads)))


def head_numbers(model: ViT, heads: int | Sequence[int] | Literal["all"]) -> list[int]:
    """Head numbers counted from 0. Raises InputError for one that does not exist."""
    count = model.config.heads
    if heads == "all":
        return list(range(count))
    asked: Sequence[Any] = [heads] if isinstance(heads, int) else list(heads)
    for head in asked:
        if not isinstance(head, int) or not -count <= head < count:
            raise InputError(f"head {head!r} does not exist: this ViT has {count}, 0 to {count - 1}")
    if not asked:
        raise InputError("no heads were asked for; name at least one, or 'all'")
    return [head % count for head in asked]


def split(
    model: ViT, rows: Tensor, passage: Passage, asked: Sequence[Asked] = (), logits: AttentionRows | None = None
) -> AttentionRows:
    """Name the columns of `rows (B, H, Q, S)` of one layer: `AttentionRows` without its L axis."""
    flat = model.name(rows.flatten(0, 2)[..., None], passage.grid)  # the model's own layout of a sequence
    shape = rows.shape[:3]
    has_sink = passage.attn.sink is not None and bool(asked)  # the logits, which have no names, sum up to nothing
    return AttentionRows(
        flat.patches[..., 0].unflatten(0, shape).unflatten(-1, passage.grid),
        None if flat.cls is None else flat.cls[..., 0].unflatten(0, shape),
        flat.registers[..., 0].unflatten(0, shape),
        1 - rows.sum(dim=-1) if has_sink else None,
        tuple(row.name for row in asked),
        logits=logits,
    )


def as_tensor(model: ViT, images: Tensor | Picture | Sequence[Picture]) -> Tensor:
    if isinstance(images, Tensor) and images.dim() == 4:
        return images
    return model.preprocess(images).to(model.tokenizer.proj.weight)


def rows_of(passage: Passage, asked: Sequence[Asked]) -> Tensor:
    """Checked rows `(B, H, Q, S)`; of a mean over many tokens no more than a block is held."""
    attn, kv = passage.attn, passage.kv
    if all(len(row.tokens) == 1 for row in asked):
        index = torch.cat([row.tokens for row in asked])
        return checked_rows(attn, passage.q[:, :, index], kv, out=passage.out[:, :, index])
    rows = []
    for row in asked:
        parts = [
            checked_rows(attn, passage.q[:, :, part], kv, out=passage.out[:, :, part]).sum(dim=2, keepdim=True)
            for part in row.tokens.split(BLOCK)
        ]
        rows.append(torch.stack(parts).sum(dim=0) / len(row.tokens))
    return torch.cat(rows, dim=2)


def _scores(passage: Passage, asked: Sequence[Asked]) -> Tensor:
    """Logits `(B, H, Q, S)`; a mean over tokens is the mean of their logits."""
    rows = []
    for row in asked:
        parts = [passage.attn.scores(passage.q[:, :, p], passage.kv.k) for p in row.tokens.split(BLOCK)]
        rows.append(sum(part.sum(dim=2, keepdim=True) for part in parts) / len(row.tokens))
    return torch.cat(rows, dim=2)  # type: ignore[arg-type]


def stacked(parts: Sequence[AttentionRows], layers: Sequence[int], heads: Sequence[int]) -> AttentionRows:
    first = parts[0]

    def stack(name: str) -> Any:
        return None if getattr(first, name) is None else torch.stack([getattr(p, name) for p in parts], dim=1)

    logits = None
    if first.logits is not None:
        logits = stacked([p.logits for p in parts if p.logits is not None], layers, heads)
    names = ("patches", "cls", "registers", "sink")
    named = {name: stack(name) for name in names}
    return AttentionRows(**named, queries=first.queries, layers=tuple(layers), heads=tuple(heads), logits=logits)
