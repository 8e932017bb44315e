import math

import numpy as np
import pytest
import torch
from PIL import Image

from regard.datasets.augment.dice import Dice
from regard.datasets.augment.geometry import crop_boxes, erase, erase_boxes, flip, resample, shift, whole_boxes
from regard.vit.errors import InputError


def dice_of(count: int, seed: int = 0) -> Dice:
    return Dice(seed, [0] * count, range(count))


def pillow(pixels: torch.Tensor, box: list[float], size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """One picture's box by Pillow, across before down: newer versions may begin with the other pass."""
    top, left, height, width = box
    array = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    method = Image.Resampling[interpolation.upper()]
    image = Image.fromarray(array.contiguous().numpy())
    image = image.resize((size[1], image.height), method, (left, 0, left + width, image.height))
    image = image.resize((size[1], size[0]), method, (0, top, size[1], top + height))
    return torch.from_numpy(np.array(image)).reshape(*size, len(pixels)).permute(2, 0, 1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 40, 61), (24, 31)),
        ((3, 7, 13), (24, 31)),
        ((1, 28, 28), (12, 12)),
        ((1, 1, 1), (5, 7)),
        ((3, 90, 33), (9, 17)),
    ],
)
def test_resampling_is_pillows_within_a_level(interpolation, shape, size):
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (16, *shape), dtype=torch.uint8)
    pixels[8:] = (pixels[8:] > 127) * 255  # hard edges: bicubic overshoots and is cut off between the passes
    boxes = crop_boxes([shape[1:]] * 16, dice_of(16), "crop")
    boxes[0] = whole_boxes([shape[1:]])[0]
    ours = resample(pixels, boxes, size, interpolation)
    for row in range(16):
        theirs = pillow(pixels[row], boxes[row].tolist(), size, interpolation)
        assert (ours[row].int() - theirs.int()).abs().max() <= 1


def test_a_box_may_begin_and_end_within_a_pixel():
    pixels = torch.randint(0, 256, (1, 3, 30, 41), dtype=torch.uint8)
    box = [2.3, 4.75, 17.6, 30.1]
    ours = resample(pixels, torch.tensor([box], dtype=torch.float64), (12, 50), "bicubic")
    assert (ours[0].int() - pillow(pixels[0], box, (12, 50), "bicubic").int()).abs().max() <= 1


def test_the_whole_picture_at_its_own_size_is_left_alone():
    pixels = torch.randint(0, 256, (4, 3, 9, 14), dtype=torch.uint8)
    assert torch.equal(resample(pixels, whole_boxes([(9, 14)] * 4), (9, 14)), pixels)
    part = torch.tensor([[2, 3, 5, 6]] * 4)
    assert torch.equal(resample(pixels, part, (5, 6)), pixels[:, :, 2:7, 3:9])


def test_resampling_keeps_up_and_left_where_they_are():
    down = torch.arange(0, 240, 10, dtype=torch.uint8)[:, None].expand(24, 36)
    across = torch.arange(0, 252, 7, dtype=torch.uint8)[None].expand(24, 36)
    pixels = torch.stack((down, across))[:, None]
    small = resample(pixels, torch.tensor([[4, 3, 16, 30]] * 2), (4, 10), "bilinear")
    assert (small[0, 0, 1:, 4].int() - small[0, 0, :-1, 4].int() == 40).all()
    assert (small[1, 0, 2, 1:].int() - small[1, 0, 2, :-1].int() == 21).all()
    assert (small[0, 0].amax(1) == small[0, 0].amin(1)).all()


def test_an_unknown_filter_is_named():
    with pytest.raises(InputError, match="'nearest'; choose one of bilinear, bicubic"):
        resample(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), whole_boxes([(4, 4)]), (2, 2), "nearest")


def test_crops_lie_within_the_picture_on_whole_pixels():
    sizes = [(1, 1), (1, 50), (50, 1), (37, 91), (2, 3), (224, 224)] * 50
    top, left, height, width = crop_boxes(sizes, dice_of(300), "crop").unbind(1)
    tall, wide = torch.tensor(sizes).double().unbind(1)
    assert (torch.stack((top, left, height, width)) % 1 == 0).all()
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= tall).all()
    assert (left + width <= wide).all()


