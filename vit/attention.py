"""The one attention of the house: a soft dictionary look-up with many heads.

Every query row asks every key how well they match, turns the scores into percentages, and hands
back the values mixed in that proportion:  A = softmax(Q K^T / sqrt(d_k)),  Z = A V,  O = Z_concat W_o
(Vaswani et al., 2017, arXiv:1706.03762).  Queries come from `x`; keys and values come from `context`,
which defaults to `x`.  Self-attention, cross-attention, causal attention and attention over remembered
keys are these same lines.

Shapes: B batch, T query tokens, N key tokens, D width, H heads, K head width (the d_k of the literature).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit import fused

Rotary = Callable[[Tensor], Tensor]  # (B, H, N, K) -> (B, H, N, K), turns queries and keys by position


def look_up(query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Soft dictionary look-up on the blackboard: `(…, T, K), (…, N, K), (…, N, V) -> mixed (…, T, V), A (…, T, N)`.

    A dictionary with the keys apple, banana and lemon holds their French names. "orange" is no key, but
    it is like a lemon: its answer mixes the three values in the proportion of query-key similarity.

    >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])        # apple, banana, lemon
    >>> values = torch.eye(3)                                            # pomme, banane, citron
    >>> orange = torch.log(torch.tensor([[8.0, 8.0]]))                   # likes lemon 8 times as much
    >>> mixed, percentages = look_up(orange, keys, values, scale=1.0)
    >>> [round(p, 1) for p in percentages[0].tolist()]                   # pomme, banane, citron
    [0.1, 0.1, 0.8]
    >>> torch.equal(mixed, percentages @ values)
    True

    `scale` defaults to 1/sqrt(K), without which wide dot products saturate the softmax.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.softmax(scale * query @ keys.transpose(-2, -1), dim=-1)
    return weights @ values, weights


@dataclass(frozen=True, eq=False)
class KeysValues:
    """What a context offers (`k`) and hands over (`v`), projected once: each `(B, H, N, K)`."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return self.k.shape[0]

    def __getitem__(self, index: Tensor | slice) -> "KeysValues":
        """Choose batch rows. A slice is a view; an index tensor copies."""
        if isinstance(index, slice):
            return KeysValues(self.k[index], self.v[index])
        # The gradient of index_select adds rows; that of plain indexing sorts its way through single numbers.
        return KeysValues(self.k.index_select(0, index), self.v.index_select(0, index))

    def expand(self, batch: int) -> "KeysValues":
        """Offer the one row to `batch` rows without copying it."""
        return KeysValues(self.k.expand(batch, -1, -1, -1), self.v.expand(batch, -1, -1, -1))

    def extend(self, new: "KeysValues") -> "KeysValues":
        """Append tokens: the cache of step-by-step causal attention."""
        return KeysValues(torch.cat((self.k, new.k), dim=2), torch.cat((self.v, new.v), dim=2))


Edit = Callable[[Tensor, KeysValues], Tensor]  # (B, H, T, K), what was attended -> (B, H, T, K)


