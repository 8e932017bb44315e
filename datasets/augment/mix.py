"""mixup and CutMix: each picture of a batch takes something of its partner, and so does its label.

Zhang et al., 2018 (arXiv:1710.09412) and Yun et al., 2019 (arXiv:1905.04899), as in timm: one draw per batch, partners
by turning the batch's order round.
"""

import math

import numpy as np
import torch
from torch import Tensor

from regard.datasets.augment.dice import Dice
from regard.vit.errors import InputError


def mix(
    pixels: Tensor,
    labels: Tensor,
    dice: Dice,
    *,
    classes: int,
    mixup_alpha: float = 0.8,
    cutmix_alpha: float = 1.0,
    probability: float = 1.0,
    switch: float = 0.5,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself in reverse order.

    The share lambda that a picture keeps is drawn on the host from Beta(alpha, alpha), by a generator seeded with the
    dice of the batch's first sample: a resumed run repeats it, and no device is waited for. In a batch of odd size the
    middle picture meets itself and stays as it is; so does the picture of a batch of one, with its label.

    Args:
        pixels: float `(B, C, height, width)`, on any device.
        labels: int64 `(B,)` on the same device; -1 (unlabelled) gives no target.
        dice: the random numbers of the batch.
        classes: how many there are.
        mixup_alpha, cutmix_alpha: of the Beta distributions; 0 turns one off.
        probability: of a batch to be mixed at all.
        switch: of a mixed batch to be cut, where both are on.
        smoothing: of the labels, spread evenly over all classes.

    Returns:
        The pixels mixed, `pixels` itself where nothing is; and targets, float32 `(B, classes)`. A row sums to 1, or to
        the share of its labelled part.

    Raises:
        InputError: for settings out of their range.
    """
    _check(mixup_alpha, cutmix_alpha, probability, switch, smoothing)
    keep, box = _draw(dice, pixels.shape[-2:], mixup_alpha, cutmix_alpha, probability, switch)
    targets = soft_targets(labels, classes, smoothing)
    if keep == 1:
        return pixels, targets
    if box is None:
        pixels = pixels.lerp(pixels.flip(0), 1 - keep)
    else:
        top, bottom, left, right = box
        partners = pixels[:, :, top:bottom, left:right].flip(0)
        pixels = pixels.clone()
        pixels[:, :, top:bottom, left:right] = partners
    return pixels, targets.lerp(targets.flip(0), 1 - keep)


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Labels `(B,)` as rows of `classes` shares, float32, smoothed as in Szegedy et al., 2016; -1 gives zeros."""
    known = (labels >= 0)[:, None]
    rest = smoothing / classes
    targets = torch.full((len(labels), classes), rest, device=labels.device)
    targets.scatter_(1, labels.clamp(min=0)[:, None], 1 - smoothing + rest)
    return targets * known


def _draw(
    dice: Dice,
    size: torch.Size,
    mixup_alpha: float,
    cutmix_alpha: float,
    probability: float,
    switch: float,
) -> tuple[float, tuple[int, int, int, int] | None]:
    """(lambda, box): how much a picture keeps of itself, and what is cut: top, bottom, left, right."""
    if not len(dice) or not (mixup_alpha or cutmix_alpha):
        return 1.0, None
    generator = np.random.default_rng(dice.rows(torch.tensor([0])).levels("mix", 16)[0].tolist())
    if generator.random() >= probability:
        return 1.0, None
    cut = bool(cutmix_alpha) and (not mixup_alpha or generator.random() < switch)
    alpha = cutmix_alpha if cut else mixup_alpha
    keep = float(generator.beta(alpha, alpha))
    if not cut:
        return keep, None
    height, width = size
    side = math.sqrt(1 - keep)
    tall, wide = int(height * side), int(width * side)
    middle_y, middle_x = int(generator.integers(height)), int(generator.integers(width))
    top, bottom = max(0, middle_y - tall // 2), min(height, middle_y + (tall + 1) // 2)
    left, right = max(0, middle_x - wide // 2), min(width, middle_x + (wide + 1) // 2)
    # The box may reach beyond the picture: what was really cut counts.
    return 1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right)


def _check(mixup_alpha: float, cutmix_alpha: float, probability: float, switch: float, smoothing: float) -> None:
    for name, value, most in (
        ("mixup_alpha", mixup_alpha, math.inf),
        ("cutmix_alpha", cutmix_alpha, math.inf),
        ("probability", probability, 1.0),
        ("switch", switch, 1.0),
        ("smoothing", smoothing, 1.0),
    ):
        if not 0 <= value <= most or math.isinf(value):
            bound = "at least 0" if math.isinf(most) else "in 0 … 1"
            raise InputError(f"mix: {name} is {value}; it must be {bound}")
