"""What registers are for: where they and the class token look, and how the model fares without them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.maps.columns import by_name, row_entropy
from regard.vit.maps.norms import ROBUST, Images, OutlierRule, TokenNorms, lengths, token_norms
from regard.vit.maps.queries import Asked, resolve
from regard.vit.maps.report import Report, table
from regard.vit.maps.rows import Layers, as_tensor, checked_rows
from regard.vit.maps.sinks import MASSES
from regard.vit.maps.trace import passages, plain
from regard.vit.maps.twin import without_registers
from regard.vit.model import ViT


@dataclass(frozen=True, eq=False)
class RegisterReport(Report):
    """Where the class token and each register look, for B images, L layers, H heads and Q queries.

    Attributes:
        layers: the number of each layer.
        queries: `cls`, `reg0`, `reg1`, …, as far as the model has them.
        mass: attention on `cls`, on each of the `registers` together, on `outliers`, on the other `patches` and on a
            learned `sink`, each `(B, L, H, Q)`; together 1.
        entropy: of the query's row over that of an even one, a learned sink being one more place, `(B, L, H, Q)`.
        overlap: mean cosine of the maps over patches of the registers with one another, `(B, L, H)`: 1 where all
            look at the same patches; not a number for fewer than two.
        norms: length of every token after each layer.
        outliers: how many patches stand out of the stream after each layer, `(B, L)`.
        rule: by which rule; for `mass`, in the stream that the layer reads.
        against: the same of the model it is compared with, or None.
        change: 1 - mean cosine between the final patches of both, for each image, where they are comparable.
    """

    layers: tuple[int, ...]
    queries: tuple[str, ...]
    mass: dict[str, Tensor]
    entropy: Tensor
    overlap: Tensor
    norms: TokenNorms
    outliers: Tensor
    rule: OutlierRule
    against: "RegisterReport | None" = None
    change: Tensor | None = None

    def __str__(self) -> str:
        lines = [f"Registers, mean of {len(self.outliers)} images and all heads; outliers: {self.rule}", self._table()]
        if self.against is not None:
            told = "" if self.change is None else f" (its patches differ by 1 - cosine = {self.change.mean():.3g})"
            lines += [f"\nAgainst{told}", self.against._table()]
        return "\n".join(lines)

    def _table(self) -> str:
        header = [
            "layer",
            "query",
            *(f"on {name}" for name in MASSES),
            "entropy",
            "norm",
            "patch max/median",
            "outliers",
        ]
        rows: list[list[object]] = []
        peaks = self.norms.peaks().mean(0)
        for i, layer in enumerate(self.layers):
            end: list[object] = [peaks[i], int(self.outliers[:, i].sum())]
            for q, query in enumerate(self.queries):
                at = (slice(None), i, slice(None), q)
                masses = [part[at].mean() for part in self.mass.values()]
                rows.append([layer, query, *masses, self.entropy[at].mean(), self._norm(query, i), *end])
            if not self.queries:
                rows.append([layer, "none", *[float("nan")] * (len(MASSES) + 2), *end])
        return table(header, rows)

    def _norm(self, query: str, index: int) -> Tensor:
        if query == "cls" and self.norms.cls is not None:
            return self.norms.cls[:, index].mean()
        return self.norms.registers[:, index, int(query.removeprefix("reg"))].mean()


@torch.no_grad()
def register_report(
    model: nn.Module,
    images: Images,
    layers: Layers = "all",
    *,
    rule: OutlierRule = ROBUST,
    compare: nn.Module | Literal["knocked out"] | None = None,
) -> RegisterReport:
    """Where the class token and every register look, per layer and head, and how long all tokens are.

    `compare` is another ViT, such as one trained without registers, or `knocked out`: this one with its registers taken
    out of the sequence. Pictures are preprocessed as each model expects.

    Raises InputError for a model with neither class token nor registers, and for a layer that does not exist.
    """
    vit = plain(model)
    if not (vit.config.class_token or vit.config.registers):
        raise InputError("this ViT has neither a class token nor registers to report on")
    report = _report(vit, images, layers, rule)
    if compare is None:
        return report
    if isinstance(compare, str) and compare != "knocked out":
        raise InputError(f"compare {compare!r} is neither a ViT nor 'knocked out'")
    other = without_registers(vit) if isinstance(compare, str) else plain(compare)
    against = _report(other, images, layers, rule)
    ours, theirs = vit(as_tensor(vit, images)), other(as_tensor(other, images))
    change = None
    if ours.grid == theirs.grid and ours.patches.shape == theirs.patches.shape:
        change = 1 - F.cosine_similarity(ours.patches.float(), theirs.patches.float(), dim=-1).mean(-1)
    return RegisterReport(**{**vars(report), "against": against, "change": change})


def _report(vit: ViT, images: Images, layers: Layers, rule: OutlierRule) -> RegisterReport:
    images = as_tensor(vit, images)
    norms = token_norms(vit, images, layers)
    kept: dict[int, list[Tensor]] = {}
    asked: Sequence[Asked] = ()
    for passage in passages(vit, images, norms.layers):
        asked = _special(vit, passage.grid, images.device)
        index = torch.cat([torch.zeros(0, dtype=torch.long, device=images.device), *(row.tokens for row in asked)])
        rows = checked_rows(passage.attn, passage.q[:, :, index], passage.kv, out=passage.out[:, :, index])
        found = rule(by_name(vit, lengths(passage.x), passage.grid)[2])[:, None, None]
        cls, registers, patches = by_name(vit, rows, passage.grid)
        has_sink = passage.attn.sink is not None
        even = torch.tensor(float(rows.shape[-1] + has_sink)).log().clamp_min(1e-12)
        kept[passage.layer] = [
            torch.zeros_like(rows[..., 0]) if cls is None else cls,
            registers.sum(-1),
            (patches * found).sum((-2, -1)),
            (patches * ~found).sum((-2, -1)),
            1 - rows.sum(-1) if has_sink else torch.zeros_like(rows[..., 0]),
            row_entropy(rows, has_sink) / even.to(rows),
            _overlap(patches[:, :, int(vit.config.class_token) :].flatten(-2)),
        ]
    parts = [torch.stack(part, dim=1) for part in zip(*(kept[layer] for layer in norms.layers), strict=True)]
    mass = dict(zip(MASSES, parts[: len(MASSES)], strict=True))
    outliers = rule(norms.patches).sum((-2, -1))
    return RegisterReport(
        norms.layers, tuple(row.name for row in asked), mass, parts[-2], parts[-1], norms, outliers, rule
    )


def _special(vit: ViT, grid: tuple[int, int], device: torch.device) -> list[Asked]:
    wanted = ["cls"] * vit.config.class_token + ["registers"] * bool(vit.config.registers)
    return resolve(vit, wanted, grid, device) if wanted else []


def _overlap(maps: Tensor) -> Tensor:
    """Mean cosine between different maps `(B, H, R, N) -> (B, H)`, not a number for fewer than two."""
    count = maps.shape[2]
    if count < 2:
        return maps.new_full(maps.shape[:2], torch.nan)
    unit = F.normalize(maps, dim=-1)
    return (unit.sum(2).square().sum(-1) - count) / (count * (count - 1))
