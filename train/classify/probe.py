"""A linear classifier on frozen features, trained with many learning rates at once on features computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.train.sampling import mix
from regard.vit.errors import InputError

RATES = tuple(round(base * 10.0**power, 8) for power in range(-4, 2) for base in (1.0, 3.0))
"""Learning rates tried by default, 1e-4 to 30, for features of mean 0 and standard deviation 1."""

_MOMENTUM = 0.9


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features `(N, W)`, and how it was chosen.

    Attributes:
        head: the classifier; it takes the features as they are.
        lr: the learning rate that was best on the held-out features.
        held_out_accuracy: of that one, on these.
        tried: held-out accuracy by learning rate.
    """

    head: nn.Linear
    lr: float
    held_out_accuracy: float
    tried: dict[float, float]


def train_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    rates: Sequence[float] = RATES,
    epochs: int = 30,
    batch: int = 1024,
    weight_decay: float = 0.0,
    held_out: float = 0.1,
    seed: int = 0,
) -> Probe:
    """Train one linear classifier per learning rate, side by side on the same batches; held-out features choose.

    `features (N, W)` with `labels (N,)` are split once, `held_out` of each class aside; what is chosen was trained on
    the rest. SGD with momentum 0.9 and a cosine to 0 from zero weights, on features shifted and scaled to mean 0 and
    standard deviation 1 (of the training part), which the head that is returned undoes. (Many rates on one pass of
    features: Oquab et al., 2023, arXiv:2304.07193.) Everything is float32, on the device of `features`.

    Raises InputError for features and labels that do not fit, fewer than two classes in the labels, and too few of them
    to hold any out.
    """
    if features.dim() != 2 or labels.shape != features.shape[:1]:
        raise InputError(f"features (N, W) and labels (N,) do not fit: {tuple(features.shape)}, {tuple(labels.shape)}")
    if not rates or min(rates) <= 0:
        raise InputError("rates must be learning rates above 0, at least one")
    if not 0 < held_out < 1:
        raise InputError(f"held_out is {held_out}; it must lie between 0 and 1")
    labels = labels.to(features.device)
    training, aside = _split(labels, held_out, seed)
    x, y = features[training].float(), labels[training]
    mean, spread = x.mean(dim=0), x.std(dim=0, unbiased=False).clamp(min=1e-6)
    weight, bias = _trained((x - mean) / spread, y, classes, rates, epochs, batch, weight_decay, seed)
    # (x - mean) / spread @ W + b, as a head on x
    weight = weight / spread[None, :, None]
    bias = bias - torch.einsum("w,rwc->rc", mean, weight)
    scores, losses = _scored(weight, bias, features, labels, aside)
    # Few held-out features tie often; of equal scores the surest is taken.
    best = max(range(len(rates)), key=lambda number: (float(scores[number]), -float(losses[number])))
    head = nn.Linear(x.shape[1], classes, device=x.device)
    with torch.no_grad():
        head.weight.copy_(weight[best].T)
        head.bias.copy_(bias[best])
    tried = {float(rate): float(score) for rate, score in zip(rates, scores, strict=True)}
    return Probe(head.requires_grad_(False), float(rates[best]), float(scores[best]), tried)


@torch.no_grad()
def _trained(
    x: Tensor,
    y: Tensor,
    classes: int,
    rates: Sequence[float],
    epochs: int,
    batch: int,
    weight_decay: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Weights `(R, W, C)` and biases `(R, C)`: the gradient of each is its own, so one step moves them all."""
    device, count = x.device, len(x)
    x = torch.cat((x, torch.ones(count, 1, device=device)), dim=1)  # the bias is the weight of a feature of 1
    weight = torch.zeros(len(rates), x.shape[1], classes, device=device)
    pace = torch.zeros_like(weight)
    lr = torch.tensor(list(rates), dtype=torch.float32, device=device)[:, None, None]
    targets = functional.one_hot(y, classes).float()
    per_epoch = max(1, count // batch)
    cosine = torch.linspace(0, torch.pi, epochs * per_epoch + 1).cos().add(1).div(2).tolist()
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(mix(seed, epoch))).to(device)
        for number in range(per_epoch):
            rows = order[number * batch : (number + 1) * batch]
            seen = x[rows]
            chances = torch.einsum("bw,rwc->rbc", seen, weight).softmax(dim=2)
            gradient = torch.einsum("bw,rbc->rwc", seen, chances - targets[rows]) / len(rows)
            if weight_decay:
                gradient[:, :-1] += weight_decay * weight[:, :-1]
            pace.mul_(_MOMENTUM).add_(gradient)
            weight -= cosine[epoch * per_epoch + number] * lr * pace
    return weight[:, :-1], weight[:, -1]


def _scored(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy and loss `(R,)` of each head on these rows, a block of them at a time."""
    right = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    loss = torch.zeros_like(right)
    for some in rows.split(1024):
        logits = torch.einsum("nw,rwc->rnc", features[some].float(), weight) + bias[:, None]
        truth = labels[some].expand(len(weight), -1)
        right += (logits.argmax(dim=2) == truth).sum(dim=1)
        loss += functional.cross_entropy(logits.transpose(1, 2), truth, reduction="none").sum(dim=1)
    return right / len(rows), loss / len(rows)


def _split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    held = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    kinds = labels.unique().tolist()
    if len(kinds) < 2:
        raise InputError(f"a linear probe needs two classes at least; the labels hold {len(kinds)}")
    for kind in kinds:
        own = order[labels[order] == kind]
        held[own[: min(max(round(share * len(own)), 1), len(own) - 1)]] = True
    if not held.any():
        raise InputError("no class has two pictures, so that one could be held out; add pictures")
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]
