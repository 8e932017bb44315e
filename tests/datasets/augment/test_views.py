from dataclasses import replace

import pytest
import torch
from PIL import Image

from regard.datasets.augment import colour
from regard.datasets.augment.blur import blur
from regard.datasets.augment.dice import Dice
from regard.datasets.augment.geometry import crop_boxes, flip
from regard.datasets.augment.three_augment import three_augment
from regard.datasets.augment.views import CentreView, CropsView, TrainView
from regard.datasets.raws import ArrayRaws, FileRaws
from regard.vit import Preprocess
from regard.vit.errors import InputError

DRAWS = 20_000
EVERYTHING = TrainView(
    (10, 14),
    shift=2,
    color_jitter=(0.4, 0.4, 0.2, 0.1),
    rand_augment="rand-m9-n2-mstd0.5-inc1",
    three_augment=True,
    erase=0.7,
)
CROPS = CropsView((10, 14), (5, 4), local_crops=3)
STILL = CropsView(
    *((9, 9), (9, 9), 2, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),
    **{"flip": 0.0, "jitter": 0.0, "grayscale": 0.0, "solarize": 0.0},
    **{"blur_first": 0.0, "blur_second": 0.0, "blur_local": 0.0},
)


def dice_of(rows: list[int], epoch: int = 0) -> Dice:
    return Dice(1, [epoch] * len(rows), rows)


def pictures(count: int, channels: int = 3, height: int = 17, width: int = 29) -> torch.Tensor:
    generator = torch.Generator().manual_seed(channels)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def crops_of(view, raws, dice) -> list[torch.Tensor]:
    result = view(raws, dice)
    return result if isinstance(result, list) else [result]


def drawn(view: CropsView, picture: torch.Tensor) -> list[torch.Tensor]:
    """Many draws of the crops of one small picture `(C, 9, 9)`."""
    raws = ArrayRaws(picture.expand(DRAWS, *picture.shape))
    return view(raws, dice_of(list(range(DRAWS))))


def assert_frequency(happened: torch.Tensor, probability: float) -> None:
    assert len(happened) == DRAWS
    share = float(happened.double().mean())
    assert abs(share - probability) <= 4 * (probability * (1 - probability) / DRAWS) ** 0.5


@pytest.mark.parametrize("view", [EVERYTHING, CROPS, replace(CROPS, blur="v2")])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_becomes_the_same_in_every_batch_and_another_in_every_epoch(view, channels):
    pixels, order = pictures(7, channels), [4, 0, 6, 2]
    whole = crops_of(view, ArrayRaws(pixels), dice_of(list(range(7))))
    mixed = crops_of(view, ArrayRaws(pixels[order]), dice_of(order))
    alone = crops_of(view, ArrayRaws(pixels[5:6]), dice_of([5]))
    later = crops_of(view, ArrayRaws(pixels), dice_of(list(range(7)), epoch=1))
    for crop in range(len(whole)):
        assert torch.equal(whole[crop][order], mixed[crop])
        assert torch.equal(whole[crop][5:6], alone[crop])
        assert (whole[crop] != later[crop]).flatten(1).any(1).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (17, 29)])
def test_pictures_of_every_size_give_crops_of_the_size_asked_for(channels, size):
    pixels = pictures(5, channels, *size)
    assert EVERYTHING(ArrayRaws(pixels), dice_of(list(range(5)))).shape == (5, channels, 10, 14)
    crops = CROPS(ArrayRaws(pixels), dice_of(list(range(5))))
    assert [crop.shape[2:] for crop in crops] == [(10, 14)] * 2 + [(5, 4)] * 3
    assert {crop.dtype for crop in crops} == {torch.uint8}


def test_pictures_of_different_sizes_and_their_files_make_one_batch():
    images = [Image.effect_noise((width, height), 90).convert("RGB") for height, width in ((9, 30), (44, 21), (1, 1))]
    raws = FileRaws(images)
    assert EVERYTHING(raws, dice_of([0, 1, 2])).shape == (3, 3, 10, 14)
    crops = CROPS(raws, dice_of([0, 1, 2]))
    alone = CROPS(FileRaws(images[1:2]), dice_of([1]))
    for crop, own in zip(crops, alone, strict=True):
        assert torch.equal(crop[1:2], own)


