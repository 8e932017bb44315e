"""oneDNN's products in an eager pass on a CPU: where they run, where they must not, and their numbers."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.vit import fused


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch) -> None:
    monkeypatch.setattr(fused, "LARGE", 0)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 40)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture
def products(monkeypatch):
    """Counts the calls of oneDNN's product, and of the one with a sum inside."""
    if fused._POINTWISE is None:
        pytest.skip("this torch has no such product")
    counts = {"alone": 0, "with a sum": 0}

    def counted(name, product):
        def call(*args):
            counts[name] += 1
            return product(*args)

        return call

    monkeypatch.setattr(fused, "_POINTWISE", counted("alone", fused._POINTWISE))
    monkeypatch.setattr(fused, "_POINTWISE_SUM", counted("with a sum", fused._POINTWISE_SUM))
    return counts


def test_without_gradients_every_product_of_a_block_is_onednns(vit, images, products):
    model = vit()
    with torch.inference_mode():
        model(images)
    blocks = len(model.blocks)
    assert products == {"alone": 4 * blocks, "with a sum": 2 * blocks}  # q, k, v and fc1; out and fc2


def test_a_few_rows_of_a_large_weight_are_worth_it_and_one_is_not(monkeypatch, products):
    monkeypatch.setattr(fused, "LARGE", 30 * 32)
    layer = nn.Linear(32, 30)
    with torch.no_grad():
        for rows, calls in ((1, 0), (2, 1), (3, 2)):
            x = torch.randn(rows, 32)
            assert distance(fused.linear(x, layer), layer(x)) < 1e-6
            assert products["alone"] == calls


def test_products_that_know_no_gradients_take_no_part_in_training(vit, images, products):
    model = vit()
    model(images).patches.sum().backward()
    pixels = images.clone().requires_grad_()
    model.requires_grad_(False)(pixels).patches.sum().backward()
    assert pixels.grad is not None
    assert products == {"alone": 0, "with a sum": 0}


def test_flop_counters_see_the_products(vit, images, products):
    model = vit()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    assert counter.get_total_flops() > 0
    assert products == {"alone": 0, "with a sum": 0}


def test_without_onednn_the_ordinary_product_runs(vit, images, products):
    model = vit()
    with torch.no_grad():
        want = model(images).patches
        before = dict(products)
        with torch.backends.mkldnn.flags(enabled=False):
            assert distance(model(images).patches, want) < 1e-6
    assert products == before
