import numpy as np
import pytest
import torch

from regard.datasets.augment.dice import Dice
from regard.datasets.augment.mix import mix, soft_targets
from regard.vit.errors import InputError

CLASSES = 7


def batch(count: int = 6, height: int = 9, width: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    pixels = torch.rand(count, 3, height, width, generator=generator)
    return pixels, torch.arange(count) % CLASSES


def dice_of(count: int, epoch: int = 0, first: int = 0) -> Dice:
    return Dice(3, [epoch] * count, range(first, first + count))


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, CLASSES).float()


def test_mixup_is_a_weighted_mean_of_pictures_and_of_labels():
    pixels, labels = batch()
    mixed, targets = mix(pixels, labels, dice_of(6), classes=CLASSES, mixup_alpha=1.0, cutmix_alpha=0.0)
    keep = float(targets[0, 0])  # picture 0 is of class 0, its partner of another
    assert 0 < keep < 1
    assert torch.allclose(mixed, keep * pixels + (1 - keep) * pixels.flip(0), atol=1e-6)
    assert torch.allclose(targets, keep * one_hot(labels) + (1 - keep) * one_hot(labels.flip(0)), atol=1e-6)


def test_the_area_that_cutmix_took_is_the_share_of_the_labels():
    pixels, labels = batch()
    shares = set()
    for epoch in range(30):
        mixed, targets = mix(pixels, labels, dice_of(6, epoch), classes=CLASSES, mixup_alpha=0.0, cutmix_alpha=1.0)
        taken = (mixed != pixels).any(1)
        assert torch.equal(mixed, torch.where(taken[:, None], pixels.flip(0), pixels))
        assert torch.equal(taken, taken[:1].expand_as(taken))  # one box for the whole batch
        rows, columns = taken[0].any(1).nonzero()[:, 0], taken[0].any(0).nonzero()[:, 0]
        if len(rows):
            assert taken[0, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        share = taken[0].float().mean()
        assert torch.allclose(targets[0, 0], 1 - share, atol=1e-6)
        shares.add(round(float(share), 3))
    assert len(shares) > 10


def test_the_targets_are_timms_smoothing_included():
    timm = pytest.importorskip("timm.data.mixup")
    pixels, labels = batch()
    _, plain = mix(pixels, labels, dice_of(6), classes=CLASSES, cutmix_alpha=0.0)
    _, smooth = mix(pixels, labels, dice_of(6), classes=CLASSES, cutmix_alpha=0.0, smoothing=0.1)
    keep = float(plain[0, 0])
    assert torch.allclose(smooth, timm.mixup_target(labels, CLASSES, keep, 0.1), atol=1e-6)
    assert torch.allclose(smooth.sum(1), torch.ones(6))


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)])
def test_a_batch_of_one_stays_as_it_is_with_its_label(alphas):
    pixels, labels = batch(1)
    for epoch in range(20):
        mixed, targets = mix(
            pixels, labels, dice_of(1, epoch), classes=CLASSES, mixup_alpha=alphas[0], cutmix_alpha=alphas[1]
        )
        assert torch.equal(mixed, pixels)
        assert torch.equal(targets, one_hot(labels))


def test_the_middle_of_an_odd_batch_stays_as_it_is():
    pixels, labels = batch(5)
    mixed, targets = mix(pixels, labels, dice_of(5), classes=CLASSES, cutmix_alpha=0.0)
    assert torch.equal(mixed[2], pixels[2])
    assert torch.equal(targets[2], one_hot(labels)[2])
    assert not torch.equal(mixed[1], pixels[1])


def test_a_draw_is_repeated_after_a_resume_and_differs_between_epochs_and_batches():
    pixels, labels = batch()
    first = mix(pixels, labels, dice_of(6, 2, 100), classes=CLASSES)
    torch.rand(3)
    np.random.rand(3)
    again = mix(pixels, labels, dice_of(6, 2, 100), classes=CLASSES)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for other in (dice_of(6, 3, 100), dice_of(6, 2, 106)):
        assert not torch.equal(first[0], mix(pixels, labels, other, classes=CLASSES)[0])


def test_nothing_is_written_into_the_batch():
    pixels, labels = batch()
    before = pixels.clone(), labels.clone()
    for epoch in range(10):
        mix(pixels, labels, dice_of(6, epoch), classes=CLASSES)
    assert torch.equal(pixels, before[0])
    assert torch.equal(labels, before[1])


def test_lambdas_kinds_and_chances_have_their_distribution():
    count, pixels, labels = 3000, torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).repeat(1, 1, 2, 2), torch.tensor([0, 1])
    keeps, kinds = [], []
    for epoch in range(count):
        mixed, targets = mix(
            pixels, labels, dice_of(2, epoch), classes=2, mixup_alpha=0.4, cutmix_alpha=1.0, probability=0.6, switch=0.3
        )
        values = mixed[0].unique()
        if torch.equal(mixed, pixels) and targets[0, 0] == 1:
            kinds.append("none or empty")
        elif len(values) == 1 and 0 < values[0] < 1:
            kinds.append("mixup")
            keeps.append(float(targets[0, 0]))
        else:
            kinds.append("cutmix")
    share = kinds.count("mixup") / count
    assert abs(share - 0.6 * 0.7) < 4 * (0.42 * 0.58 / count) ** 0.5
    assert kinds.count("none or empty") / count > 0.4 - 4 * (0.24 / count) ** 0.5
    drawn = torch.tensor(keeps)
    assert abs(drawn.mean() - 0.5) < 4 * drawn.std() / len(keeps) ** 0.5
    variance = 0.4 * 0.4 / (0.8**2 * 1.8)  # of Beta(0.4, 0.4)
    assert abs(drawn.var() - variance) < 0.1 * variance


def test_without_any_mixing_the_pictures_are_passed_on():
    pixels, labels = batch()
    for changes in ({"mixup_alpha": 0.0, "cutmix_alpha": 0.0}, {"probability": 0.0}):
        mixed, targets = mix(pixels, labels, dice_of(6), classes=CLASSES, smoothing=0.1, **changes)
        assert mixed is pixels
        assert torch.allclose(targets, soft_targets(labels, CLASSES, 0.1))


def test_a_picture_without_a_label_has_no_target():
    pixels, labels = batch()
    labels[5] = -1
    mixed, targets = mix(pixels, labels, dice_of(6), classes=CLASSES, cutmix_alpha=0.0, smoothing=0.1)
    assert torch.equal(soft_targets(labels, CLASSES, 0.1)[5], torch.zeros(CLASSES))
    assert torch.allclose(targets[0] + targets[5], soft_targets(labels[:1], CLASSES, 0.1)[0])
    assert mixed.isfinite().all()


@pytest.mark.parametrize(
    "changes", [{"mixup_alpha": -1}, {"cutmix_alpha": float("nan")}, {"probability": 1.5}, {"smoothing": -0.1}]
)
def test_settings_out_of_range_are_named(changes):
    pixels, labels = batch()
    with pytest.raises(InputError, match=next(iter(changes))):
        mix(pixels, labels, dice_of(6), classes=CLASSES, **changes)
