"""How long every token is, layer by layer, and which patches stand out: outlier tokens (Darcet et al., 2024).

Lengths are of the residual stream before the final norm, which would make them all alike (arXiv:2309.16588).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.maps.columns import by_name, columns
from regard.vit.maps.report import Report, mean_where, table
from regard.vit.maps.rows import Layers, as_tensor
from regard.vit.maps.trace import passages, plain
from regard.vit.preprocess import Picture

Images = Tensor | Picture | Sequence[Picture]
NORMAL_MAD = 1.4826  # by this the median deviation of a normal distribution is its standard deviation


@dataclass(frozen=True)
class OutlierRule:
    """Which patches stand out of their image, in one layer.

    Attributes:
        cutoff: a length above which a patch is an outlier. The paper's 150 is for DINOv2-g; other models differ.
            None for the robust rule, which needs no number for each model.
        deviations: robust rule: so many robust deviations (1.4826 MAD) above the median of the image's patches,
        times: and longer than so many medians.
    """

    cutoff: float | None = None
    deviations: float = 8.0
    times: float = 3.0

    def __post_init__(self) -> None:
        for name in ("cutoff", "deviations", "times"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"OutlierRule.{name} is {value}; it must be above 0")

    def __call__(self, norms: Tensor) -> Tensor:
        """Norms of patches `(…, grid height, grid width)` to what stands out, bool of the same shape."""
        if self.cutoff is not None:
            return norms > self.cutoff
        flat = norms.flatten(-2)
        median = flat.median(-1, keepdim=True).values
        deviation = NORMAL_MAD * (flat - median).abs().median(-1, keepdim=True).values
        found = (flat - median > self.deviations * deviation) & (flat > self.times * median)
        return found.view(norms.shape)

    def __str__(self) -> str:
        if self.cutoff is not None:
            return f"longer than {self.cutoff:g}"
        return f"{self.deviations:g} robust deviations above the median and longer than {self.times:g} medians"


PAPER = OutlierRule(cutoff=150.0)
ROBUST = OutlierRule()


@dataclass(frozen=True, eq=False)
class TokenNorms(Report):
    """The length of every token of the residual stream after L layers, for B images.

    Attributes:
        cls: `(B, L)`, or None for a model without a class token.
        registers: `(B, L, R)`.
        patches: `(B, L, grid height, grid width)`.
        layers: the number of each layer.
    """

    cls: Tensor | None
    registers: Tensor
    patches: Tensor
    layers: tuple[int, ...]

    def medians(self) -> Tensor:
        """Median over the patches of each image and layer `(B, L)`."""
        return self.patches.flatten(-2).median(-1).values

    def peaks(self) -> Tensor:
        """Longest patch over the median one `(B, L)`: near 1 where nothing stands out."""
        return self.patches.flatten(-2).amax(-1) / self.medians()

    def __str__(self) -> str:
        header = ["layer", "median", "max", "max/median", *(["cls"] if self.cls is not None else [])]
        header += [f"reg{i}" for i in range(self.registers.shape[2])]
        medians, peaks = self.medians(), self.peaks()
        rows = []
        for i, layer in enumerate(self.layers):
            longest = self.patches[:, i].flatten(1).amax(1)
            row: list[object] = [layer, medians[:, i].mean(), longest.mean(), peaks[:, i].mean()]
            row += [self.cls[:, i].mean()] if self.cls is not None else []
            rows.append(row + list(self.registers[:, i].mean(0)))
        return f"Token norms, mean of {len(self.patches)} images\n{table(header, rows)}"


@torch.no_grad()
def token_norms(model: nn.Module, images: Images, layers: Layers = "all") -> TokenNorms:
    """The length of every token after the named layers, before the final norm; one forward pass.

    Raises InputError for a layer that does not exist.
    """
    vit = plain(model)
    wanted = vit.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    kept: dict[int, Tensor] = {}
    grid = (0, 0)
    for layer, (x, patches_grid) in enumerate(vit.layers(as_tensor(vit, images)), start=-1):
        grid = patches_grid
        if layer in wanted:
            kept[layer] = lengths(x)
        if layer == max(wanted):
            break
    cls, registers, patches = by_name(vit, torch.stack([kept[layer] for layer in wanted], dim=1), grid)
    return TokenNorms(cls, registers, patches, tuple(wanted))


def lengths(x: Tensor) -> Tensor:
    """`(…, D) -> (…)`, in fp32 or wider: the squares of an outlier leave the range of fp16."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=-1)


