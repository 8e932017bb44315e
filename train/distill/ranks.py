"""Sums over all ranks of a run, and nothing where there is one process."""

import torch.distributed as dist
from torch import Tensor


def is_shared() -> bool:
    """Whether other ranks take part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def summed(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, in place."""
    if is_shared():
        dist.all_reduce(x)
    return x


def largest(x: Tensor) -> Tensor:
    """The maximum of `x` over all ranks, in place."""
    if is_shared():
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x
