from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.vit.blocks import LayerScale
from regard.vit.config import ViTConfig
from regard.vit.model import ViT

SMALL: dict[str, Any] = dict(image_size=(24, 40), patch_size=8, dim=32, depth=3, heads=2, hidden_dim=48)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fill_with_noise(module: nn.Module) -> None:
    """Every parameter random: no bias, gate, register or scale hides behind its initial 0 or 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            spread = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.5
            parameter.normal_(0, spread)
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight += 1
            elif isinstance(part, LayerScale):
                part.gamma += 1


@pytest.fixture
def noisy() -> Callable[[Any], Any]:
    def fill(module: Any) -> Any:
        fill_with_noise(module)
        return module

    return fill


@pytest.fixture
def vit() -> Callable[..., ViT]:
    """Builds a small noise-filled ViT, native grid 3 x 5, with any config field changed."""

    def build(**changes: Any) -> ViT:
        model = ViT(ViTConfig(**{**SMALL, **changes})).eval()
        fill_with_noise(model)
        return model

    return build
