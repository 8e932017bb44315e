"""The text encoder: self-attention among the words, cross-attention to the image, MLP, L times.

Q questions, T tokens, D width, H heads, K head width, B images, N image tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regard.crossattn.cross_attention import CrossAttention, Shares
from regard.vit.attention import Attention, KeysValues
from regard.vit.blocks import POSITION_STD, Mlp, initialise
from regard.vit.errors import InputError, check_choices
from regard.vit.pretrained.report import LoadReport


@dataclass(frozen=True)
class TextConfig:
    """A text encoder that can ask an image.

    Attributes:
        vocab_size: number of token ids.
        dim: width D.
        depth: number of layers.
        heads: attention heads, in self- and cross-attention alike.
        hidden_dim: inner width of the MLP; None means 4 * dim.
        max_tokens: longest question, in tokens.
        norm: `pre` (x + f(norm x)) or `post` (norm(x + f x), as in BERT).
        norm_eps: eps of every LayerNorm.
        activation: as in `ViTConfig`.
        cross_every: every n-th layer asks the image, the last layer among them.
        gate: tanh gates on the cross-attention that start at 0. A gated branch stands behind its norm whatever `norm`
            says, so that with a gate of 0 a pretrained text encoder gives its own numbers.
        qk_norm: LayerNorm on each head's queries and keys in the cross-attention.
        dropout: on the embeddings and on each residual branch, in training.
        pooling: how a question becomes one vector: `mean` over its tokens, or its `first` token.
    """

    vocab_size: int
    dim: int = 384
    depth: int = 6
    heads: int = 6
    hidden_dim: int | None = None
    max_tokens: int = 64
    norm: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-6
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    cross_every: int = 1
    gate: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    pooling: Literal["mean", "first"] = "mean"

    def __post_init__(self) -> None:
        check_choices(self, "norm", "activation", "pooling")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"TextConfig.dropout is {self.dropout}; it must lie in [0, 1)")
        if not self.norm_eps >= 0:
            raise InputError(f"TextConfig.norm_eps is {self.norm_eps}; it must be 0 or more")
        for name in ("vocab_size", "dim", "depth", "heads", "hidden_dim", "max_tokens", "cross_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"TextConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.dim % self.heads:
            raise InputError(f"TextConfig.dim {self.dim} is no multiple of heads {self.heads}")
        if self.cross_every > self.depth:
            raise InputError(
                f"TextConfig.cross_every {self.cross_every} exceeds depth {self.depth}: no layer would look"
            )

    def asks(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has cross-attention."""
        return (self.depth - 1 - layer) % self.cross_every == 0


class Cache:
    """Keys and values of the tokens a causal reader has read, per layer `(R, H, t, K)`; every pass extends them."""

    def __init__(self) -> None:
        self._layers: dict[int, KeysValues] = {}

    def __len__(self) -> int:
        """Tokens read so far."""
        return self._layers[0].k.shape[2] if self._layers else 0

    def extend(self, layer: int, new: KeysValues) -> KeysValues:
        """All keys and values of a layer, the new ones last."""
        old = self._layers.get(layer)
        self._layers[layer] = new if old is None else old.extend(new)
        return self._layers[layer]

    def choose(self, rows: Tensor) -> None:
        """Go on with these rows `(R',)` of the R, in this order; a row may be chosen more than once."""
        self._layers = {layer: kv[rows] for layer, kv in self._layers.items()}


