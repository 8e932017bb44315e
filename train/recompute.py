"""Gradient checkpointing: keep what goes into a layer, and compute its inside again when the gradient comes.

A layer's activations are many times its input, so memory falls, for one more forward pass (Chen et al., 2016,
arXiv:1604.06174).
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.crossattn.text import TextLayer
from regard.vit.blocks import Block


def recompute_layers(model: nn.Module) -> int:
    """Have every block of the image side and every layer of text and decoder computed again; returns how many.

    Outputs and gradients stay the same, dropout's choices among them. Names of weights do too.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (Block, TextLayer))]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: nn.Module, *given: Any, **named: Any) -> Tensor:
    run = functools.partial(type(layer).forward, layer)
    # What receives a text layer's queries and keys, its last two arguments, would receive them twice.
    tells = isinstance(layer, TextLayer) and any(value is not None for value in given[5:])
    if not torch.is_grad_enabled() or tells:
        return run(*given, **named)
    return checkpoint(run, *given, use_reentrant=False, **named)
