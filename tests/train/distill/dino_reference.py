"""DINO's formulas as slow, plain loops, to compare with; and small random inputs."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.train.distill.auto import derived
from regard.train.distill.module import DistillModule
from regard.train.distill.recipe import DistillRecipe
from regard.train.pictures import PictureBatch
from regard.vit import ViT, ViTConfig

VIT: dict[str, Any] = {
    "image_size": (12, 8),
    "patch_size": 4,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "hidden_dim": 32,
}
RECIPE: dict[str, Any] = {
    "prototypes": 24,
    "hidden": 20,
    "bottleneck": 12,
    "local_crops": 2,
    "local_size": (8, 4),
    "drop_path": 0.0,
    "tau_teacher": 0.06,
    "tau_teacher_start": 0.04,
    "tau_warmup_epochs": 1.0,
    "momentum": 0.9,
    "freeze_epochs": 0.0,
    "warmup_epochs": 0.0,
    "batch": 4,
    "epochs": 2,
}


def noisy(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> Any:
    """Every weight moved by noise, so that nothing is 0 or 1 by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def small_module(vit: dict[str, Any] | None = None, **changes: Any) -> DistillModule:
    recipe, _ = derived(DistillRecipe(**{**RECIPE, **changes}), 1000, 4)
    torch.manual_seed(0)
    config = ViTConfig(**{**VIT, "drop_path": recipe.drop_path, **(vit or {})})
    module = DistillModule(noisy(ViT(config)), recipe)
    module.centre and module.centre.centre.normal_(0.0, 0.3)
    return module


def batch_of(count: int, seed: int = 0, sizes: tuple[Any, ...] = ((12, 8), (12, 8), (8, 4), (8, 4))) -> PictureBatch:
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    numbers = torch.arange(count)
    ids = [f"picture {i}" for i in range(count)]
    return PictureBatch(
        pixels, torch.full((count,), -1), torch.ones(count).bool(), ids, numbers, torch.zeros(count).long(), []
    )


def part(batch: PictureBatch, rows: slice) -> PictureBatch:
    return PictureBatch(
        [crop[rows] for crop in batch.pixels],
        batch.labels[rows],
        batch.counts[rows],
        batch.ids[rows],
        batch.indices[rows],
        batch.epochs[rows],
        [],
    )


def dino_by_loops(student: Tensor, teacher: Tensor, centre: Tensor, tau_s: float, tau_t: float) -> float:
    """The loss as the paper's pseudo-code has it, one pair, one image and one prototype at a time."""
    total, pairs = 0.0, 0
    for t in range(2):
        for s in range(len(student)):
            if s == t:
                continue
            pairs += 1
            for b in range(student.shape[1]):
                z = ((teacher[t, b] - centre[0]) / tau_t).double()
                q = (z.exp() / z.exp().sum()).tolist()
                y = (student[s, b] / tau_s).double().exp()
                p = (y / y.sum()).tolist()
                total -= sum(q_k * math.log(p_k) for q_k, p_k in zip(q, p, strict=True)) / student.shape[1]
    return total / pairs


def dino_by_einsum(student: Tensor, q: Tensor, tau: float) -> Tensor:
    logp = torch.log_softmax(student / tau, dim=-1)
    pairs = -torch.einsum("sbk,tbk->st", logp, q) / student.shape[1]
    count = pairs.numel() - 2
    return (pairs.sum() - pairs.diagonal().sum()) / count