class TextLayer(nn.Module):
    """Self-attention -> cross-attention -> MLP, each a residual branch with its norm."""

    def __init__(self, config: TextConfig, context_dim: int, asks: bool):
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.post = config.norm == "post"
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, config.heads)
        self.norm2 = nn.LayerNorm(dim, eps=eps) if asks else None
        self.cross = (
            CrossAttention(dim, config.heads, context_dim, qk_norm=config.qk_norm, gate=config.gate) if asks else None
        )
        self.norm3 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, config.hidden_dim or 4 * dim, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        words: Tensor | None,
        image: KeysValues | None = None,
        visible: Tensor | None = None,
        of: Shares = None,
        asked: list[Tensor] | None = None,
        grow: Callable[[KeysValues], KeysValues] | None = None,
    ) -> Tensor:
        x = self.add(x, self.norm1, lambda y: self._read(y, words, grow))
        if (cross := self.cross) is not None and image is not None:
            x = self.add_looked(x, lambda y: cross(y, image, mask=visible, of=of, asked=asked), visible, of)
        return self.add(x, self.norm3, self.mlp)

    def _read(self, y: Tensor, words: Tensor | None, grow: Callable[[KeysValues], KeysValues] | None) -> Tensor:
        return self.attn(y, None if grow is None else grow(self.attn.remember(y)), mask=words)

    def add(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """`x` with a residual branch and its norm."""
        if self.post:
            return norm(x + self.dropout(branch(x)))
        return x + self.dropout(branch(norm(x)))

    def add_looked(
        self, x: Tensor, look: Callable[[Tensor], Tensor], visible: Tensor | None = None, of: Shares = None
    ) -> Tensor:
        """`x` with the cross-attention `look`; a row that sees nothing stays as it is, its norm included."""
        assert self.cross is not None
        assert self.norm2 is not None
        if not self.post or self.cross.gate is not None:
            return x + self.dropout(look(self.norm2(x)))
        looked = self.norm2(x + self.dropout(look(x)))
        if visible is None:
            return looked
        sees = visible.any(dim=1)
        if of is None:
            sees = sees.repeat_interleave(len(x) // len(sees))
        else:
            sees = sees[of] if isinstance(of, Tensor) else sees.repeat_interleave(torch.tensor(of, device=x.device))
        return torch.where(sees[:, None, None], looked, x)


class TextEncoder(nn.Module):
    """Token ids `(Q, T)` to states `(Q, T, D)`, reading an image on the way."""

    def __init__(self, config: TextConfig, context_dim: int):
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Parameter(torch.empty(config.max_tokens, config.dim))
        self.layers = nn.ModuleList(TextLayer(config, context_dim, config.asks(i)) for i in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.report: LoadReport | None = None  # where the weights came from

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        images: tuple[KeysValues, ...] = (),
        visible: Tensor | None = None,
        of: Shares = None,
        asked: list[Tensor] | None = None,
        *,
        places: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Read questions against remembered images.

        Args:
            ids: `(Q, T)`.
            mask: which tokens may be read, bool: `(Q, T)`, True on real tokens, or `(Q or 1, T, N)`, for each token by
                itself, N counting those in the cache first; None for all.
            images: keys and values per layer that asks, of B images; empty to read text alone.
            visible: which image tokens exist, bool `(B, N)`, or None for all.
            of: which image each question asks; see `CrossAttention`.
            asked: receives the cross-attention queries of each asking layer, for maps.
            places: each token's place in its text, `(T,)`; by default they stand in order behind those in the cache.
            cache: what was read before; it is extended.
        """
        if places is None:
            start = 0 if cache is None else len(cache)
            at = self.positions[start : start + ids.shape[1]]
        else:
            at = self.positions[places]
        x = self.words(ids) + at
        # BERT norms its embeddings; a pre-norm encoder norms its output. It is the same LayerNorm, moved.
        x = self.dropout(self.norm(x) if self.config.norm == "post" else x)
        words = mask if mask is None else mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        remembered = iter(images)
        for number, layer in enumerate(self.layers):
            image = next(remembered) if images and layer.cross is not None else None
            grow = None if cache is None else functools.partial(cache.extend, number)
            x = layer(x, words, image, visible, of, asked, grow)
        return x if self.config.norm == "post" else self.norm(x)

    def remember(self, context: Tensor) -> tuple[KeysValues, ...]:
        """Project what is to be asked, `(B, N, context_dim)`, once per layer that asks."""
        return tuple(cross.remember(context) for cross in self.asking)

    def reset_parameters(self) -> None:
        """Initialise every weight as the ViT does; words stand out from their positions."""
        initialise(self)
        nn.init.normal_(self.words.weight, std=0.5)
        nn.init.trunc_normal_(self.positions, std=POSITION_STD)

    @property
    def asking(self) -> list[CrossAttention]:
        """The cross-attention of each layer that asks the image, in order."""
        return [layer.cross for layer in self.layers if isinstance(layer, TextLayer) and layer.cross is not None]

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """One vector per question, `(Q, T, D) -> (Q, D)`; padding takes no part."""
        if self.config.pooling == "first":
            return states[:, 0]
        weight = mask.to(states.dtype)[..., None]
        return (states * weight).sum(dim=1) / weight.sum(dim=1)