def test_up_stays_up_and_only_a_flip_exchanges_left_and_right():
    down = torch.arange(0, 170, 10, dtype=torch.uint8)[:, None].expand(17, 29)
    across = torch.arange(0, 232, 8, dtype=torch.uint8).expand(17, 29)
    raws = ArrayRaws(torch.stack((down, across))[:, None].repeat(20, 1, 1, 1))
    still = replace(CROPS, jitter=0.0, solarize=0.0, blur_first=0.0, blur_second=0.0, blur_local=0.0)
    for mirrored in (0.0, 1.0):
        views = [TrainView((10, 14), flip=mirrored), replace(still, flip=mirrored)]
        crops = [crop.int() for view in views for crop in crops_of(view, raws, dice_of(list(range(40))))]
        for crop in crops:
            steps_down, steps_across = crop[::2].diff(dim=2), crop[1::2].diff(dim=3)
            assert (steps_down >= 0).all()
            assert (steps_down.sum(2) > 0).all()
            assert ((steps_across <= 0) if mirrored else (steps_across >= 0)).all()
            assert (steps_across.sum(3) != 0).all()


def test_the_centre_view_is_the_models_preprocessing():
    pixels = pictures(3)
    preprocess = Preprocess(size=(8, 11), fit="crop", crop_ratio=0.9)
    view = CentreView(preprocess)(ArrayRaws(pixels), dice_of([0, 1, 2]))
    assert torch.equal(view, torch.stack([preprocess.pixels(picture) for picture in pixels]))


def test_without_any_augmentation_the_whole_picture_is_squashed():
    view = TrainView((17, 29), crop_scale=None, flip=0.0)
    pixels = pictures(3)
    assert torch.equal(view(ArrayRaws(pixels), dice_of([0, 1, 2])), pixels)


def test_training_flips_shifts_and_erases_as_often_as_it_says():
    picture = torch.arange(81, dtype=torch.uint8).reshape(1, 9, 9).expand(DRAWS, 1, 9, 9)
    dice = dice_of(list(range(DRAWS)))
    still = TrainView((9, 9), crop_scale=None, flip=0.0)
    flipped = replace(still, flip=0.3)(ArrayRaws(picture), dice)
    assert_frequency((flipped == picture.flip(-1)).flatten(1).all(1), 0.3)
    shifted = replace(still, shift=2)(ArrayRaws(picture), dice)
    for down in range(-2, 3):
        for right in range(-2, 3):
            assert_frequency(shifted[:, 0, 4, 4] == 40 - 9 * down - right, 1 / 25)
    erased = replace(still, erase=0.25, erase_with="fill", fill=(255,))(ArrayRaws(picture), dice)
    area = (erased == 255).flatten(1).double().mean(1)
    assert_frequency(area > 0, 0.25)
    assert 0.3 < area.max() < 0.4
    noisy = replace(still, erase=1.0)(ArrayRaws(picture), dice)
    new = noisy[noisy != picture].long()
    assert new.unique().numel() == 256
    assert abs(new.double().mean() - 127.5) < 3


@pytest.mark.parametrize(("recipe", "first", "second", "local"), [("v1", 1.0, 0.1, 0.5), ("v2", 0.0, 0.9, 0.5)])
def test_crops_are_blurred_as_often_as_released(recipe, first, second, local):
    picture = pictures(1, 1, 9, 9)[0]
    view = replace(STILL, blur=recipe, blur_first=None, blur_second=None, blur_local=None)
    kernel = "pillow" if recipe == "v1" else "kernel 9"
    sigma = torch.linspace(0.1, 2.0, 2001)
    visible = (blur(picture.expand(2001, 1, 9, 9), sigma, kernel=kernel) != picture).flatten(1).any(1).double().mean()
    assert visible > 0.9  # a very small sigma changes no level
    for crop, probability in zip(drawn(view, picture), (first, second, local, local), strict=True):
        assert_frequency((crop != picture).flatten(1).any(1), probability * float(visible))