def test_crops_have_the_distribution_of_torchvisions():
    transforms = pytest.importorskip("torchvision.transforms")
    count, scale, ratio, size = 4000, (0.3, 1.0), (0.6, 1.2), (60, 100)
    picture = torch.zeros(1, *size)
    torch.manual_seed(0)
    theirs = torch.tensor(
        [transforms.RandomResizedCrop.get_params(picture, list(scale), list(ratio)) for _ in range(count)]
    ).double()
    ours = crop_boxes([size] * count, dice_of(count), "crop", scale, ratio)
    for column in range(4):
        points = torch.linspace(0, float(size[1]), 201).double()
        share = [(boxes[:, column, None] <= points).double().mean(0) for boxes in (ours, theirs)]
        # the two-sample Kolmogorov-Smirnov distance at a level of 0.1 %
        assert (share[0] - share[1]).abs().max() < 1.95 * math.sqrt(2 / count)


def test_every_place_of_a_crop_and_of_an_erased_box_is_as_likely():
    count = 20_000
    crops = crop_boxes([(2, 3)] * count, dice_of(count), "crop", (1 / 6, 1 / 6), (1.0, 1.0))
    erased = erase_boxes((2, 3), dice_of(count), "erase", (1 / 6, 1 / 6), (1.0, 1.0))
    for boxes in (crops, erased):
        assert (boxes[:, 2:] == 1).all()
        places = torch.bincount((3 * boxes[:, 0] + boxes[:, 1]).long(), minlength=6) / count
        assert len(places) == 6
        assert (places - 1 / 6).abs().max() < 4 * (5 / 36 / count) ** 0.5


@pytest.mark.parametrize("size", [(10, 400), (400, 10)])
def test_where_no_crop_fits_the_centre_is_taken_as_torchvision_does(size):
    transforms = pytest.importorskip("torchvision.transforms")
    theirs = transforms.RandomResizedCrop.get_params(torch.zeros(1, *size), [0.9, 1.0], [3 / 4, 4 / 3])
    ours = crop_boxes([size] * 3, dice_of(3), "crop", (0.9, 1.0))
    assert ours.tolist() == [list(map(float, theirs))] * 3


def test_only_the_pictures_of_the_mask_are_mirrored():
    pixels = torch.randint(0, 256, (3, 2, 4, 7), dtype=torch.uint8)
    flipped = flip(pixels, torch.tensor([True, False, True]))
    assert torch.equal(flipped[1], pixels[1])
    assert torch.equal(flipped[::2], pixels[::2].flip(-1))


def test_a_shift_moves_down_and_right_and_repeats_the_edge():
    pixels = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4).repeat(2, 2, 1, 1)
    moved = shift(pixels, torch.tensor([1, -2]), torch.tensor([2, 0]))
    assert moved[0, 1].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [4, 4, 4, 5]]
    assert moved[1, 0].tolist() == [[8, 9, 10, 11]] * 3
    assert torch.equal(shift(pixels, torch.tensor([0, 0]), torch.tensor([0, 0])), pixels)


def test_erased_boxes_have_the_distribution_of_torchvisions():
    transforms = pytest.importorskip("torchvision.transforms")
    count, area, ratio, size = 4000, (0.02, 0.33), (0.3, 1.5), (30, 50)
    picture = torch.zeros(1, *size)
    torch.manual_seed(0)
    theirs = torch.tensor(
        [transforms.RandomErasing.get_params(picture, area, ratio, [0.0])[:4] for _ in range(count)]
    ).double()
    ours = erase_boxes(size, dice_of(count), "erase", area, ratio)
    for column in range(4):
        points = torch.linspace(0, float(size[1]), 201).double()
        share = [(boxes[:, column, None] <= points).double().mean(0) for boxes in (ours, theirs)]
        assert (share[0] - share[1]).abs().max() < 1.95 * math.sqrt(2 / count)


def test_only_the_box_is_erased_and_a_picture_of_one_pixel_never():
    pixels = torch.full((2, 3, 6, 9), 50, dtype=torch.uint8)
    boxes = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    erased = erase(pixels, boxes, torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None])
    assert torch.equal(erased[1], pixels[1])
    assert (erased[0, :, 1:4, 2:6].flatten(1).unique(dim=1) == torch.tensor([[1], [2], [3]])).all()
    assert (erased[0] != 50).sum() == 3 * 12
    assert not erase_boxes((1, 1), dice_of(50), "erase")[:, 2:].any()
