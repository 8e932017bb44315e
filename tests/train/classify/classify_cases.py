"""A small classifier, its recipe and its batches, for the tests of this folder."""

from pathlib import Path
from typing import Any

import picture_run as script
import torch

from regard.train.classify.module import ClassifyModule
from regard.train.classify.recipe import ClassifyRecipe
from regard.train.pictures import PictureBatch
from regard.train.recipe import load_recipe
from regard.vit import ViT

QUIET = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


def recipe(plain: Path, data: Path, **changes: Any) -> ClassifyRecipe:
    settings = {**script.SETTINGS["classify"], "data": str(data), **changes}
    settings["vit"] = (
        {**script.VIT, **changes.get("vit", {})} if "pretrained" not in changes else changes.get("vit", {})
    )
    return load_recipe(plain, ClassifyRecipe, **settings)


def noisy(vit: ViT, seed: int = 3) -> ViT:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return vit


def small(**changes: Any) -> ViT:
    torch.manual_seed(0)
    return noisy(ViT.preset("small", **{**script.VIT, **changes}))


def module(vit: ViT | None = None, **settings: Any) -> ClassifyModule:
    return ClassifyModule(vit or small(classes=3), **{"seed": 7, "lr": 1e-3, **settings})


def batch(count: int = 6, classes: int = 3, seed: int = 0) -> PictureBatch:
    generator = torch.Generator().manual_seed(seed)
    return PictureBatch(
        pixels=torch.randint(0, 256, (count, 3, 12, 8), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, classes, (count,), generator=generator),
        counts=torch.ones(count, dtype=torch.bool),
        ids=[f"picture {number}" for number in range(count)],
        indices=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.long),
        bad=[],
    )
