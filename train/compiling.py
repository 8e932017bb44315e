"""torch.compile, block by block and in place.

A graph of one block serves all blocks, so that a deep network compiles as fast as a shallow one. Compiled in place, a
block keeps its class and the names of its weights: no `_orig_mod.` reaches a checkpoint (Lightning #20233). It happens
after a checkpoint's names are known and before a strategy wraps or shards the module.

Each resolution gets a graph of its own, with its shapes fixed: 224 and 96 pixels make two, and two more without
gradients. A graph that differed by a block's drop rate would be compiled for every block, and soon none at all; so the
rate of a compiled block is a tensor, which a graph takes as it comes.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.vit.blocks import Block, DropPath

_GRAPHS = 64
"""How many graphs of the same code may live side by side; the least used would go otherwise."""


class RateTensor(nn.Module):
    """Stochastic depth as `DropPath` has it, its rate a tensor, so that blocks of other rates share a graph."""

    kept: Tensor

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.register_buffer("kept", torch.tensor(1.0 - rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        chance = torch.rand(x.shape[:1], device=x.device)
        keep = (chance < self.kept).to(x.dtype) / self.kept.to(x.dtype)
        return x * keep[(...,) + (None,) * (x.dim() - 1)]


def blocks_of(networks: Iterable[nn.Module]) -> list[Block]:
    """Every transformer block in the networks, each once: what is compiled, and what is sharded, by itself."""
    found = {id(part): part for network in networks for part in network.modules() if isinstance(part, Block)}
    return list(found.values())


def compile_blocks(networks: Iterable[nn.Module], backend: str = "inductor") -> int:
    """Compile every block of the networks in place, and return how many there are; a compiled one stays as it is.

    Names in the state dict stay the same. A block that is compiled draws its dropped paths from the same generators as
    before, in another order.
    """
    # Only newer releases can raise the limit for one function rather than for the whole process.
    own_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"recompile_limit": _GRAPHS} if own_limit else {}
    blocks = [block for block in blocks_of(networks) if block._compiled_call_impl is None]
    dropping = any(block.drop_path.rate for block in blocks if type(block.drop_path) is DropPath)
    for block in blocks:
        if dropping and type(block.drop_path) is DropPath and not block.drop_path.subset:
            plain = block.drop_path
            block.drop_path = RateTensor(plain.rate).train(plain.training)  # type: ignore[assignment]
        block.compile(dynamic=False, backend=backend, **options)
    return len(blocks)
