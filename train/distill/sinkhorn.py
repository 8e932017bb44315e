"""Sinkhorn-Knopp: teacher probabilities that use every prototype equally (Caron et al., 2020, arXiv:2006.09882)."""

import torch
from torch import Tensor

from regard.train.distill.loss import wide
from regard.train.distill.ranks import is_shared, largest, summed


@torch.no_grad()
def sinkhorn_knopp(logits: Tensor, tau: float, iterations: int = 3) -> Tensor:
    """`logits (N, K)` of this rank's N samples to probabilities `(N, K)`; ranks may hold different N, also 0.

    `Q = exp(logits / tau)`, then in turn each prototype gets the share 1/K of all samples on all ranks, and each sample
    sums to 1. The largest logit of all ranks is subtracted first, which changes nothing after the first normalisation
    and keeps exp from overflowing. A prototype too far below it for fp32 gets nothing.
    """
    z = wide(logits) / tau
    floor = torch.finfo(z.dtype).tiny
    top = z.max() if z.numel() else z.new_full((), -torch.inf)
    q = torch.exp(z - largest(top))
    count = summed(q.new_tensor(float(len(q)))) if is_shared() else float(len(q))
    q /= summed(q.sum()).clamp_min(floor)
    for _ in range(iterations):
        q /= summed(q.sum(dim=0)).clamp_min(floor) * q.shape[1]
        q /= q.sum(dim=1, keepdim=True).clamp_min(floor) * count
    return q * count
