"""iBOT: the student guesses the teacher's view of patches it does not see (Zhou et al., 2022, arXiv:2111.07832).

Masks are blocks as in BEiT (Bao et al., 2022, arXiv:2106.08254); how many crops are masked, and by how much, is as in
DINOv2 (Oquab et al., 2023, arXiv:2304.07193): half of them, by ratios that are spread evenly over the batch.
Masks are made on the host, in numpy: no device is waited for.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.train.distill.loss import soft_cross_entropy

_TRIES = 10


@dataclass(frozen=True)
class MaskPlan:
    """Which global crops are masked and by how much.

    Attributes:
        share: of the global crops of a batch that are masked at all.
        ratios: lowest and highest share of masked patches in one of them.
        least: patches of the smallest block.
        aspect: lowest height / width of a block; the highest is its inverse.
        most: largest share of the patches that one block covers.
    """

    share: float = 0.5
    ratios: tuple[float, float] = (0.1, 0.5)
    least: int = 4
    aspect: float = 0.3
    most: float = 0.5


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of a batch of crops with N patches each.

    Attributes:
        masked: bool `(crops, N)`, True where the student sees the mask token.
        places: of the M masked patches among all, int64 `(M,)`.
        weights: of each in the loss, 1 / (masked patches of its crop), `(M,)`.
    """

    masked: Tensor
    places: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "Masks":
        """The same on another device."""
        return Masks(*(tensor.to(device, non_blocking=True) for tensor in vars(self).values()))


def draw_masks(crops: int, grid: tuple[int, int], plan: MaskPlan, dice: random.Random) -> Masks:
    """Masks for a batch of crops with patches on a `grid` (height, width).

    Exactly `int(crops * share)` crops are masked. The ratios are cut into as many equal bins, and each crop draws from
    one of its own, so every batch has nearly the same mean; which crop gets which bin is random. A masked crop has at
    least one masked patch.
    """
    count = int(crops * plan.share)
    low, high = plan.ratios
    patches = grid[0] * grid[1]
    masked = np.zeros((crops, patches), dtype=bool)
    for place, row in enumerate(dice.sample(range(crops), count)):
        ratio = low + (high - low) * (place + dice.random()) / count
        masked[row] = block_mask(grid, max(1, int(patches * ratio)), plan, dice).ravel()
    weights = (masked / np.maximum(masked.sum(axis=1, keepdims=True), 1))[masked].astype(np.float32)
    return Masks(*(torch.from_numpy(array) for array in (masked, np.flatnonzero(masked), weights)))


def block_mask(grid: tuple[int, int], wanted: int, plan: MaskPlan, dice: random.Random) -> np.ndarray:
    """A mask of 1 to `wanted` patches made of overlapping rectangles: bool `(grid height, grid width)`."""
    mask = np.zeros(grid, dtype=bool)
    masked = 0
    while masked < wanted:
        room = min(wanted - masked, max(1, int(plan.most * mask.size)))
        added = _add_block(mask, room, plan, dice)
        if not added:
            break
        masked += added
    if not masked:
        mask.flat[dice.randrange(mask.size)] = True
    return mask


def _add_block(mask: np.ndarray, room: int, plan: MaskPlan, dice: random.Random) -> int:
    """Mask one more rectangle that adds 1 to `room` patches; how many it added, 0 where none was found."""
    height, width = mask.shape
    bound = abs(math.log(plan.aspect))
    for _ in range(_TRIES):
        area = dice.uniform(min(plan.least, room), room)
        aspect = math.exp(dice.uniform(-bound, bound))
        tall, broad = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if not (0 < tall < height and 0 < broad < width):
            continue
        top, left = dice.randrange(height - tall + 1), dice.randrange(width - broad + 1)
        block = mask[top : top + tall, left : left + broad]
        new = tall * broad - int(block.sum())
        if 0 < new <= room:
            block[:] = True
            return new
    return 0


def ibot_loss(student: Tensor, q: Tensor, masks: Masks, tau: float = 0.1) -> Tensor:
    """Mean over the crops of the mean cross-entropy at each one's masked patches; crops without any count as 0.

    `student (M, K)` logits and `q (M, K)` teacher probabilities of the masked patches, in the order of `masks.places`.
    """
    return (soft_cross_entropy(student, q, tau) * masks.weights).sum() / len(masks.masked)
