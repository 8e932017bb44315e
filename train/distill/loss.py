"""DINO's loss and the centre of its teacher (Caron et al., 2021, arXiv:2104.14294).

S student crops = 2 globals + V locals, T = 2 teacher crops, B images, K prototypes.
Everything here is in fp32 or wider, whatever autocast makes of the layers before it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.distill.ranks import summed


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _SoftCrossEntropy(torch.autograd.Function):
    """`teachers * logsumexp(z) - <q, z>` per row, z = logits / tau: no log-softmax is ever kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, q: Tensor, tau: float, teachers: int) -> Tensor:
        z = wide(logits) / tau
        lse = torch.logsumexp(z, dim=-1)
        ctx.save_for_backward(logits, q, lse)
        ctx.tau, ctx.teachers = tau, teachers
        return lse * teachers - z.mul_(q).sum(dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, q, lse = ctx.saved_tensors
        z = wide(logits) / ctx.tau
        z.sub_(lse[..., None]).exp_()
        z = z.mul_(ctx.teachers).sub_(q) if ctx.teachers != 1 else z.sub_(q)
        return z.mul_((grads[0] / ctx.tau)[..., None]).to(logits.dtype), None, None, None


def soft_cross_entropy(logits: Tensor, q: Tensor, tau: float, teachers: int = 1) -> Tensor:
    """`-sum_k q_k log softmax(logits / tau)_k` of each row: `(…, K), (…, K) -> (…)`, with gradients for the logits.

    Each row of `q` sums to `teachers`: the cross-entropies with several teachers are had at once, from their sum.
    Uses `CE = logsumexp(z) - <q, z>`, which holds because a row's sum is known.
    """
    return _SoftCrossEntropy.apply(logits, q, tau, teachers)


@dataclass(frozen=True, eq=False)
class DinoLoss:
    """The loss () and its parts: mean cross-entropy of the global pairs and of the local ones (0 without locals)."""

    total: Tensor
    globals: Tensor
    locals: Tensor


def dino_loss(student: Tensor, q: Tensor, tau: float = 0.1) -> DinoLoss:
    """The mean over all pairs of a student crop with the teacher of another crop, and over the batch.

    `student (S, B, K)` logits, the globals first, and `q (2, B, K)`, the teacher's probabilities of the two globals:
    `1 / (2 S - 2) * sum_t sum_{s != t} mean_b -sum_k q_tbk log softmax(student_sbk / tau)`.
    """
    crops = student.unbind(0)
    # The teacher of a global crop is the other global's: no crop is compared with itself.
    near = torch.stack([soft_cross_entropy(crops[s], q[1 - s], tau).mean() for s in range(2)]).sum()
    far = near.new_zeros(())
    if len(crops) > 2:
        both = q.sum(dim=0)
        far = torch.stack([soft_cross_entropy(crop, both, tau, teachers=2).mean() for crop in crops[2:]]).sum()
    pairs = 2 * len(crops) - 2
    return DinoLoss((near + far) / pairs, near.detach() / 2, far.detach() / max(pairs - 2, 1))


class Centre(nn.Module):
    """The moving mean of the teacher's logits, which is subtracted from them against collapse to one prototype.

    `add` collects the logits of every batch of an optimizer step, which all see the same centre; `move`, after the
    step, takes their mean over all batches and ranks: `c <- m c + (1 - m) mean`. The centre is a buffer `(1, K)`,
    so it is in the checkpoint; the collected sum is not, for a checkpoint is taken between steps.
    """

    centre: Tensor

    def __init__(self, prototypes: int, momentum: float = 0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("centre", torch.zeros(1, prototypes))
        # No buffer: DistributedDataParallel would replace it by the first rank's between two accumulated batches.
        self._collected: Tensor | None = None

    def forward(self, logits: Tensor, tau: float) -> Tensor:
        """The teacher's probabilities `softmax((logits - c) / tau)`, `(…, K)`."""
        return torch.softmax((wide(logits) - self.centre) / tau, dim=-1)

    @torch.no_grad()
    def add(self, logits: Tensor) -> None:
        """Collect `logits (…, K)` for the next move."""
        rows = wide(logits).flatten(0, -2)
        new = torch.cat((rows.sum(dim=0), rows.new_full((1,), rows.shape[0])))
        self._collected = new if self._collected is None else self._collected + new

    @torch.no_grad()
    def move(self) -> None:
        """Move the centre once, by all that was collected on all ranks."""
        if self._collected is None:
            return
        collected, self._collected = summed(self._collected), None
        mean = collected[:-1] / collected[-1].clamp_min(1.0)
        # Where no row was collected on any rank, there is nothing to move towards.
        step = (1.0 - self.momentum) * (collected[-1] > 0)
        self.centre += ((mean - self.centre) * step).to(self.centre.dtype)
