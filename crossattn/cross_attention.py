"""Cross-attention: words ask, patches answer.

Queries come from one modality, keys and values from another. What the patches offer is projected once
(`remember`); then any number of queries read it.
"""

import itertools

import torch
from torch import Tensor, nn

from regard.vit.attention import Attention, KeysValues

# Which row of context each row of queries asks: its number `(Q,)`; or, for rows in the order of their contexts, how
# many each context has; or None where each has an equal share. Only the first copies keys and values.
Shares = Tensor | tuple[int, ...] | None


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
        of: Shares = None,
        asked: list[Tensor] | None = None,
    ) -> Tensor:
        """Read the context.

        Args:
            context: `(B, N, context_dim)` or what `remember` made of it.
            mask: which context tokens may be read, bool `(B, N)`; a row that may read none adds exactly 0.
            of: which context row each of the Q rows of `x` asks. By default each context row is asked by an equal
                share of them, in order; a tuple of B numbers gives each its own share. Nothing is copied then, since
                rows that ask the same context stand side by side as more queries. A tensor `(Q,)` may name any row
                for any, and copies its keys and values.
            asked: a list that receives the queries `(Q, H, T, K)`, for maps.

        Raises:
            ValueError: Q is no multiple of B, and `of` does not say which row asks which; or shares that are not Q.
        """
        kv = context if isinstance(context, KeysValues) else self.attn.remember(context)
        if isinstance(of, tuple):
            return self._by_shares(x, kv, mask, of, asked)
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

    def _by_shares(
        self, x: Tensor, kv: KeysValues, mask: Tensor | None, shares: tuple[int, ...], asked: list[Tensor] | None
    ) -> Tensor:
        """Contexts side by side that are asked equally often go together, as slices."""
        if len(shares) != len(kv) or sum(shares) != len(x):
            raise ValueError(f"shares {shares} of {len(x)} rows of queries do not fit {len(kv)} rows of context")
        outs, queries = [x[:0]], []
        first, row = 0, 0
        for share, run in itertools.groupby(shares):
            last = first + len(list(run))
            rows, contexts = slice(row, row + share * (last - first)), slice(first, last)
            first, row = last, rows.stop
            if share:
                heard: list[Tensor] = []
                outs.append(self(x[rows], kv[contexts], mask=None if mask is None else mask[contexts], asked=heard))
                queries += heard
        if asked is not None:
            asked.append(torch.cat(queries) if queries else x.new_zeros(0, self.attn.heads, x.shape[1], 0))
        return torch.cat(outs)