@dataclass(frozen=True, eq=False)
class OutlierReport(Report):
    """Which patches stand out, where, and what they do, for B images and L layers.

    Attributes:
        norms: the lengths it is judged by.
        rule: how.
        found: `(B, L, grid height, grid width)`, bool.
        fraction: share of the patches that stand out `(B, L)`.
        bimodality: Sarle's coefficient of the logarithms of the patches' norms `(B, L)`: 1/3 for a normal distribution,
            5/9 for a uniform one, 1 for two values, however rare one of them is.
        gap: the widest step between neighbours among the sorted norms above the median, as a ratio `(B, L)`.
        cosine: how alike the outliers are to their (up to 4) neighbours, right after the patch projection, before
            positions: mean cosine `(B, L)`; not a number where there is none.
        cosine_others: the same of all other patches.
        received: share of the attention on the outliers in the next layer, which reads this stream: mean over heads
            and queries `(B, L)`; not a number for the last layer. An even share would be `fraction`.
    """

    norms: TokenNorms
    rule: OutlierRule
    found: Tensor
    fraction: Tensor
    bimodality: Tensor
    gap: Tensor
    cosine: Tensor
    cosine_others: Tensor
    received: Tensor

    def positions(self, image: int, layer: int) -> list[tuple[int, int]]:
        """(row, column) of every outlier of an image, after the layer of this number, longest first."""
        if layer not in self.norms.layers:
            raise InputError(f"layer {layer} is not in this report; it has {list(self.norms.layers)}")
        index = self.norms.layers.index(layer)
        found, norms = self.found[image, index], self.norms.patches[image, index]
        order = torch.where(found, norms, -1).flatten().argsort(descending=True)[: int(found.sum())]
        return [divmod(place, found.shape[1]) for place in order.tolist()]

    def __str__(self) -> str:
        header = [
            "layer",
            "median",
            "max/median",
            "outliers",
            "share",
            "gap",
            "bimodality",
            "received",
            "alike",
            "others",
        ]
        medians, peaks = self.norms.medians().mean(0), self.norms.peaks().mean(0)
        rows = []
        for i, layer in enumerate(self.norms.layers):
            parts = (self.fraction, self.gap, self.bimodality, self.received, self.cosine, self.cosine_others)
            means = [part[:, i].nanmean() for part in parts]
            rows.append([layer, medians[i], peaks[i], int(self.found[:, i].sum()), *means])
        return f"Outlier patches of {len(self.found)} images: {self.rule}\n{table(header, rows)}"


@torch.no_grad()
def outlier_report(
    model: nn.Module, images: Images, layers: Layers = "all", *, rule: OutlierRule = ROBUST
) -> OutlierReport:
    """Find the outlier patches after each layer, and tell what is known to mark them (Darcet et al., 2024).

    Two forward passes; the attention is streamed. Raises InputError for a layer that does not exist.
    """
    vit = plain(model)
    images = as_tensor(vit, images)
    norms = token_norms(vit, images, layers)
    found = rule(norms.patches)
    alike = neighbour_cosine(vit.tokenizer(images)[0].transpose(1, 2).unflatten(2, norms.patches.shape[2:]))
    alike = alike[:, None].expand(found.shape)
    received = torch.full(found.shape[:2], torch.nan, device=found.device, dtype=norms.patches.dtype)
    readers = [layer + 1 for layer in norms.layers if layer + 1 < vit.config.depth]
    for passage in passages(vit, images, readers):
        patches = by_name(vit, columns(passage).received.mean(1), passage.grid)[2]
        for index, layer in enumerate(norms.layers):
            if layer == passage.layer - 1:
                received[:, index] = (patches * found[:, index]).sum((-2, -1))
    return OutlierReport(
        norms,
        rule,
        found,
        found.to(norms.patches.dtype).mean((-2, -1)),
        bimodality(norms.patches),
        widest_gap(norms.patches),
        mean_where(alike, found),
        mean_where(alike, ~found),
        received,
    )


def neighbour_cosine(patches: Tensor) -> Tensor:
    """Mean cosine of each patch with its neighbours above, below, left and right that exist.

    `(B, D, grid height, grid width) -> (B, grid height, grid width)`; a patch alone gets 0.
    """
    unit = F.normalize(patches.to(torch.promote_types(patches.dtype, torch.float32)), dim=1)
    down, right = (unit[:, :, 1:] * unit[:, :, :-1]).sum(1), (unit[..., 1:] * unit[..., :-1]).sum(1)
    total = F.pad(down, (0, 0, 0, 1)) + F.pad(down, (0, 0, 1, 0)) + F.pad(right, (0, 1)) + F.pad(right, (1, 0))
    one, other = torch.ones_like(down), torch.ones_like(right)
    count = F.pad(one, (0, 0, 0, 1)) + F.pad(one, (0, 0, 1, 0)) + F.pad(other, (0, 1)) + F.pad(other, (1, 0))
    return total / count.clamp_min(1)


def bimodality(norms: Tensor) -> Tensor:
    """Sarle's coefficient (skewness^2 + 1) / kurtosis of the logarithms: `(…, gh, gw) -> (…)`.

    Not a number where all are alike.
    """
    logs = norms.flatten(-2).double().clamp_min(1e-30).log()
    centred = logs - logs.mean(-1, keepdim=True)
    second, third, fourth = (centred.pow(power).mean(-1) for power in (2, 3, 4))
    alike = second <= 1e-24
    return ((third.square() / second**3 + 1) / (fourth / second**2)).masked_fill(alike, torch.nan).to(norms.dtype)


def widest_gap(norms: Tensor) -> Tensor:
    """The largest ratio of neighbours among the sorted norms from the median on: `(…, gh, gw) -> (…)`."""
    upper = norms.flatten(-2).sort(-1).values
    upper = upper[..., (upper.shape[-1] - 1) // 2 :]
    if upper.shape[-1] < 2:
        return torch.ones_like(upper[..., 0])
    return (upper[..., 1:] / upper[..., :-1].clamp_min(1e-30)).amax(-1)
