"""Relevance between two modalities, words and patches (Chefer et al., 2021, arXiv:2103.15679, eq. 6 to 11).

R_tt, R_ti and R_it have a side of T words and are held. R_ii, the patches', would be N x N: it is a history of the
layers it came from, applied to the few rows that need it. Text-side matrices are dense, the patches' own are streamed.
B images, T words, N image tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.vit.maps.streamed import Operator


@dataclass(frozen=True, eq=False)
class Words:
    """The words' self-attention, fused over heads and gradient-weighted: `(B, T, T)`."""

    a: Tensor


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches' self-attention `(B, N, N)`, streamed."""

    a: Operator


@dataclass(frozen=True, eq=False)
class Cross:
    """Words ask patches `(B, T, N)`, and at the same time patches ask words `(B, N, T)`; None where one does not."""

    words: Tensor | None
    patches: Tensor | None = None


Step = Words | Patches | Cross


def co_attention(steps: Iterable[Step], like: Tensor) -> tuple[Tensor, Tensor]:
    """R_tt `(B, T, T)` and R_ti `(B, T, N)` after a model's attention layers, in the order in which they ran.

    `like (B, T, N)` is a tensor of the shape and dtype of R_ti. Both directions of a `Cross` read what was before it.
    Row t of R_ti tells how relevant each patch was to what the model said at word t; a last layer that changes patches
    alone cannot matter to that row.
    """
    batch, words, patches = like.shape
    tt = like.new_zeros(batch, words, words)  # R_tt - I, so that a small relevance is not rounded away beside 1
    ti = like.new_zeros(batch, words, patches)
    it = like.new_zeros(batch, patches, words)
    image = _Image(batch, patches, like)
    for step in steps:
        if isinstance(step, Words):
            tt, ti = tt + step.a + step.a @ tt, ti + step.a @ ti
        elif isinstance(step, Patches):
            it = it + step.a.right(it)
            image.attend(step.a)
        else:
            tt, ti, it = _cross(step, tt, ti, it, image)
    return tt + torch.eye(words, dtype=tt.dtype, device=tt.device), ti


def encoder_decoder(
    encoder: Sequence[Operator], decoder: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """R_tt `(B, T, T)` and R_ti `(B, T, N)` of words that read patches which never read words (the paper's DETR form).

    `encoder` holds the patches' layers; `decoder`, for each layer of the words, their self-attention `(B, T, T)` and
    then their cross-attention `(B, T, N)`, or None in a layer that does not ask. The same as `co_attention` of these
    steps, but the patches' layers are walked once for all.
    """
    first = next((cross for _, cross in decoder if cross is not None), None)
    if first is None:
        raise ValueError("no layer of the decoder asks the image")
    batch, words, patches = first.shape
    image = _Image(batch, patches, first)
    for a in encoder:
        image.attend(a)
    tt, reading = first.new_zeros(batch, words, words), torch.zeros_like(first)
    for own, cross in decoder:
        tt, reading = tt + own + own @ tt, reading + own @ reading
        if cross is not None:
            reading = reading + _with_self(tt).mT @ cross
    return tt + torch.eye(words, dtype=tt.dtype, device=tt.device), image.normalised(reading)


def _cross(step: Cross, tt: Tensor, ti: Tensor, it: Tensor, image: "_Image") -> tuple[Tensor, Tensor, Tensor]:
    new_tt, new_ti, new_it = tt, ti, it
    own = _with_self(tt)
    if step.words is not None:
        new_ti = ti + image.normalised(own.mT @ step.words)
        new_tt = tt + step.words @ it
    if step.patches is not None:
        new_it = it + image.normalised((step.patches @ own).mT).mT
        image.read(step.patches, ti)
    return new_tt, new_ti, new_it


def _with_self(excess: Tensor) -> Tensor:
    """Eq. 8 and 9: the rows of R - I made to sum to 1, plus I; a row of zeros, a token that nothing touched, stays."""
    return _shares(excess, excess.sum(dim=-1, keepdim=True)) + torch.eye(
        excess.shape[-1], dtype=excess.dtype, device=excess.device
    )


def _shares(x: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, x / torch.where(total > 0, total, 1), 0)


class _Image:
    """R_ii, as the steps that made it, and the sum of each row of R_ii - I, `(B, N, 1)`."""

    def __init__(self, batch: int, patches: int, like: Tensor):
        self.steps: list[Operator | tuple[Tensor, Tensor]] = []
        self.sums = like.new_zeros(batch, patches, 1)

    def attend(self, a: Operator) -> None:
        """R_ii <- R_ii + A R_ii."""
        self.sums = self.sums + a.right(self.sums + 1)
        self.steps.append(a)

    def read(self, a: Tensor, ti: Tensor) -> None:
        """R_ii <- R_ii + A R_ti, for patches that asked words: `a (B, N, T)`, `ti (B, T, N)`."""
        self.sums = self.sums + a @ ti.sum(dim=-1, keepdim=True)
        self.steps.append((a, ti))

    def normalised(self, u: Tensor) -> Tensor:
        """`u` times the normalised R_ii, for rows `u (B, R, N)`."""
        return u + self._excess(_shares(u, self.sums.mT))

    def _excess(self, u: Tensor) -> Tensor:
        """`u (R_ii - I)`, from the last step back to the first."""
        excess = torch.zeros_like(u)
        for step in reversed(self.steps):
            if isinstance(step, tuple):
                a, ti = step
                excess = excess + (u @ a) @ ti
            else:
                more = step.left(u)
                excess, u = excess + more, u + more
        return excess
