"""Cross-attention: words ask, patches answer.

Queries come from one modality, keys and values from another. What the patches offer is projected once
(`remember`); then any number of queries read it.
"""

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, KeysValues


class CrossAttention(nn.Module):
    """Queries `x (Q, T, D)` read a context `(B, N, context_dim)`; returns what to add to `x`, `(Q, T, D)`.

    Args:
        dim: width D of the asking tokens.
        heads: number of heads.
        context_dim: width of the tokens that are asked.
        head_dim: width of a head; default `dim // heads`.
        qk_norm: LayerNorm over each head's query and key.
        gate: multiply the output by tanh(g), g a learned number that starts at 0, so that a pretrained text
            encoder starts unharmed (Flamingo, Alayrac et al., 2022, arXiv:2204.14198).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        context_dim: int,
        *,
        head_dim: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
    ):
        super().__init__()
        self.attn = Attention(dim, heads, head_dim=head_dim, context_dim=context_dim, qk_norm=qk_norm)
        self.gate = nn.Parameter(torch.zeros(1)) if gate else None

    def remember(self, context: Tensor) -> KeysValues:
        """Project `context (B, N, context_dim)` to keys and values once."""
        return self.attn.remember(context)

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeysValues,
        *,
        mask: Tensor | None = None,
        of: Tensor | None = None,
        asked: list[Tensor] | None = None,
    ) -> Tensor:
        """Read the context.

        Args:
            context: `(B, N, context_dim)` or what `remember` made of it.
            mask: which context tokens may be read, bool `(B, N)`; a row that may read none adds exactly 0.
            of: for each of the Q rows of `x` the context row it asks, `(Q,)`. By default each context row is
                asked by an equal share of them, in order: nothing is copied then, since rows that ask the same
                context stand side by side as more queries.
            asked: a list that receives the queries `(Q, H, T, K)`, for maps.

        Raises:
            ValueError: Q is no multiple of B, and `of` does not say which row asks which.
        """
        kv = context if isinstance(context, KeysValues) else self.attn.remember(context)
        if of is not None:
            kv, mask = kv[of], None if mask is None else mask[of]
        rows, tokens, dim = x.shape
        if rows % len(kv):
            raise ValueError(f"{rows} rows of queries are no equal shares for {len(kv)} rows of context; pass `of`")
        q, kv = self.attn.project(x.reshape(len(kv), -1, dim), kv)
        if asked is not None:
            asked.append(q.unflatten(2, (-1, tokens)).transpose(1, 2).flatten(0, 1))
        out = self.attn.answer(q, kv, None if mask is None else mask[:, None, None, :]).reshape(rows, tokens, dim)
        return out if self.gate is None else torch.tanh(self.gate) * out