def test_other_probabilities_of_the_blur_are_taken():
    picture = pictures(1, 1, 9, 9)[0]
    view = replace(STILL, blur_first=0.0, blur_second=1.0, blur_local=0.2, blur_sigma=(1.0, 2.0))
    for crop, probability in zip(drawn(view, picture), (0.0, 1.0, 0.2, 0.2), strict=True):
        assert_frequency((crop != picture).flatten(1).any(1), probability)


def test_only_the_second_large_crop_is_solarized():
    white = torch.full((1, 9, 9), 255, dtype=torch.uint8)
    for crop, probability in zip(drawn(replace(STILL, solarize=0.2), white), (0.0, 0.2, 0.0, 0.0), strict=True):
        assert_frequency((crop == 0).flatten(1).all(1), probability)


def test_each_crop_is_flipped_grayed_and_jittered_as_often_as_it_says_and_on_its_own():
    picture = torch.tensor([200, 100, 20], dtype=torch.uint8)[:, None, None].repeat(1, 9, 9)
    ramp = torch.arange(0, 225, 25, dtype=torch.uint8).expand(1, 9, 9)
    flipped = [(crop == ramp.flip(-1)).flatten(1).all(1) for crop in drawn(replace(STILL, flip=0.5), ramp)]
    grayed = [(crop[:, 0] == crop[:, 2]).flatten(1).all(1) for crop in drawn(replace(STILL, grayscale=0.2), picture)]
    jittered = [(crop != picture).flatten(1).any(1) for crop in drawn(replace(STILL, jitter=0.8), picture)]
    for happened, probability in ((flipped, 0.5), (grayed, 0.2), (jittered, 0.8)):
        for number, one in enumerate(happened):
            assert_frequency(one, probability)
            for other in happened[number + 1 :]:
                assert_frequency(one & other, probability**2)


def test_the_choices_for_one_crop_do_not_depend_on_each_other():
    colours = torch.tensor([200, 100, 20], dtype=torch.uint8)[:, None, None].repeat(1, 9, 9)
    crop = drawn(replace(STILL, jitter=0.8, grayscale=0.3), colours)[0]
    grayed = (crop[:, 0] == crop[:, 2]).flatten(1).all(1)
    still = torch.where(grayed[:, None, None, None], colour.grayscale(colours[None]), colours)
    assert_frequency(grayed & (crop != still).flatten(1).any(1), 0.8 * 0.3)
    noise = pictures(1, 1, 9, 9)
    view = replace(STILL, flip=0.4, blur_second=0.3, blur_sigma=(1.0, 2.0), solarize=0.2)
    crop = drawn(view, noise[0])[1]
    for mirrored, flips in ((noise, 0.6), (noise.flip(-1), 0.4)):
        for inverted, solarizes in ((mirrored, 0.8), (colour.solarize(mirrored), 0.2)):
            assert_frequency((crop == inverted).flatten(1).all(1), flips * solarizes * 0.7)


def test_three_augment_is_gray_or_solarized_or_blurred_a_third_each_before_a_light_jitter():
    picture = pictures(1, 3, 9, 9)
    dice = dice_of(list(range(DRAWS)))
    changed = three_augment(picture.expand(DRAWS, 3, 9, 9), dice, strength=0.0)
    gray, inverted = colour.grayscale(picture), colour.solarize(picture)
    assert_frequency((changed == gray).flatten(1).all(1), 1 / 3)
    assert_frequency((changed == inverted).flatten(1).all(1), 1 / 3)
    rest = (changed != gray).flatten(1).any(1) & (changed != inverted).flatten(1).any(1)
    sigma = dice.between("three augment blur", 0.1, 2.0)[:, 0][rest]
    assert sigma.min() < 0.11
    assert sigma.max() > 1.99
    assert torch.equal(changed[rest], blur(picture.expand(len(sigma), 3, 9, 9), sigma))
    jittered = colour.jitter(changed, dice, "three augment jitter", (0.3, 0.3, 0.3, 0.0))
    assert torch.equal(three_augment(picture.expand(DRAWS, 3, 9, 9), dice), jittered)


