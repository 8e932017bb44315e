"""LeGrad: which patches each layer would have to look at more for the answer to grow (Bousselham et al., 2025)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.maps.relevance import Target, score
from regard.vit.maps.rows import BLOCK, Layers, as_tensor
from regard.vit.maps.streamed import evaluating
from regard.vit.maps.trace import Passage, passages, plain
from regard.vit.model import ViT
from regard.vit.pooling import AttentionPool
from regard.vit.preprocess import Picture
from regard.vit.tokens import Tokens


def legrad(
    model: nn.Module, images: Tensor | Picture | Sequence[Picture], target: Target, *, layers: Layers = "all"
) -> Tensor:
    """Maps `(B, gh, gw)` in 0..1: LeGrad (Bousselham et al., 2025, arXiv:2404.03214).

    Each layer is asked by itself: the mean of its tokens goes through the final norm, the pooling and the target, and
    what counts is the positive part of the gradient at the layer's attention, averaged over heads and queries. The
    columns of the class token and registers are dropped. The mean over the layers is stretched so that the smallest
    value is 0 and the largest 1; a map without any relevance is 0. A model that pools by attention is asked through
    the attention of its pooling, which reads each layer's patches.

    Args:
        model, images: as in `attention_rows`.
        target: as in `relevance`; a function gets the mean token as its only token, or the layer's tokens where the
            model pools by attention.
        layers: which take part; numbers, counted from the end if negative, or `all`.

    Memory is a block of query rows, and one layer's activations for its backward.
    """
    vit = plain(model)
    images = as_tensor(vit, images)
    wanted = vit.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    maps: list[Tensor] = []
    with evaluating(vit), torch.inference_mode(False), torch.no_grad():
        for passage in passages(vit, images.detach().clone(), wanted):
            pooled_by = vit.pool.asker
            column = _own(vit, passage, target) if pooled_by is None else _pools(vit, passage, target, pooled_by)
            maps.append(column)
        total = torch.stack(maps).mean(dim=0)
        low, high = total.amin(dim=(-2, -1), keepdim=True), total.amax(dim=(-2, -1), keepdim=True)
        return torch.where(high > low, (total - low) / torch.where(high > low, high - low, 1), 0)


def _own(vit: ViT, passage: Passage, target: Target) -> Tensor:
    """mean_{h,i} (dA)^+ of a layer's own attention, for its mean token."""
    with torch.enable_grad():
        out = passage.out.detach().requires_grad_()
        mean = vit.norm(passage.block.finish(passage.x, out, passage.kv).mean(dim=1, keepdim=True))
        cls = mean[:, 0] if vit.config.class_token else None
        tokens = Tokens(cls, mean[:, :0], mean, (1, 1))
        grad = _gradient(score(tokens, vit.pool(tokens), target, vit), out)
    values = passage.kv.v.mT
    parts = [_wide((part @ values).clamp_min(0)).sum(dim=2) for part in grad.split(BLOCK, dim=2)]
    total = torch.stack(parts).sum(dim=0)  # (B, H, S)
    return _patches(vit, total / grad.shape[2], passage.grid)


def _pools(vit: ViT, passage: Passage, target: Target, pool: AttentionPool) -> Tensor:
    """mean_h (dA)^+ of the pooling's attention, given the patches of a layer."""
    x = vit.norm(passage.block.finish(passage.x, passage.out, passage.kv))
    tokens = vit.name(x, passage.grid)
    q, kv = pool.attn.project(pool.latent.expand(len(x), 1, -1), tokens.patches)
    with torch.enable_grad():
        out = pool.attn.mix(q, kv).detach().requires_grad_()
        read = pool.attn.out(pool.attn.joined(out, kv))
        pooled = vit.pool.norm((read + pool.mlp(pool.norm(read)))[:, 0])
        grad = _gradient(score(tokens, pooled, target, vit), out)
    return _wide((grad @ kv.v.mT).clamp_min(0)).sum(dim=2).mean(dim=1).unflatten(-1, passage.grid)


def _gradient(value: Tensor, out: Tensor) -> Tensor:
    if not value.requires_grad:
        raise InputError("the target does not depend on what the model puts out; there is nothing to be relevant to")
    return torch.autograd.grad(value.sum(), out, allow_unused=True, materialize_grads=True)[0]


def _patches(vit: ViT, columns: Tensor, grid: tuple[int, int]) -> Tensor:
    return vit.name(columns.mean(dim=1)[..., None], grid).patches[..., 0].unflatten(-1, grid)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
