"""The formula for a ViT's cost agrees with published figures and with what a counter sees a real model do."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.vit import ViT
from regard.vit.config import ViTConfig, preset_config
from regard.vit.flops import distill_flops, forward_macs, training_flops

SMALL: dict[str, Any] = {"image_size": (48, 80), "dim": 32, "heads": 4, "depth": 3, "classes": 7}


def counted(run: Any, size: tuple[int, int], backward: bool = False) -> int:
    """FLOPs of `run(images)` on one image, by torch's counter; attention as its two products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = run(torch.randn(1, 3, *size))
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


# GMACs as timm publishes them in its benchmark tables.
@pytest.mark.parametrize(("name", "published"), [("small", 4.61), ("base", 17.58), ("large", 61.60)])
def test_presets_cost_what_timm_publishes(name: str, published: float) -> None:
    config = preset_config(name, patch_size=16, image_size=(224, 224), classes=1000)
    assert forward_macs(config) / 1e9 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "swiglu", "hidden_dim": 40},
        {"registers": 4, "pooling": "cls+mean"},
        {"class_token": False, "pooling": "map"},
        {"class_token": False, "pooling": "map", "activation": "swiglu"},
        {"head_dim": 24, "qk_norm": True},
        {"positions": "rope", "registers": 2},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
@pytest.mark.parametrize("size", [(48, 80), (32, 32), (100, 50)])
def test_the_formula_is_what_a_counter_sees(changes: dict[str, Any], size: tuple[int, int]) -> None:
    model = ViT(ViTConfig(**{**SMALL, **changes}))
    assert forward_macs(model.config, size) * 2 == pytest.approx(counted(model.classify, size), rel=0.01)


@pytest.mark.parametrize(("policy", "grid"), [("resize", (6, 3)), ("pad", (7, 4)), ("crop", (6, 3))])
def test_sides_are_counted_as_the_size_policy_makes_them(policy: Any, grid: tuple[int, int]) -> None:
    config = ViTConfig(**{**SMALL, "size_policy": policy})
    assert forward_macs(config, (100, 50)) == forward_macs(config, (grid[0] * 16, grid[1] * 16))
    assert ViT(config)(torch.zeros(1, 3, 100, 50)).grid == grid


def test_training_costs_three_forward_passes() -> None:
    config = preset_config("small", patch_size=16, image_size=(224, 224), classes=1000)
    with torch.device("meta"):
        seen = counted(ViT(config).classify, (224, 224), backward=True)
    assert training_flops(config) == pytest.approx(seen, rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("name", ["small", "base"])
def test_timms_own_model_costs_the_same(name: str) -> None:
    import timm

    with torch.device("meta"):
        seen = counted(timm.create_model(f"vit_{name}_patch16_224", pretrained=False), (224, 224))
    config = preset_config(name, patch_size=16, image_size=(224, 224), classes=1000)
    assert forward_macs(config) * 2 == pytest.approx(seen, rel=0.01)


@pytest.mark.parametrize(("name", "gflops"), [("small", 113.8), ("base", 436), ("large", 1527)])
def test_dino_costs_about_four_times_supervised_training(name: str, gflops: float) -> None:
    config = preset_config(name, patch_size=16, image_size=(224, 224))
    assert distill_flops(config) / 1e9 == pytest.approx(gflops, rel=0.01)
    assert 3.9 < distill_flops(config) / training_flops(config) < 4.3


def test_distillation_is_the_sum_of_what_its_networks_do() -> None:
    config = ViTConfig(**{**SMALL, "classes": 0, "pooling": "cls"})
    sizes = {"global_size": (48, 80), "local_size": (32, 48)}
    head = torch.nn.Sequential(
        *(torch.nn.Linear(a, b, bias=False) for a, b in [(32, 2048), (2048, 2048), (2048, 256), (256, 512)])
    )
    model = ViT(config)

    def student(images: torch.Tensor) -> torch.Tensor:
        return head(model.pool(model(images)))

    seen = 2 * counted(student, (48, 80), backward=True) + 3 * counted(student, (32, 48), backward=True)
    seen += 2 * counted(torch.no_grad()(student), (48, 80))
    assert distill_flops(config, local_crops=3, prototypes=512, **sizes) == pytest.approx(seen, rel=0.015)
