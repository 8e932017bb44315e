"""A running average of a network's weights, moved once per optimizer step, part of the checkpoint like any weight.

Lightning's WeightAveraging copies the whole LightningModule, puts the average in the place of the weights when it
saves, and averages tensor by tensor (Lightning #21724). Here it is a frozen network beside the trained one: its tensors
lie in the checkpoint under their own names, so that a resumed run goes on bit for bit, and one fused operation moves
them.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError


class WeightAverage(nn.Module):
    """The exponential moving average of a network's weights: `network` is the averaged one, always in inference mode.

    After optimizer step n, counted from 1, `average <- d average + (1 - d) weights` with `d = min(decay, (1 + n) /
    (10 + n))`: the warm-up lets the average leave the random weights it began at (as in TensorFlow's
    ExponentialMovingAverage). Because d depends on the step alone, nothing but the weights has to be saved.

    Raises InputError for a decay outside of [0, 1), and for half-precision weights, which so small a change would not
    move.
    """

    def __init__(self, network: nn.Module, decay: float):
        super().__init__()
        if not 0 <= decay < 1:
            raise InputError(f"ema is {decay}; the decay must lie in [0, 1), or null for no average")
        self.decay = decay
        self.network = copy.deepcopy(network).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "WeightAverage":
        """Stays in inference mode: no drop path, no gradients."""
        return super().train(False)

    def decay_at(self, step: int) -> float:
        """The decay of optimizer step `step`, counted from 1."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Move the average towards `network`, which optimizer step `step` has just changed."""
        own, theirs = list(_tensors(self.network)), list(_tensors(network))
        if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in own):
            raise InputError("half-precision weights cannot be averaged; train with bf16-mixed, or set ema to null")
        torch._foreach_lerp_(own, theirs, 1 - self.decay_at(step))
        for mine, buffer in zip(self.network.buffers(), network.buffers(), strict=True):
            mine.copy_(buffer)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    return (parameter.detach() for parameter in network.parameters())
