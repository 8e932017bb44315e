"""Three ways to clip gradients that go under one number in DINO's descendants.

`per_parameter` (DINO) limits the norm of each tensor by itself, `per_module` (DINOv2) that of the backbone and of each
head, `global` (most others) that of everything together.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

ClipMode = Literal["per_parameter", "per_module", "global"]
_EPS = 1e-6


@torch.no_grad()
def clip_gradients(parts: Mapping[str, Sequence[nn.Parameter]], mode: ClipMode, limit: float | None) -> Tensor:
    """Scale the gradients of the named parts in place, `g * min(1, limit / (norm + 1e-6))`; their total norm before.

    `limit` None leaves them as they are. Parameters without a gradient take no part. Nothing waits for the device.
    """
    groups = [[p.grad for p in part if p.grad is not None] for part in parts.values()]
    groups = [group for group in groups if group]
    if not groups:
        return torch.zeros(())
    norms = [_norms(group) for group in groups]
    total = torch.linalg.vector_norm(torch.cat(norms))
    if limit is None:
        return total
    for group, own in zip(groups, norms, strict=True):
        if mode == "per_parameter":
            for gradient, factor in zip(group, _factors(own, limit).unbind(), strict=True):
                _scale([gradient], factor)
        else:
            _scale(group, _factors(total if mode == "global" else torch.linalg.vector_norm(own), limit))
    return total


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(gradients))
    return torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms])


def _factors(norms: Tensor, limit: float) -> Tensor:
    return (limit / (norms + _EPS)).clamp(max=1.0)


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    # On a CPU the factor can be looked at for nothing, and a pass over the gradients saved.
    if not factor.is_cpu or factor < 1.0:
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        torch._foreach_mul_(local, factor)