def test_a_crop_is_cropped_flipped_jittered_grayed_blurred_and_solarized_in_this_order():
    pixels = pictures(6)
    view = replace(CROPS, flip=1.0, jitter=1.0, grayscale=1.0, blur_second=1.0, solarize=1.0)
    dice = dice_of(list(range(6))).each(["global 1"])
    raws = ArrayRaws(pixels)
    expected = flip(
        raws.cut(crop_boxes(raws.sizes, dice, "crop", (0.4, 1.0)), (10, 14)), torch.ones(6, dtype=torch.bool)
    )
    expected = colour.grayscale(colour.jitter(expected, dice, "jitter", (0.4, 0.4, 0.2, 0.1)))
    expected = colour.solarize(blur(expected, dice.between("sigma", 0.1, 2.0)[:, 0]))
    assert torch.equal(view(raws, dice_of(list(range(6))))[1], expected)


def test_large_crops_cover_more_of_the_picture_than_small_ones():
    across = torch.linspace(0, 255, 64).byte().expand(300, 1, 64, 64)
    view = replace(STILL, global_scale=(0.4, 1.0), local_scale=(0.05, 0.4), crop_ratio=(3 / 4, 4 / 3))
    crops = view(ArrayRaws(across), dice_of(list(range(300))))
    spans = [(crop[:, 0, 4, -1].int() - crop[:, 0, 4, 0].int()).double() / 255 for crop in crops]
    for span, (least, most) in zip(spans, [(0.4, 1.0)] * 2 + [(0.05, 0.4)] * 2, strict=True):
        assert 0.75 * (least * 0.75) ** 0.5 < span.min() < span.max() < (most * 4 / 3) ** 0.5
    assert min(spans[0].mean(), spans[1].mean()) > 1.5 * max(spans[2].mean(), spans[3].mean())
    assert not torch.equal(crops[2], crops[3])


def test_without_small_crops_two_large_ones_are_left():
    crops = replace(CROPS, local_crops=0)(ArrayRaws(pictures(2)), dice_of([0, 1]))
    assert [crop.shape for crop in crops] == [(2, 3, 10, 14)] * 2


def test_a_view_leaves_the_pictures_it_is_given_as_they_are():
    pixels = pictures(8)
    before = pixels.clone()
    for view in (EVERYTHING, CROPS, replace(EVERYTHING, size=(17, 29), crop_scale=None)):
        view(ArrayRaws(pixels), dice_of(list(range(8))))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainView((0, 4)), "TrainView.size"),
        (lambda: TrainView((4, 4), flip=1.5), "TrainView.flip is 1.5"),
        (lambda: TrainView((4, 4), crop_scale=(0.5, 0.1)), "TrainView.crop_scale"),
        (lambda: TrainView((4, 4), crop_scale=(0.5, 1.1)), "at most 1"),
        (lambda: TrainView((4, 4), shift=-1), "TrainView.shift"),
        (lambda: TrainView((4, 4), color_jitter=(0.4, 0.4)), "TrainView.color_jitter"),
        (lambda: TrainView((4, 4), fill=(1, 2)), "TrainView.fill"),
        (lambda: TrainView((4, 4), rand_augment="rand-z9"), "rand-z9"),
        (lambda: TrainView((4, 4), interpolation="cubic"), "TrainView.interpolation is 'cubic'; choose one of"),
        (lambda: CropsView(blur="v3"), "CropsView.blur is 'v3'; choose one of v1, v2"),
        (lambda: CropsView(blur_local=-0.1), "CropsView.blur_local"),
        (lambda: CropsView(color_jitter=(0.4, 0.4, 0.2, 0.6)), "CropsView.color_jitter"),
        (lambda: CropsView(local_crops=-1), "CropsView.local_crops"),
    ],
)
def test_a_wrong_setting_is_named(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
