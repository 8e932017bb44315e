"""Does a head matter? Its importance by gradient and by ablation, and the effect of heads against random others.

A drop after a knock-out says little alone: any head of that layer might have cost as much. `head_report` therefore sets
it against random heads of the same layers, and says how sure both are.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, Edit, KeysValues
from regard.vit.errors import InputError
from regard.vit.maps.knockout import Heads, How, Part, attentions, knock_out, pairs, watched

FEWEST_CONTROLS = 20
_RESAMPLES = 2000
_TRIES = 50  # draws that may bring a set of controls again before another draw counts as a repetition


@dataclass(frozen=True)
class HeadImportance:
    """How much each head matters.

    Attributes:
        scores: per layer and head.
        by: `gradient` or `ablation`.
        samples: how many samples they are the mean of.
    """

    scores: tuple[tuple[float, ...], ...]
    by: str
    samples: int

    def ranking(self) -> list[tuple[int, int]]:
        """(layer, head) from the most to the least important; of equals the first comes first."""
        order = [(layer, head) for layer, row in enumerate(self.scores) for head in range(len(row))]
        return sorted(order, key=lambda pair: -self.scores[pair[0]][pair[1]])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranking": self.ranking()}

    def __str__(self) -> str:
        lines = [f"importance of heads by {self.by}, {self.samples} samples"]
        for layer, row in enumerate(self.scores):
            lines.append(f"layer {layer:>2}  " + "  ".join(f"{score:9.4g}" for score in row))
        return "\n".join(lines)


@dataclass(frozen=True)
class HeadReport:
    """What knocking heads out does to a metric, beside random heads of the same layers.

    Attributes:
        heads: the (layer, head) tested.
        how: what stood for their outputs.
        samples: how many samples were scored.
        intact, knocked_out: the mean metric before and with the heads off.
        drop: intact - knocked_out.
        drop_interval: bootstrap interval over the samples.
        controls: the heads of each control; as many per layer as were tested there, none of these among them.
        control_drops: the drop of each.
        distinct: how many different controls there are; small layers allow few.
        excess: drop - mean control drop.
        excess_interval: its bootstrap interval over the samples, the same samples for both.
        p_value: share of the different controls that cost at least as much, the tested heads themselves among them.
        level: of both intervals.
    """

    heads: tuple[tuple[int, int], ...]
    how: str
    samples: int
    intact: float
    knocked_out: float
    drop: float
    drop_interval: tuple[float, float]
    controls: tuple[tuple[tuple[int, int], ...], ...]
    control_drops: tuple[float, ...]
    distinct: int
    excess: float
    excess_interval: tuple[float, float]
    p_value: float
    level: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        names = ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        low, high = min(self.control_drops), max(self.control_drops)
        mean = sum(self.control_drops) / len(self.control_drops)
        few = f" ({self.distinct} different)" if self.distinct < len(self.controls) else ""
        return (
            f"heads {names} off ({self.how}), {self.samples} samples: {self.intact:.4g} -> {self.knocked_out:.4g},"
            f" a drop of {self.drop:.4g} {_interval(self.drop_interval, self.level)};"
            f" {len(self.controls)} random controls of the same layers{few}: {mean:.4g}, from {low:.4g} to {high:.4g};"
            f" {self.excess:.4g} {_interval(self.excess_interval, self.level)} more than these, p {self.p_value:.2g}"
        )


def head_importance(
    model: nn.Module | Sequence[Attention],
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    *,
    by: Literal["gradient", "ablation"] = "gradient",
    part: Part | None = None,
    norm: bool = False,
    how: How = "zero",
) -> HeadImportance:
    """How much each head matters for a loss, from one pass over `batches` (Michel et al., 2019, arXiv:1905.10650).

    `gradient`: I_h = E_x |sum of out_h * d loss(x) / d out_h|, one forward and backward for all heads together.
    `ablation`: how much the mean loss grows with each head off, a forward for every head of every batch.

    Args:
        model: as `knock_out` takes it; its mode (training or not) is the caller's choice, and weights get no gradient.
        loss: runs the model on a batch and returns the loss of every sample, `(B,)`. With a single number the scores
            of samples may cancel each other, and so it is refused unless the batch is one sample.
        part: of an `ImageQA`. For its `words` a sample is a question where every image has an equal share of them
            and `loss` returns one value for each question; otherwise an image with all that was asked about it.
        norm: divide by the l2 norm of the layer's scores, which makes layers comparable.
        how: what `ablation` puts in place of a head.

    Raises InputError where no batch is given, and where the losses do not go with the samples.
    """
    layers = attentions(model, part)
    if by == "gradient":
        totals, samples = _by_gradient(layers, batches, loss, part == "words")
    elif by == "ablation":
        totals, samples = _by_ablation(layers, batches, loss, how)
    else:
        raise InputError(f"by is {by!r}; choose gradient or ablation")
    if not samples:
        raise InputError("there are no samples to measure importance on; give at least one batch")
    rows = [total / samples for total in totals]
    if norm:
        rows = [row / row.norm().clamp_min(1e-30) for row in rows]
    return HeadImportance(tuple(tuple(row.tolist()) for row in rows), by, samples)


def head_report(
    metric: Callable[[], Any],
    model: nn.Module | Sequence[Attention],
    heads: Heads,
    *,
    controls: int = FEWEST_CONTROLS,
    how: How = "zero",
    part: Part | None = None,
    seed: int = 0,
    level: float = 0.95,
) -> HeadReport:
    """Knock heads out, and random others of the same layers, and compare.

    Args:
        metric: runs the model and returns one value per sample, more is better, always of the same samples in the same
            order. It is called once intact, once for the heads and once for each different control.
        heads: as in `knock_out`.
        controls: how many random controls, at least 20. Each takes as many heads from a layer as were tested there,
            and none of those. Where a layer has few others, controls come again; `distinct` says how many differ.
        level: of the bootstrap intervals, percentiles over 2,000 resamples of the samples.

    Raises InputError where a layer has not enough other heads, and for fewer than 20 controls.
    """
    if controls < FEWEST_CONTROLS:
        raise InputError(f"{controls} controls are too few to compare with; take at least {FEWEST_CONTROLS}")
    if not 0 < level < 1:
        raise InputError(f"level is {level}; it must lie between 0 and 1")
    layers = attentions(model, part)
    tested = tuple(pairs(layers, heads))
    if not tested:
        raise InputError("no heads were named to report on")
    drawn = _controls(layers, tested, controls, random.Random(seed))

    def values(off: Sequence[tuple[int, int]]) -> np.ndarray:
        with knock_out(layers, off, how):
            return _per_sample(metric())

    intact, known = values(()), {off: values(off) for off in dict.fromkeys([tested, *drawn])}
    if any(scored.shape != intact.shape for scored in known.values()):
        raise InputError("the metric returned another number of samples the second time; it must score the same ones")
    drop = intact - known[tested]
    control = np.mean([intact - known[off] for off in drawn], axis=0)
    # One draw of samples serves both means: the same hard samples are in each.
    both = _resampled(np.stack((drop, drop - control)), seed)
    low, high = np.quantile(both, [(1 - level) / 2, (1 + level) / 2], axis=1)
    costs = {off: float((intact - known[off]).mean()) for off in drawn}
    as_bad = sum(cost >= drop.mean() for cost in costs.values())
    return HeadReport(
        tested,
        how,
        len(intact),
        float(intact.mean()),
        float(known[tested].mean()),
        float(drop.mean()),
        (float(low[0]), float(high[0])),
        tuple(drawn),
        tuple(costs[off] for off in drawn),
        len(costs),
        float((drop - control).mean()),
        (float(low[1]), float(high[1])),
        (1 + as_bad) / (1 + len(costs)),
        level,
    )


def _by_gradient(
    layers: Sequence[Attention], batches: Iterable[Any], loss: Callable[[Any], Tensor], shares: bool
) -> tuple[list[Tensor], int]:
    totals = [torch.zeros(attn.heads, dtype=torch.float64) for attn in layers]
    samples = 0
    for batch in batches:
        put_out: dict[int, Tensor] = {}

        def keep(layer: int, seen: dict[int, Tensor] = put_out) -> Edit:
            def look(z: Tensor, kv: KeysValues) -> Tensor:
                if layer in seen:
                    raise InputError("loss runs the model twice on a batch; one forward pass is measured")
                # Frozen weights leave nothing to differentiate before the first head: the graph begins here.
                seen[layer] = z if z.requires_grad else z.detach().requires_grad_()
                return seen[layer]

            return look

        with torch.enable_grad(), watched(layers, keep):
            losses = loss(batch)
            total = losses.sum()
        if len(put_out) < len(layers):
            raise InputError("loss did not run every attention layer of this part, so their heads have no importance")
        counted = _count(losses, put_out, shares)
        if not total.requires_grad:
            raise InputError("loss has no gradient; take torch.no_grad, inference_mode and argmax out of it")
        numbers = sorted(put_out)
        gradients = torch.autograd.grad(total, [put_out[n] for n in numbers], allow_unused=True)
        for number, gradient in zip(numbers, gradients, strict=True):
            if gradient is not None:
                totals[number] += _scores(put_out[number].detach(), gradient, counted)
        samples += counted
    return totals, samples


def _scores(z: Tensor, gradient: Tensor, samples: int) -> Tensor:
    """Sum over samples of |sum of z * gradient|, `(H,)`; questions on one image stand side by side in its tokens."""
    felt = (z.double() * gradient.double()).sum(dim=-1)  # (B, H, T)
    return felt.unflatten(2, (samples // len(z), -1)).sum(dim=-1).abs().sum(dim=(0, 2)).cpu()


def _count(losses: Tensor, put_out: dict[int, Tensor], shares: bool) -> int:
    """How many samples the losses are of. Raises InputError where that does not fit the layers' batch."""
    given = losses.numel()
    rows, tokens = {len(z) for z in put_out.values()}, {z.shape[2] for z in put_out.values()}
    if losses.dim() > 1 or (losses.dim() == 0 and rows != {1}):
        raise InputError(f"loss returned {tuple(losses.shape)}; it must return one loss for every sample, (B,)")
    images = max(rows)
    if len(rows) > 1 or given % images or (shares and any(t % (given // images) for t in tokens)):
        raise InputError(f"{given} losses do not go with the layers' batch of {sorted(rows)}; one per sample is needed")
    return given if shares else images


def _by_ablation(
    layers: Sequence[Attention], batches: Iterable[Any], loss: Callable[[Any], Tensor], how: How
) -> tuple[list[Tensor], int]:
    totals = [torch.zeros(attn.heads, dtype=torch.float64) for attn in layers]
    samples = 0
    with torch.no_grad():
        for batch in batches:
            intact = loss(batch).double()
            if intact.dim() > 1:
                raise InputError(f"loss returned {tuple(intact.shape)}; it must return one loss for every sample, (B,)")
            for layer, attn in enumerate(layers):
                for head in range(attn.heads):
                    with knock_out(layers, [(layer, head)], how):
                        totals[layer][head] += (loss(batch).double() - intact).sum().cpu()
            samples += intact.numel()
    return totals, samples


def _controls(
    layers: Sequence[Attention], tested: Sequence[tuple[int, int]], count: int, chance: random.Random
) -> list[tuple[tuple[int, int], ...]]:
    per_layer = {number: [head for layer, head in tested if layer == number] for number, _ in tested}
    rest = {layer: sorted(set(range(layers[layer].heads)) - set(of)) for layer, of in per_layer.items()}
    for layer, of in per_layer.items():
        if len(rest[layer]) < len(of):
            raise InputError(
                f"layer {layer} has {len(rest[layer])} other heads to compare {len(of)} with; test fewer heads of it"
            )

    def draw() -> tuple[tuple[int, int], ...]:
        return tuple((n, head) for n, of in per_layer.items() for head in sorted(chance.sample(rest[n], len(of))))

    drawn: list[tuple[tuple[int, int], ...]] = []
    for _ in range(count):
        drawn.append(next((fresh for fresh in (draw() for _ in range(_TRIES)) if fresh not in drawn), draw()))
    return drawn


def _per_sample(values: Any) -> np.ndarray:
    array = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=float)
    if array.ndim != 1 or not len(array):
        raise InputError(f"the metric returned {array.shape}; it must return one value per sample, (n,)")
    return array


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of `values (n of them, samples)` over resamples of the samples: `(n of them, resamples)`."""
    chance, count = np.random.default_rng(seed), values.shape[1]
    return np.stack([values[:, chance.integers(count, size=count)].mean(axis=1) for _ in range(_RESAMPLES)], axis=1)


def _interval(ends: tuple[float, float], level: float) -> str:
    return f"({level:.0%} interval {ends[0]:.4g} to {ends[1]:.4g})"
