"""One vector per image: the class token, the mean of the patches, both, or a learned query that asks the patches."""

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention
from regard.vit.blocks import Mlp
from regard.vit.config import ViTConfig
from regard.vit.tokens import Tokens


class Pool(nn.Module):
    """`Tokens -> (B, width)`: D, or 2 D for `cls+mean`. Registers never take part."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.kind = config.pooling
        self.width = config.dim * (2 if self.kind == "cls+mean" else 1)
        self.asker = AttentionPool(config) if self.kind == "map" else None
        pooled = config.norm_place == "pooled"
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if pooled else nn.Identity()

    def forward(self, tokens: Tokens) -> Tensor:
        return self.norm(self._pooled(tokens))

    def _pooled(self, tokens: Tokens) -> Tensor:
        if self.asker is not None:
            return self.asker(tokens.patches)
        if self.kind == "mean":
            return tokens.patches.mean(dim=1)
        assert tokens.cls is not None  # the configuration asked for it
        if self.kind == "cls":
            return tokens.cls
        return torch.cat((tokens.cls, tokens.patches.mean(dim=1)), dim=-1)


class AttentionPool(nn.Module):
    """Multi-head attention pooling, `(B, N, D) -> (B, D)`, as in SigLIP (Zhai et al., 2023, arXiv:2303.15343)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(config.dim))
        self.attn = Attention(config.dim, config.heads, head_dim=config.head_dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = Mlp(config.dim, config.hidden_dim or 4 * config.dim, config.activation)

    def forward(self, patches: Tensor) -> Tensor:
        query = self.latent.expand(patches.shape[0], 1, -1)
        x = self.attn(query, patches)
        return (x + self.mlp(self.norm(x)))[:, 0]
