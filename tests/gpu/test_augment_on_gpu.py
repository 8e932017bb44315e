"""Augmentation on device tensors, with the draws on the host; skipped where there is no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.datasets.augment import colour, geometry
from regard.datasets.augment.blur import blur
from regard.datasets.augment.dice import Dice
from regard.datasets.augment.mix import mix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
COUNT, SIZE = 8, (19, 33)
DICE = Dice(0, [0] * COUNT, range(COUNT))
MASK = DICE.happens("mask", 0.5)
STRENGTH = DICE.between("strength", 0.1, 2.0)[:, 0]
STEPS = DICE.integers("steps", 5, 2) - 2
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "resample": lambda pixels: geometry.resample(pixels, geometry.crop_boxes([SIZE] * COUNT, DICE, "crop"), (9, 14)),
    "flip": lambda pixels: geometry.flip(pixels, MASK),
    "shift": lambda pixels: geometry.shift(pixels, STEPS[:, 0], STEPS[:, 1]),
    "erase": lambda pixels: geometry.erase(
        pixels, geometry.erase_boxes(SIZE, DICE, "erase"), torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
    ),
    "brightness": lambda pixels: colour.brightness(pixels, STRENGTH, MASK),
    "contrast": lambda pixels: colour.contrast(pixels, STRENGTH),
    "saturation": lambda pixels: colour.saturation(pixels, STRENGTH, MASK),
    "hue": lambda pixels: colour.hue(pixels, STRENGTH / 4, MASK.to(pixels.device)),
    "grayscale": lambda pixels: colour.grayscale(pixels, MASK),
    "solarize": lambda pixels: colour.solarize(pixels, MASK),
    "pillow": lambda pixels: blur(pixels, STRENGTH, MASK),
    "kernel 9": lambda pixels: blur(pixels, STRENGTH, MASK, "kernel 9"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_device_pixels_become_those_of_the_cpu_within_a_level(name: str) -> None:
    pixels = torch.randint(0, 256, (COUNT, 3, *SIZE), dtype=torch.uint8)
    expected, changed = CHANGES[name](pixels), CHANGES[name](pixels.cuda())
    assert changed.is_cuda
    assert (changed.cpu().int() - expected.int()).abs().max() <= 1
    assert not torch.equal(expected, pixels)


def test_the_jitter_of_device_pixels_is_that_of_the_cpu() -> None:
    pixels = torch.randint(0, 256, (COUNT, 3, *SIZE), dtype=torch.uint8)
    expected, changed = (
        colour.jitter(given, DICE, "jitter", (0.4, 0.4, 0.2, 0.1), MASK).cpu().int()
        for given in (pixels, pixels.cuda())
    )
    assert (changed - expected).abs().max() <= 3  # four parts, each within a level
    assert (changed - expected).abs().float().mean() < 0.01


@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0)])
def test_mixing_on_the_device_is_that_of_the_cpu_and_waits_for_nothing(alphas: tuple[float, float]) -> None:
    pixels, labels = torch.rand(COUNT, 3, *SIZE), torch.arange(COUNT)
    options = {"classes": COUNT, "mixup_alpha": alphas[0], "cutmix_alpha": alphas[1], "smoothing": 0.1}
    expected = mix(pixels, labels, DICE, **options)
    given = pixels.cuda(), labels.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed = mix(*given, DICE, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, cpu in zip(mixed, expected, strict=True):
        assert torch.allclose(ours.cpu(), cpu, atol=1e-6)
