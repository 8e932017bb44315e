"""The projection head between a backbone's features and the K prototypes (Caron et al., 2021, arXiv:2104.14294)."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from regard.train.distill.loss import wide

LAST_LAYER = "last_layer"
_STD = 0.02


class ProjectionHead(nn.Module):
    """Features `(…, D)` to logits `(…, K)`: an MLP to a bottleneck, L2 normalisation, a weight-normed linear layer.

    Linear, GELU, Linear, GELU, Linear; the last layer has no bias, and its rows have the norms g, which start at 1.
    With `fixed_norm` they stay 1, and a logit is a cosine in [-1, 1]; without, they are trained.

    Args:
        dim: D.
        prototypes: K.
        hidden: inner width of the MLP.
        bottleneck: width of what is normalised.
        fixed_norm: whether the norms of the last layer's rows stay 1.
    """

    def __init__(
        self, dim: int, prototypes: int, hidden: int = 2048, bottleneck: int = 256, *, fixed_norm: bool = True
    ):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=_STD)
                nn.init.zeros_(layer.bias)
        self.last_layer = weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        norms = self.norms
        with torch.no_grad():
            nn.init.trunc_normal_(self.directions, std=_STD)
            norms.fill_(1.0)
        norms.requires_grad_(not fixed_norm)

    @property
    def norms(self) -> nn.Parameter:
        """g, the norms of the last layer's rows, `(K, 1)`."""
        return cast(nn.Parameter, self.last_layer.parametrizations.weight.original0)

    @property
    def directions(self) -> nn.Parameter:
        """v, which the last layer's rows point along, `(K, bottleneck)`."""
        return cast(nn.Parameter, self.last_layer.parametrizations.weight.original1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(wide(self.mlp(x)), dim=-1, eps=1e-12))