class Attention(nn.Module):
    """Multi-head attention, `x (B, T, D)` asking `context (B, N, context_dim)` -> `(B, T, D)`.

    Args:
        dim: width D of the asking tokens and of the output.
        heads: number of heads H.
        head_dim: width K of one head; default `dim // heads`. `heads * head_dim` need not equal `dim`.
        context_dim: width of the tokens that offer keys and values; default `dim`.
        qkv_bias, out_bias: whether the projections have biases.
        key_bias: whether the key projection has one too, where `qkv_bias` gives it.
        out_norm: LayerNorm on the joined heads before the output projection (sub-LN, Wang et al., 2022,
            arXiv:2210.06423).
        qk_norm: LayerNorm over each head's query and key (Dehghani et al., 2023, arXiv:2302.05442).
        sink: a learned logit per head that takes part in the softmax and hands over nothing, so that a
            head with nothing to say can rest on it; rows of A then sum to less than 1.
        norm_eps: eps of these norms.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        context_dim: int | None = None,
        qkv_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        out_norm: bool = False,
        sink: bool = False,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim {dim} is not a multiple of heads {heads}; state head_dim")
            head_dim = dim // heads
        self.heads, self.head_dim = heads, head_dim
        inner, context_dim = heads * head_dim, context_dim or dim
        self.to_q = nn.Linear(dim, inner, bias=qkv_bias)
        self.to_k = nn.Linear(context_dim, inner, bias=qkv_bias and key_bias)
        self.to_v = nn.Linear(context_dim, inner, bias=qkv_bias)
        self.norm_q = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.norm_k = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.sink = nn.Parameter(torch.zeros(heads)) if sink else None
        self.norm_out = nn.LayerNorm(inner, eps=norm_eps) if out_norm else nn.Identity()
        self.out = nn.Linear(inner, dim, bias=out_bias)
        self.edit: Edit | None = None  # what an experiment does to the heads' outputs before they are joined

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeysValues | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Answer each row of `x` `(B, T, D)` from `context`; returns `(B, T, D)`.

        Args:
            context: `(B, N, context_dim)`, or what `remember` made of it; default `x` itself.
            mask: broadcastable to `(B, H, T, N)`; bool (True may be attended) or float (added to the scores).
                A row that may attend nothing contributes exactly 0, bias included, with finite gradients.
            causal: row i sees keys up to its own place; the last query stands beside the last key.
            rotary: turns queries and freshly projected keys by their position.
        """
        q, kv = self.project(x, context, rotary)
        return self.answer(q, kv, self.join_masks(mask, causal, q, kv.k))

    def answer(self, q: Tensor, kv: KeysValues, mask: Tensor | None = None) -> Tensor:
        """Mix the values for the queries `q (B, H, T, K)` and join the heads: `(B, T, D)`."""
        out = fused.linear(self.join(q, kv, mask), self.out)
        if mask is None:
            return out
        awake = _visible(mask).any(dim=1)  # (B or 1, T or 1, 1)
        return out.masked_fill(~awake, 0.0)

    def join(self, q: Tensor, kv: KeysValues, mask: Tensor | None = None) -> Tensor:
        """What the output projection is given: the heads' mixed values side by side, `(B, T, H * K)`."""
        return self.joined(self.mix(q, kv, mask), kv)

    def joined(self, z: Tensor, kv: KeysValues) -> Tensor:
        """The same, from what the heads put out, `z (B, H, T, K)`."""
        if self.edit is not None:
            z = self.edit(z, kv)
        return self.norm_out(z.transpose(1, 2).flatten(2))

    def remember(self, context: Tensor, rotary: Rotary | None = None) -> KeysValues:
        """Project `context (B, N, context_dim)` to keys and values once, for any number of queries."""
        v = self._split_heads(fused.linear(context, self.to_v))
        offered = self._split_heads(fused.linear(context, self.to_k))
        k = self.norm_k(offered).to(v.dtype)  # autocast leaves a norm's output in fp32
        return KeysValues(k if rotary is None else rotary(k), v)

    def project(
        self, x: Tensor, context: Tensor | KeysValues | None = None, rotary: Rotary | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Queries `(B, H, T, K)` of `x`, and the keys and values they will meet."""
        asked = self._split_heads(fused.linear(x, self.to_q))
        q = self.norm_q(asked).to(asked.dtype)
        if rotary is not None:
            q = rotary(q)
        if isinstance(context, KeysValues):
            return q, context
        return q, self.remember(x if context is None else context, rotary)

    def mix(self, q: Tensor, kv: KeysValues, mask: Tensor | None = None) -> Tensor:
        """What each head puts out before W_o: softmax(q k^T / sqrt(K) + mask) v, fused; `(B, H, T, K)`."""
        k, v = kv.k, kv.v
        visible = None
        if mask is not None:
            visible = _visible(mask)
            # A row with nothing to see would be softmax(-inf, ..., -inf). It looks everywhere instead and
            # its output is set to 0: the same on every backend, and its gradient is finite.
            mask = mask | ~visible if mask.dtype == torch.bool else mask.masked_fill(~visible, 0.0)
        if self.sink is not None:
            if mask is not None:  # the sink may always be attended
                mask = F.pad(mask.expand(*mask.shape[:-1], k.shape[2]), (0, 1), value=mask.dtype == torch.bool)
            q, k, v = self._with_sink(q, k, v)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.head_dim**-0.5)
        if self.sink is not None:
            z = z[..., : self.head_dim]
        return z if visible is None else z.masked_fill(~visible, 0.0)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """The rows of A for queries `q (B, H, T, K)` and keys `k (B, H, N, K)`: `(B, H, T, N)`, in fp32 or wider.

        Pass only the query rows that are wanted: memory is O(rows x N). A row sums to 1, or to 0 where the
        mask leaves it nothing to see, or to less than 1 where a sink takes its part.
        """
        scores = self.scores(q, k, mask)
        if mask is not None:
            visible = _visible(mask)
            scores = scores.masked_fill(~visible, 0.0)
        if self.sink is not None:
            logits = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, logits), dim=-1)
        rows = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
        return rows if mask is None else rows.masked_fill(~visible, 0.0)

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the softmax is given, q k^T / sqrt(K) + mask: `(B, H, T, N)`, in fp32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * self.head_dim**-0.5
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    @staticmethod
    def join_masks(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
        """One mask `(B or 1, H or 1, T or 1, N)` from the caller's and the causal one."""
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        if mask is not None and mask.dtype != torch.bool:
            if not mask.is_floating_point():
                raise ValueError(
                    f"mask is {mask.dtype}; use bool (True may be attended) or float (added to the scores)"
                )
            mask = mask.to(q.dtype)
        if not causal:
            return mask
        tokens, keys = q.shape[2], k.shape[2]
        triangle = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
        if mask is None:
            return triangle[None, None]
        return mask & triangle if mask.dtype == torch.bool else mask.masked_fill(~triangle, -torch.inf)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def _with_sink(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more key that hands over zeros. It scores the sink's logit through channels of its own, not by a mask of
        T x N, so that the fused kernel runs; they are 8 because kernels like that.
        """
        assert self.sink is not None
        one = F.pad(q.new_ones(1), (0, 7)).expand(*q.shape[:-1], 8)
        key = F.pad((self.sink / self.head_dim**-0.5).to(k.dtype)[:, None, None], (self.head_dim, 7))
        k = torch.cat((F.pad(k, (0, 8)), key.expand(k.shape[0], -1, -1, -1)), dim=2)
        return torch.cat((q, one), dim=-1), k, F.pad(v, (0, 8, 0, 1))


def _visible(mask: Tensor) -> Tensor:
    """Which rows may see at least one key, `(…, T, 1)`."""
    return (mask if mask.dtype == torch.bool else mask > -torch.inf).any(dim=-1, keepdim=True)
