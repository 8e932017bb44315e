"""Gradient-weighted relevance: what in the image speaks for an answer (Chefer et al., 2021, arXiv:2103.15679).

A layer counts by the part of its attention that the answer would like more of, mean_h((dA * A)^+). Only the rows that
are asked for are carried through the layers, so that no N x N matrix is held; `corelevance.py` does it for two
modalities.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit.attention import Attention, KeysValues
from regard.vit.blocks import Block
from regard.vit.errors import InputError
from regard.vit.maps.queries import Query, resolve
from regard.vit.maps.rows import AttentionRows, as_tensor
from regard.vit.maps.streamed import Streamed, evaluating, first_rows, name_rows, positive_relevance
from regard.vit.maps.trace import passages, plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture
from regard.vit.tokens import Tokens

Target = int | Tensor | Callable[[Tokens, Tensor], Tensor]


def relevance(
    model: nn.Module,
    images: Tensor | Picture | Sequence[Picture],
    target: Target,
    queries: Query | Sequence[Query] = "cls",
    *,
    start_layer: int = 0,
) -> AttentionRows:
    """Rows of the relevance of all tokens for a number that the model puts out.

    A row starts at its query and walks from the last layer to `start_layer`, v <- v + v mean_h((dA * A)^+). The
    gradients come from one backward through the fused kernel, layer by layer: memory is O(layers x N x D) for the
    residual stream and one layer's activations. Parameters are not touched.

    Args:
        model, images, queries: as in `attention_rows`.
        target: the number: of a class, its logit; a vector `(W,)` or `(B, W)`, the cosine of the pooled vector to it,
            such as of a text; or a function of the tokens and the pooled vector, `(Tokens, (B, W)) -> (B,)`.
        start_layer: the first layer that takes part, counted from the end if negative; -1 is the last layer alone.

    Returns rows whose axes of layers and heads have size 1. They are no shares: a query's own token starts at 1 and
    the rest is as large as the gradient is.
    Raises InputError for a class that does not exist, and a target that is no number for each image or does not depend
    on the image.
    """
    vit = plain(model)
    images = as_tensor(vit, images)
    (first,) = vit.layer_numbers(start_layer)
    with evaluating(vit), torch.inference_mode(False), torch.no_grad():
        kept, x, grid = forward(vit, images, first)
        asked = resolve(vit, queries, grid, x.device)
        v = first_rows(asked, x.shape[0], x.shape[1], x)
        with torch.enable_grad():
            x.requires_grad_()
            tokens = vit.name(vit.norm(x), grid)
            value = score(tokens, vit.pool(tokens), target, vit)
            if not value.requires_grad:
                raise InputError("the target does not depend on what the model puts out; nothing is relevant to it")
            (grad,) = torch.autograd.grad(value.sum(), x, allow_unused=True, materialize_grads=True)
        for layer in backward(vit, kept, grid, grad):
            v = v + layer.positive().left(v)
        return name_rows(vit, v, grid, asked)


@dataclass(frozen=True, eq=False)
class Felt:
    """A layer's attention and the gradient at what its heads put out, `q`, `out` and `grad (B, H, S, K)`."""

    attn: Attention
    q: Tensor
    kv: KeysValues
    out: Tensor
    grad: Tensor

    def positive(self) -> Streamed:
        """mean_h((dA * A)^+) `(B, S, S)`."""
        return positive_relevance(self.attn, self.q, self.kv, self.grad, self.out)


Kept = list[tuple[Block, Tensor]]


def forward(vit: ViT, images: Tensor, first: int) -> tuple[Kept, Tensor, tuple[int, int]]:
    """The blocks from `first` on with the stream that came into each, the stream after the last, and the grid."""
    seen = []
    for passage in passages(vit, images.detach().clone(), range(first, vit.config.depth)):
        seen.append((passage.block, passage.x))
    last = passage
    return seen, last.block.finish(last.x, last.out, last.kv), last.grid


def backward(vit: ViT, kept: Kept, grid: tuple[int, int], grad: Tensor) -> Iterator[Felt]:
    """The layers from the last to the first, for `grad (B, S, D)` at the stream after the last.

    Each is run again from the stream that came in, so that the activations of no two layers are held at once. The
    gradient is asked of these tensors alone: nothing is added to the .grad of a parameter, and frozen ones do no harm.
    """
    rotary = vit.rotary(grid, grad.device)
    for block, stream in reversed(kept):
        with torch.enable_grad():
            x = stream.detach().requires_grad_()
            q, kv = block.attn.project(block.norm1(x), rotary=rotary)
            out = block.attn.mix(q, kv)
            after = block.finish(x, out, kv)
            at_out, grad = torch.autograd.grad(after, (out, x), grad, allow_unused=True, materialize_grads=True)
        yield Felt(block.attn, q.detach(), KeysValues(kv.k.detach(), kv.v.detach()), out.detach(), at_out)


def score(tokens: Tokens, pooled: Tensor, target: Target, vit: ViT) -> Tensor:
    """The number `(B,)` that a target stands for, of what the model puts out."""
    batch = len(pooled)
    if isinstance(target, int):
        if vit.head is None:
            raise InputError(f"target {target} is a class, and this ViT has no classifier; open it with classes=")
        logits = vit.head(pooled)
        if not 0 <= target < logits.shape[1]:
            raise InputError(f"class {target} does not exist: this ViT has {logits.shape[1]}, counted from 0")
        return logits[:, target]
    if isinstance(target, Tensor):
        if target.shape not in (pooled.shape, pooled.shape[1:]):
            raise InputError(
                f"a target vector is {tuple(pooled.shape[1:])} or {tuple(pooled.shape)}, not {tuple(target.shape)}"
            )
        return F.cosine_similarity(pooled, target.detach().clone().to(pooled).expand_as(pooled), dim=-1)
    value = target(tokens, pooled)
    if not isinstance(value, Tensor) or value.shape != (batch,):
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target gave {what}; it must give one number for each image, ({batch},)")
    return value
