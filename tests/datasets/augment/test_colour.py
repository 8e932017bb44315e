import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from regard.datasets.augment import colour
from regard.datasets.augment.blur import blur
from regard.datasets.augment.dice import Dice
from regard.vit.errors import InputError

COUNT = 48


def pictures(channels: int, height: int = 19, width: int = 23) -> torch.Tensor:
    """Noise, coarse levels with equal channels by chance, a ramp, and one flat colour."""
    generator = torch.Generator().manual_seed(channels)
    pixels = torch.randint(0, 256, (COUNT, channels, height, width), dtype=torch.uint8, generator=generator)
    pixels[:16] = pixels[:16] // 64 * 64
    pixels[16:20] = torch.linspace(0, 255, width).byte()
    pixels[20] = 77
    return pixels


def strengths(low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(COUNT, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("brightness", 0, 2), ("contrast", 0, 2), ("saturation", 0, 2), ("hue", -0.5, 0.5)],
)
def test_each_part_of_the_jitter_is_torchvisions_within_a_level(channels, name, low, high):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    pixels, strength = pictures(channels), strengths(low, high)
    ours = getattr(colour, name)(pixels, strength)
    theirs = [getattr(functional, f"adjust_{name}")(p, s) for p, s in zip(pixels, strength.tolist(), strict=True)]
    difference = (ours.int() - torch.stack(theirs).int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    assert torch.equal(ours, pixels) == (channels == 1 and name in ("saturation", "hue"))


@pytest.mark.parametrize("channels", [1, 3])
def test_gray_and_solarized_pictures_are_torchvisions(channels):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    pixels = pictures(channels)
    assert torch.equal(colour.grayscale(pixels), functional.rgb_to_grayscale(pixels, channels))
    assert torch.equal(colour.solarize(pixels), functional.solarize(pixels, 128))
    assert torch.equal(colour.solarize(pixels, threshold=30), functional.solarize(pixels, 30))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_kernel_of_nine_is_torchvisions_within_a_level(channels):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    pixels, sigma = pictures(channels), strengths(0.1, 2)
    ours = blur(pixels, sigma, kernel="kernel 9")
    theirs = [functional.gaussian_blur(p, [9, 9], [s, s]) for p, s in zip(pixels, sigma.tolist(), strict=True)]
    assert (ours.int() - torch.stack(theirs).int()).abs().max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(19, 23), (2, 5), (1, 1)])
@pytest.mark.parametrize("most", [2, 5])
def test_the_other_kernel_is_pillows_within_a_level(channels, size, most):
    pixels, sigma = pictures(channels, *size), strengths(0.1, most)
    ours = blur(pixels, sigma)
    for picture, s, result in zip(pixels, sigma.tolist(), ours, strict=True):
        array = picture.permute(1, 2, 0).numpy().squeeze(2 if channels == 1 else ())
        theirs = np.array(Image.fromarray(array).filter(ImageFilter.GaussianBlur(s)))
        difference = np.abs(result.permute(1, 2, 0).numpy().reshape(theirs.shape).astype(int) - theirs)
        assert difference.max() <= 1


def test_the_kernel_of_nine_mirrors_pictures_smaller_than_itself():
    line = torch.tensor([0, 255, 0], dtype=torch.uint8).reshape(1, 1, 1, 3)
    weights = torch.softmax(-0.5 * (torch.arange(-4, 5) / 1.5) ** 2, 0)
    mirrored = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]) * 255  # four more on both sides
    expected = [float((weights * mirrored[start : start + 9]).sum()) for start in range(3)]
    blurred = blur(line, torch.tensor([1.5]), kernel="kernel 9").flatten().tolist()
    assert blurred == [round(value) for value in expected]
    one = torch.full((1, 3, 1, 1), 9, dtype=torch.uint8)
    assert torch.equal(blur(one, torch.tensor([1.0]), kernel="kernel 9"), one)


def test_an_unknown_kernel_is_named():
    with pytest.raises(InputError, match="'box'; choose one of pillow, kernel 9"):
        blur(pictures(1), torch.ones(COUNT), kernel="box")


def test_only_the_pictures_of_the_mask_change():
    pixels, mask = pictures(3), torch.arange(COUNT) % 3 == 0
    mask[20] = False
    strength, dice = torch.full((COUNT,), 0.3), Dice(0, [0] * COUNT, range(COUNT))
    for changed in (
        colour.brightness(pixels, strength, mask),
        colour.hue(pixels, strength, mask),
        colour.grayscale(pixels, mask),
        colour.solarize(pixels, mask),
        blur(pixels, strength + 1, mask),
        colour.jitter(pixels, dice, "jitter", (0.4, 0.4, 0.2, 0.1), mask),
    ):
        assert torch.equal((changed != pixels).flatten(1).any(1)[21:], mask[21:])
        assert torch.equal(changed[~mask], pixels[~mask])


def test_no_function_writes_into_what_it_is_given():
    pixels = pictures(3)
    before = pixels.clone()
    strength, dice = torch.full((COUNT,), 0.3), Dice(0, [0] * COUNT, range(COUNT))
    for changed in (
        colour.contrast(pixels, strength),
        colour.saturation(pixels, strength),
        colour.solarize(pixels),
        blur(pixels, strength + 1),
        colour.jitter(pixels, dice, "jitter", (0.4, 0.4, 0.2, 0.1)),
        colour.jitter(pixels, dice, "jitter", (0.0, 0.0, 0.0, 0.0)),
    ):
        changed += 1
    assert torch.equal(pixels, before)


def test_the_jitter_is_its_four_parts_in_the_drawn_order():
    pixels, dice = pictures(3), Dice(0, [0] * COUNT, range(COUNT))
    factors, order = dice.uniform("j factors", 4), dice.uniform("j order", 4).argsort(1)
    factors = torch.tensor([0.6, 0.6, 0.8, -0.1]) + factors * torch.tensor([0.8, 0.8, 0.4, 0.2])
    parts = (colour.brightness, colour.contrast, colour.saturation, colour.hue)
    expected = pixels
    for step in range(4):
        for number, part in enumerate(parts):
            expected = part(expected, factors[:, number], order[:, step] == number)
    jittered = colour.jitter(pixels, dice, "j", (0.4, 0.4, 0.2, 0.1))
    assert (jittered.int() - expected.int()).abs().max() <= 1
    assert (jittered == expected).float().mean() > 0.999
    assert len({tuple(row) for row in order.tolist()}) > 15  # of 24 orders


def test_the_factors_of_the_jitter_fill_their_ranges():
    count = 20_000
    dice = Dice(0, [0] * count, range(count))
    white = torch.full((count, 1, 1, 1), 255, dtype=torch.uint8)
    factor = colour.jitter(white, dice, "j", (0.4, 0.0, 0.0, 0.0)).flatten().double() / 255
    assert 0.6 - 1 / 255 <= factor.min() < 0.605
    assert abs((factor == 1).double().mean() - 0.5) < 4 * (0.25 / count) ** 0.5  # above 1 white stays white
