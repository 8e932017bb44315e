import math
import random

import numpy as np
import pytest
import torch
from PIL import Image

from regard.datasets.augment import rand_augment as module
from regard.datasets.augment.dice import Dice
from regard.datasets.augment.rand_augment import RandAugment, parse_rand_augment, rand_augment
from regard.vit.errors import InputError

SPELLING = "rand-m9-n2-mstd0.5-inc1"


def dice_of(count: int) -> Dice:
    return Dice(0, [0] * count, range(count))


def picture(mode: str) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (21, 34, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((34, 21)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("operation", sorted({*RandAugment().operations, *RandAugment(increasing=True).operations}))
@pytest.mark.parametrize("magnitude", [0, 3, 9.5, 10])
def test_each_operation_is_timms_at_the_same_magnitude(mode, operation, magnitude, monkeypatch):
    theirs = pytest.importorskip("timm.data.auto_augment")
    fill = (10, 20, 30) if mode == "RGB" else 20
    hparams = {"img_mean": fill, "interpolation": Image.Resampling.BILINEAR, "translate_pct": 0.45}
    timms = theirs.AugmentOp(operation, prob=1.0, magnitude=magnitude, hparams=hparams)
    for negative in (False, True):
        monkeypatch.setattr(random, "random", lambda negative=negative: 0.9 if negative else 0.1)
        strength = module.strength_of(operation, magnitude, negative=negative)
        if operation.startswith("Posterize") and strength == 0:  # Pillow 13 refuses what timm asks for; it was black
            expected = Image.new(mode, picture(mode).size)
        else:
            expected = timms(picture(mode))
        ours = module.apply(operation, picture(mode), strength, fill=fill, interpolation="bilinear")
        assert ours.mode == expected.mode
        assert ours.tobytes() == expected.tobytes()


@pytest.mark.parametrize("increasing", [False, True])
def test_the_operations_are_timms(increasing):
    theirs = pytest.importorskip("timm.data.auto_augment")
    assert list(RandAugment(increasing=increasing).operations) == theirs.rand_augment_choices("", increasing)


@pytest.mark.parametrize(
    "spelling", [SPELLING, "rand", "rand-m7-n3-p0.8", "rand-m15-mmax20", "rand-m5-mstd101-inc0", "rand-n1-mstdinf"]
)
def test_a_spelling_means_what_it_means_in_timm(spelling):
    theirs = pytest.importorskip("timm.data.auto_augment")
    ours = parse_rand_augment(spelling)
    if "inf" not in spelling:  # timm passes over what it does not understand
        timms = theirs.rand_augment_transform(spelling, {})
        operation = timms.ops[0]
        assert (ours.magnitude, ours.layers, ours.probability) == (
            operation.magnitude,
            timms.num_layers,
            operation.prob,
        )
        assert ours.deviation == operation.magnitude_std
        assert ours.most == (operation.magnitude_max or 10)
        assert list(ours.operations) == [operation.name for operation in timms.ops]
    else:
        assert math.isinf(ours.deviation)


@pytest.mark.parametrize(
    "spelling",
    [
        *("", "augmix-m5", "original", "rand-x3", "rand-m", "rand-mfive", "rand-m9-m8", "rand-n0"),
        *("rand-p2", "rand-inc2", "rand-tweights", "rand-m9.5", "rand-minf", "rand-m9-", "rand_m9"),
    ],
)
def test_an_unknown_spelling_says_what_is_known(spelling):
    with pytest.raises(InputError, match=r"as in rand-m9-n2-mstd0\.5-inc1") as caught:
        parse_rand_augment(spelling)
    assert "\n" not in str(caught.value)


def test_magnitudes_have_their_distribution():
    dice = dice_of(20_000)
    normal = module._magnitudes(parse_rand_augment("rand-m5-n1-mstd0.5"), dice, "a").flatten()
    assert abs(normal.mean() - 5) < 4 * 0.5 / 20_000**0.5
    assert abs(normal.std() - 0.5) < 4 * 0.5 / (2 * 20_000) ** 0.5
    bounded = module._magnitudes(parse_rand_augment("rand-m9-n1-mstd2"), dice, "a")
    assert bounded.max() == 10
    uniform = module._magnitudes(parse_rand_augment("rand-m8-n1-mstd101"), dice, "a").flatten()
    assert (torch.histc(uniform, 8, 0, 8) / 20_000 - 1 / 8).abs().max() < 4 * (7 / 64 / 20_000) ** 0.5


def test_operations_chances_and_signs_are_drawn_as_often_as_they_should(monkeypatch):
    count, seen = 20_000, []
    monkeypatch.setattr(
        module, "apply", lambda operation, image, strength, **_: seen.append((operation, strength)) or image
    )
    rand_augment(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), dice_of(count), "rand-m5-n2-inc1")
    assert abs(len(seen) / (2 * count) - 0.5) < 4 * (0.25 / (2 * count)) ** 0.5
    for operation in RandAugment(increasing=True).operations:
        share = sum(name == operation for name, _ in seen) / len(seen)
        assert abs(share - 1 / 15) < 4 * (14 / 225 / len(seen)) ** 0.5
    turns = [strength for name, strength in seen if name == "Rotate"]
    assert set(turns) == {-15.0, 15.0}
    assert abs(turns.count(15.0) / len(turns) - 0.5) < 4 * (0.25 / len(turns)) ** 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_changed_alike_in_every_batch_and_pictures_without_a_draw_stay(channels):
    pixels = torch.randint(0, 256, (24, channels, 13, 9), dtype=torch.uint8)
    whole = rand_augment(pixels, dice_of(24), SPELLING)
    for row in (0, 7, 23):
        assert torch.equal(whole[row : row + 1], rand_augment(pixels[row : row + 1], Dice(0, [0], [row]), SPELLING))
    applied = (dice_of(24).uniform("rand augment applied", 2) < 0.5).any(1)
    assert 0 < applied.sum() < 24
    assert torch.equal(whole[~applied], pixels[~applied])
    assert not torch.equal(whole[applied], pixels[applied])
    assert not torch.equal(whole, rand_augment(pixels, Dice(0, [1] * 24, range(24)), SPELLING))


def test_what_comes_in_has_the_colour_of_fill():
    pixels = torch.full((200, 3, 8, 8), 255, dtype=torch.uint8)
    moved = rand_augment(pixels, dice_of(200), "rand-m10-n1-p1-inc1", fill=(1, 2, 3))
    assert (moved == torch.tensor([1, 2, 3])[:, None, None]).all(1).flatten(1).any(1).sum() > 10
    one = rand_augment(pixels, dice_of(200), "rand-m10-n1-p1-inc1", fill=(7,))
    assert (one == 7).all(1).flatten(1).any(1).sum() > 10
    gray = rand_augment(pixels[:, :1], dice_of(200), "rand-m10-n1-p1-inc1", fill=(1, 2, 3))
    assert (gray == 2).flatten(1).any(1).sum() > 10
