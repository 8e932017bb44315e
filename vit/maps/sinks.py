"""Where attention rests when a head has nothing to say: the sink report."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.maps.columns import by_name, columns, sequence_names
from regard.vit.maps.norms import ROBUST, Images, OutlierRule, lengths
from regard.vit.maps.report import Report, table
from regard.vit.maps.rows import Layers, as_tensor
from regard.vit.maps.trace import passages, plain

EPSILON = 0.3  # from which mean attention Gu et al. call a token a sink
MASSES = ("cls", "registers", "outliers", "patches", "sink")


@dataclass(frozen=True, eq=False)
class SinkReport(Report):
    """How the attention of every head is spent, for B images, L layers, H heads; each tensor `(B, L, H)`.

    Attributes:
        layers: the number of each layer.
        names: what each key of the sequence is called.
        first: mean over the queries but the first of the attention to the first token (Qiu et al., 2025,
            arXiv:2505.06708).
        alpha: the largest mean attention that a key gets from all queries, Gu et al.'s importance (2025,
            arXiv:2410.10781) without the causal mask; `key`: which key that is.
        epsilon: a head with an alpha above it has a sink.
        mass: mean attention on `cls`, `registers`, `outliers`, `patches` (the others) and `sink`, a learned one, which
            hands over nothing; together 1.
        entropy: mean entropy of a row over that of an even one, a learned sink being one more place to look.
        support: mean of exp(entropy), how many tokens a row looks at in effect.
        value_norm: length of the value that the key of `alpha` hands over; `value_norm_all`: mean over all keys. A sink
            hands over little.
        rule: which patches are outliers, in the stream that the layer reads.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...]
    first: Tensor
    alpha: Tensor
    key: Tensor
    epsilon: float
    mass: dict[str, Tensor]
    entropy: Tensor
    support: Tensor
    value_norm: Tensor
    value_norm_all: Tensor
    rule: OutlierRule

    @property
    def first_share(self) -> float:
        """The first token's share, over all images, layers and heads."""
        return self.first.mean().item()

    @property
    def sink_rate(self) -> float:
        """Share of the heads, over all images and layers, with a key of alpha above epsilon."""
        return (self.alpha > self.epsilon).float().mean().item()

    def key_name(self, image: int, layer: int, head: int) -> str:
        """The token that gets the most attention of a head; `layer` is its number."""
        if layer not in self.layers:
            raise InputError(f"layer {layer} is not in this report; it has {list(self.layers)}")
        return self.names[int(self.key[image, self.layers.index(layer), head])]

    def __str__(self) -> str:
        header = ["layer", "head", "sink", "alpha", "first", *(f"on {name}" for name in MASSES)]
        header += ["entropy", "support", "|v| / mean"]
        rows: list[list[object]] = []
        for i, layer in enumerate(self.layers):
            for head in range(self.alpha.shape[2]):
                names = {self.key_name(image, layer, head) for image in range(len(self.alpha))}
                at = (slice(None), i, head)
                row: list[object] = [layer, head, names.pop() if len(names) == 1 else "various"]
                row += [part[at].mean() for part in (self.alpha, self.first, *self.mass.values())]
                ratio = (self.value_norm / self.value_norm_all)[at].mean()
                rows.append([*row, self.entropy[at].mean(), self.support[at].mean(), ratio])
        return (
            f"Attention sinks, mean of {len(self.alpha)} images: {self.sink_rate:.1%} of the heads have a key of mean"
            f" attention above {self.epsilon:g}; the first token ({self.names[0]}) gets {self.first_share:.1%}\n"
            f"{table(header, rows)}"
        )


@torch.no_grad()
def sink_report(
    model: nn.Module,
    images: Images,
    layers: Layers = "all",
    *,
    rule: OutlierRule = ROBUST,
    epsilon: float = EPSILON,
) -> SinkReport:
    """What every head of the named layers spends its attention on, over all of its queries; one forward pass.

    Rows are streamed and checked against what the heads put out; memory O(256 x S). What a learned sink takes is shown
    beside the rest, and nothing is scaled up to make good for it.

    Raises InputError for a layer that does not exist.
    """
    vit = plain(model)
    wanted = vit.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    kept: dict[int, tuple[Tensor, ...]] = {}
    names: tuple[str, ...] = ()
    for passage in passages(vit, as_tensor(vit, images), wanted):
        names = names or sequence_names(vit, passage.grid)
        found = rule(by_name(vit, lengths(passage.x), passage.grid)[2])[:, None]
        sums = columns(passage)
        cls, registers, patches = by_name(vit, sums.received, passage.grid)
        mass = (
            torch.zeros_like(sums.first) if cls is None else cls,
            registers.sum(-1),
            (patches * found).sum((-2, -1)),
            (patches * ~found).sum((-2, -1)),
            sums.sink,
        )
        alpha, key = sums.received.max(-1)
        values = lengths(passage.kv.v)
        value = values.gather(-1, key[..., None])[..., 0]
        even = torch.tensor(float(sums.outcomes)).log().clamp_min(1e-12)
        kept[passage.layer] = (
            *mass, sums.first, alpha, key, sums.entropy / even.to(sums.entropy), sums.support, value, values.mean(-1)
        )  # fmt: skip
    stacked = [torch.stack(parts, dim=1) for parts in zip(*(kept[layer] for layer in wanted), strict=True)]
    masses, (first, alpha, key, entropy, support, value, value_all) = stacked[: len(MASSES)], stacked[len(MASSES) :]
    return SinkReport(
        tuple(wanted), names, first, alpha, key, epsilon, dict(zip(MASSES, masses, strict=True)), entropy, support,
        value, value_all, rule,
    )  # fmt: skip
