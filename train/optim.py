"""AdamW with two parameter groups and a warm-up + cosine schedule that counts optimizer steps.

Why not Lightning's defaults: a scheduler returned without an interval moves once per epoch (Lightning
#20436), and `trainer.estimated_stepping_batches` builds the data loader before a checkpoint is restored,
which loses the position in the epoch (Lightning #20550). So `interval` is always "step", an optimizer step
whatever the gradient accumulation, and the length of the schedule is an argument.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from regard.crossattn import ImageQA
from regard.vit import ViT
from regard.vit.lora import LoRALinear

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    module: nn.Module, weight_decay: float, factors: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into the groups `decay` and `no_decay`.

    A parameter decays when it is the `weight` of a layer and has at least two dimensions: the matrix of a
    Linear, the kernel of a Conv. Biases, norms, layer scales, gates, embeddings and every bare token or
    table (class token, registers, positions, mask token, latent queries) do not. A parameter that two
    layers share appears once, and does not decay if one of its owners would not decay it.

    `factors` on the learning rate, 1 for a parameter that has none, split each group further; a group then states its
    `factor`, the largest first.
    """
    decays: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                decays[parameter] = decays.get(parameter, True) and _decays(owner, name, parameter)
    factors = factors or {}
    groups: list[dict[str, Any]] = []
    for factor in sorted({factors.get(parameter, 1.0) for parameter in decays}, reverse=True):
        own = [(parameter, yes) for parameter, yes in decays.items() if factors.get(parameter, 1.0) == factor]
        named = {"factor": factor} if factors else {}
        end = f" x {factor:.4g}" if factors else ""
        groups += [
            {"name": f"decay{end}", "params": [p for p, yes in own if yes], "weight_decay": weight_decay, **named},
            {"name": f"no_decay{end}", "params": [p for p, yes in own if not yes], "weight_decay": 0.0, **named},
        ]
    return [group for group in groups if group["params"]]


def depth_factors(model: ImageQA | ViT, layer_decay: float, new: Sequence[str] = ()) -> dict[nn.Parameter, float]:
    """The factor on the learning rate of each parameter by its depth: deep ones, near the input, move least.

    In a ViT, a text encoder or a decoder of L layers, layer l of 1 to L gets `layer_decay ** (L + 1 - l)`, and what
    stands before them (patches, words, positions, named tokens) `layer_decay ** (L + 1)`. Final norms and heads get 1,
    and so do new parts: cross-attention behind a gate, adapters, and the modules named in `new`, such as `text`.
    (Clark et al., 2020, arXiv:2003.10555; Bao et al., 2022, arXiv:2106.08254.)
    """
    factors: dict[nn.Parameter, float] = {}
    vit = model if isinstance(model, ViT) else model.vit
    towers: list[tuple[str, Any, Any]] = [("vit", vit, vit.blocks)]
    if isinstance(model, ImageQA):
        towers.append(("text", model.text, model.text.layers))
        if model.decoder is not None:
            towers.append(("decoder", model.decoder.body, model.decoder.body.layers))
    for name, tower, layers in towers:
        if name in new:
            continue
        depth = len(layers)
        factors |= dict.fromkeys(tower.parameters(), layer_decay ** (depth + 1))
        for number, layer in enumerate(layers, start=1):
            factors |= dict.fromkeys(layer.parameters(), layer_decay ** (depth + 1 - number))
            cross = getattr(layer, "cross", None)
            if cross is not None and cross.gate is not None:
                factors |= {p: 1.0 for part in (cross, layer.norm2) for p in part.parameters()}
        # A post-norm encoder has this norm on its embeddings.
        last = [] if getattr(tower.config, "norm", "pre") == "post" else [tower.norm]
        last += [part for part in (tower.pool, tower.head) if part is not None] if isinstance(tower, ViT) else []
        factors |= {parameter: 1.0 for part in last for parameter in part.parameters()}
    factors |= {p: 1.0 for part in model.modules() if isinstance(part, LoRALinear) for p in (part.down, part.up)}
    return factors


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
    factors: Mapping[nn.Parameter, float] | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Any]:
    """AdamW and its schedule in the form that `LightningModule.configure_optimizers` returns.

    `total_steps` and `warmup_steps` are optimizer steps. `fused=None` fuses where all parameters are on a
    GPU. `factors` are on the learning rate of single parameters. `make` builds another optimizer from what AdamW takes.
    """
    groups = parameter_groups(module, weight_decay, factors)
    for group in groups:
        if "factor" in group:
            group["lr"] = lr * group["factor"]
    if fused is None:
        fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    optimizer = make(groups, lr=lr, betas=betas, fused=fused or None)
    factor = warmup_cosine(total_steps, warmup_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
