"""The practical parts around attention: MLP, residuals with LayerScale and stochastic depth, the block."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit import fused
from regard.vit.attention import Attention, KeysValues, Rotary
from regard.vit.config import ViTConfig

# Beside Xavier-initialised patch and word tokens, whose entries are near 1, the usual 0.02 would start almost unseen.
POSITION_STD = 0.3


def initialise(module: nn.Module) -> None:
    """Xavier for every Linear inside, whatever its width (Glorot and Bengio, 2010), biases 0, norms as they begin."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, (nn.LayerNorm, LayerScale)):
            part.reset_parameters()
        elif isinstance(part, Attention) and part.sink is not None:
            nn.init.zeros_(part.sink)


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the approximation OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
}


class Mlp(nn.Module):
    """Two linear layers around an activation, `(…, D) -> (…, D)`; `swiglu` gates the inner layer with a third.

    `norm_eps` puts a LayerNorm on the inner layer (sub-LN); None for none.
    """

    def __init__(self, dim: int, hidden_dim: int, activation: str = "gelu", norm_eps: float | None = None):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.gate = nn.Linear(dim, hidden_dim) if activation == "swiglu" else None
        self.act = nn.Identity() if activation == "swiglu" else _ACTIVATIONS[activation]()
        self.norm = nn.Identity() if norm_eps is None else nn.LayerNorm(hidden_dim, eps=norm_eps)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return fused.linear(self.inner(x), self.fc2)

    def inner(self, x: Tensor) -> Tensor:
        """What the last linear layer is given, `(…, hidden)`."""
        if self.gate is not None:
            return self.norm(F.silu(self.gate(x)) * self.fc1(x))
        plain = fused.is_bare(self.act, nn.GELU) and fused.is_plain_linear(self.fc1, x)
        if plain and fused.pays_with(x, self.fc1.weight):
            return self.norm(fused.linear_gelu(x, self.fc1, cast(nn.GELU, self.act)))
        return self.norm(self.act(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (Touvron et al., 2021, arXiv:2103.17239)."""

    def __init__(self, dim: int, initial: float):
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drop the residual branch of a sample with probability `rate`.

    With `subset` a block computes a branch only for the samples that keep it, the share 1 - `rate` of the batch rounded
    down (Oquab et al., 2023, arXiv:2304.07193, section 5); `forward` throws away what was computed for the others.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.subset = False

    @property
    def leaves_out(self) -> bool:
        """Whether branches are to be added by `add`."""
        return self.subset and self.training and self.rate > 0

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """`x (B, …)`, plus `branch` of a random subset of its samples where they are, scaled up to the whole's mean."""
        batch = x.shape[0]
        kept = max(int(batch * (1 - self.rate)), 1)
        rows = torch.randperm(batch, device=x.device)[:kept]
        added = branch(x.index_select(0, rows)) * (batch / kept)
        return x.index_add(0, rows, added.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """One pre-norm transformer block, `(B, N, D) -> (B, N, D)`."""

    def __init__(self, config: ViTConfig, drop_path: float):
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(
            dim,
            config.heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            key_bias=config.key_bias,
            qk_norm=config.qk_norm,
            out_norm=config.attn_norm,
            sink=config.sink,
            norm_eps=eps,
        )
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, config.hidden_dim or 4 * dim, config.activation, eps if config.mlp_norm else None)
        self.scaled = scaled = config.layer_scale is not None
        self.scale1 = LayerScale(dim, config.layer_scale or 0.0) if scaled else nn.Identity()
        self.scale2 = LayerScale(dim, config.layer_scale or 0.0) if scaled else nn.Identity()
        self.drop_path = DropPath(drop_path)
        self.edit: Callable[[Tensor], Tensor] | None = None  # what an experiment does to the stream that leaves

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        if self._fuses(x):
            z = self.attn.join(*self.attn.project(self.norm1(x), rotary=rotary))
            x = self._add(x, z, self.attn.out, self.scale1)
            return self._edited(self._add(x, self.mlp.inner(self.norm2(x)), self.mlp.fc2, self.scale2))
        x = self._plus(x, lambda x: self.scale1(self.attn(self.norm1(x), rotary=rotary)))
        return self._edited(self._plus(x, lambda x: self.scale2(self.mlp(self.norm2(x)))))

    def finish(self, x: Tensor, z: Tensor, kv: KeysValues) -> Tensor:
        """The rest of the block, once its heads have put out `z (B, H, N, K)` for the stream `x (B, N, D)`."""
        attended = self.attn.joined(z, kv)
        if self._fuses(x):
            x = self._add(x, attended, self.attn.out, self.scale1)
            return self._edited(self._add(x, self.mlp.inner(self.norm2(x)), self.mlp.fc2, self.scale2))
        x = x + self.drop_path(self.scale1(self.attn.out(attended)))
        return self._edited(x + self.drop_path(self.scale2(self.mlp(self.norm2(x)))))

    def _plus(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        drop_path = self.drop_path
        if isinstance(drop_path, DropPath) and drop_path.leaves_out:
            return drop_path.add(x, branch)
        return x + drop_path(branch(x))

    def _edited(self, x: Tensor) -> Tensor:
        return x if self.edit is None else self.edit(x)

    def _fuses(self, x: Tensor) -> bool:
        """Whether the residual sums can be made on the way, with no module skipped that does more than it says."""
        parts: dict[str, Any] = self._modules
        scale = LayerScale if self.scaled else nn.Identity
        attn, mlp, drop_path = parts["attn"], parts["mlp"], parts["drop_path"]
        return (
            fused.pays(x)
            and fused.is_bare(attn, Attention)
            and fused.is_bare(mlp, Mlp)
            and fused.is_bare(drop_path, DropPath)
            and not (drop_path.training and drop_path.rate)
            and fused.is_bare(parts["scale1"], scale)
            and fused.is_bare(parts["scale2"], scale)
            and fused.is_plain_linear(attn._modules["out"], x)
            and fused.is_plain_linear(mlp._modules["fc2"], x)
        )

    @staticmethod
    def _add(x: Tensor, z: Tensor, layer: nn.Linear, scale: nn.Module) -> Tensor:
        if isinstance(scale, LayerScale):
            return torch.addcmul(x, fused.linear(z, layer), scale.gamma)
        return fused.add_linear(x, z, layer)
