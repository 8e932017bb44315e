"""AdamW with two parameter groups and a warm-up + cosine schedule that counts optimizer steps.

Why not Lightning's defaults: a scheduler returned without an interval moves once per epoch (Lightning
#20436), and `trainer.estimated_stepping_batches` builds the data loader before a checkpoint is restored,
which loses the position in the epoch (Lightning #20550). So `interval` is always "step", an optimizer step
whatever the gradient accumulation, and the length of the schedule is an argument.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into the groups `decay` and `no_decay`.

    A parameter decays when it is the `weight` of a layer and has at least two dimensions: the matrix of a
    Linear, the kernel of a Conv. Biases, norms, layer scales, gates, embeddings and every bare token or
    table (class token, registers, positions, mask token, latent queries) do not. A parameter that two
    layers share appears once, and does not decay if one of its owners would not decay it.
    """
    decays: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                decays[parameter] = decays.get(parameter, True) and _decays(owner, name, parameter)
    groups = [
        {"name": "decay", "params": [p for p, yes in decays.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decays.items() if not yes], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _decays(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    is_matrix = parameter.ndim >= 2 and (name == "weight" or name.endswith("_weight"))
    is_norm = "norm" in type(owner).__name__.lower()
    return is_matrix and not is_norm and not isinstance(owner, _TABLES)


def warmup_cosine(total_steps: int, warmup_steps: int, final: float = 0.0) -> Callable[[int], float]:
    """The factor on the learning rate at an optimizer step, counted from 0.

    It rises in `warmup_steps` equal steps to 1, which step `warmup_steps - 1` already has, and falls by
    half a cosine to `final`, which it reaches at `total_steps` (one past the last step) and keeps.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def configure(
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    total_steps: int,
    warmup_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    fused: bool | None = None,
) -> dict[str, Any]:
    """AdamW and its schedule in the form that `LightningModule.configure_optimizers` returns.

    `total_steps` and `warmup_steps` are optimizer steps. `fused=None` fuses where all parameters are on a
    GPU.
    """
    groups = parameter_groups(module, weight_decay)
    if fused is None:
        fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused or None)
    factor = warmup_cosine(total_steps, warmup_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
