"""KoLeo: features of a batch keep their distance (Sablayrolles et al., 2019, arXiv:1806.03198)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.train.distill.loss import wide

_EPS = 1e-8


def koleo_loss(features: Tensor) -> Tensor:
    """`-mean_i log(min_{j != i} ||x_i - x_j|| + 1e-8)` of the L2-normalised rows of `features (N, D)`, N at least 2.

    Neighbours are looked for in this rank's batch alone, and within one crop, as DINOv2 does. In fp32 or wider.
    """
    with torch.autocast(features.device.type, enabled=False):
        x = F.normalize(wide(features), dim=-1, eps=_EPS)
        with torch.no_grad():
            likeness = x @ x.T
            likeness.fill_diagonal_(-2.0)
            nearest = likeness.argmax(dim=1)
        return -torch.log((x - x[nearest]).norm(dim=1) + _EPS).mean()
