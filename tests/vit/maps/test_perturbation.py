"""Pixels taken away in the order of a map: which ones, what stands for them, and what the curves say."""

import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps.perturbation import (
    Curve,
    deletion,
    insertion,
    negative_perturbation,
    perturbed,
    positive_perturbation,
)


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randint(1, 256, (2, 3, 8, 12), dtype=torch.uint8)


def heat() -> torch.Tensor:
    """Maps of 2 x 3 patches of 4 x 4 px: the first picture's left column matters most, the second's last patch."""
    return torch.tensor([[[9.0, 2.0, 1.0], [8.0, 3.0, 0.0]], [[0.0, 1.0, 2.0], [3.0, 4.0, 9.0]]])


def test_the_strongest_patches_go_first_and_become_black_pixels(pixels):
    gone = perturbed(pixels, heat(), 2 / 6)
    assert gone.dtype == torch.uint8
    expected = pixels.clone()
    expected[0, :, :, :4] = 0
    expected[1, :, 4:, 4:] = 0
    assert torch.equal(gone, expected)
    kept = perturbed(pixels, heat(), 2 / 6, insert=True)
    assert torch.equal(kept, pixels - expected)


def test_the_weakest_go_first_when_asked(pixels):
    gone = perturbed(pixels, heat(), 1 / 6, "least")
    expected = pixels.clone()
    expected[0, :, 4:, 8:] = 0
    expected[1, :, :4, :4] = 0
    assert torch.equal(gone, expected)


def test_part_of_a_patch_goes_in_reading_order(pixels):
    gone = perturbed(pixels, heat(), 4 / 96)[0]
    assert (gone[:, 0, :4] == 0).all()
    assert torch.equal(gone[:, 1:], pixels[0, :, 1:])
    assert torch.equal(perturbed(pixels, heat(), 0.0), pixels)
    assert not perturbed(pixels, heat(), 1.0).any()


def test_every_share_changes_just_that_many_pixels(pixels):
    for share in (0.1, 0.25, 0.5, 0.9):
        gone = (perturbed(pixels, torch.rand(2, 2, 3), share) == 0).all(dim=1)
        assert gone.sum(dim=(1, 2)).tolist() == [round(share * 96)] * 2


def test_pixels_are_black_before_the_normalisation_not_mean_coloured_after_it(vit, pixels):
    preprocess = vit().preprocess
    met = []

    def score(changed):
        met.append(preprocess.normalize(changed))
        return changed.float().mean(dim=(1, 2, 3))

    deletion(score, pixels, heat(), shares=[0.5, 1.0])
    black = -torch.tensor(preprocess.mean) / torch.tensor(preprocess.std)
    torch.testing.assert_close(met[-1], black[:, None, None].expand_as(met[-1]))
    assert torch.equal(met[0][0, :, :, 11], preprocess.normalize(pixels)[0, :, :, 11])


def test_a_map_that_is_right_deletes_fast_and_inserts_fast():
    """The score is the brightness of one patch; a map that points at it is compared with one that points elsewhere."""
    pixels = torch.full((1, 1, 16, 16), 0.5)
    pixels[..., 4:8, 8:12] = 1.0
    right, wrong = torch.zeros(1, 4, 4), torch.arange(16.0).view(1, 4, 4)
    right[0, 1, 2] = 1
    wrong[0, 1, 2] = -1

    def score(changed):
        return changed[:, 0, 4:8, 8:12].mean(dim=(1, 2))

    shares = [i / 16 for i in range(17)]
    for fill in (0.0, "mean", "blur"):
        assert deletion(score, pixels, right, fill=fill).auc < deletion(score, pixels, wrong, fill=fill).auc
        assert insertion(score, pixels, right, fill=fill).auc > insertion(score, pixels, wrong, fill=fill).auc
    assert deletion(score, pixels, right, shares).values[0].tolist() == [1.0] + [0.0] * 16
    assert insertion(score, pixels, right, shares, fill=0.0).values[0].tolist() == [0.0] + [1.0] * 16
    assert deletion(score, pixels, right, shares).auc == pytest.approx(0.5 / 16)
    assert positive_perturbation(score, pixels, right).auc == pytest.approx(0.0)
    assert negative_perturbation(score, pixels, right).auc == pytest.approx(1.0)


def test_the_area_is_the_mean_height_of_the_curve():
    curve = Curve("x", (0.1, 0.5, 0.9), torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64))
    assert curve.mean.tolist() == [1.0, 0.5, 0.5]
    assert curve.auc == pytest.approx(0.625)
    assert curve.as_dict() == {"kind": "x", "shares": [0.1, 0.5, 0.9], "mean": [1.0, 0.5, 0.5], "auc": curve.auc}


def test_filling_with_a_blur_or_a_mean_leaves_an_even_picture_as_it_is():
    even = torch.full((2, 3, 9, 20), 90, dtype=torch.uint8)
    for fill in ("blur", "mean"):
        assert torch.equal(perturbed(even, torch.rand(2, 3, 4), 0.7, fill=fill), even)


def test_mistakes_are_named(pixels):
    def score(changed):
        return changed.float().mean()

    with pytest.raises(InputError, match=r"one value per image"):
        deletion(score, pixels, heat())
    with pytest.raises(InputError, match=r"\(B, C, height, width\) and \(B, gh, gw\)"):
        deletion(score, pixels, heat()[:1])
    with pytest.raises(InputError, match=r"share is 1\.5"):
        perturbed(pixels, heat(), 1.5)
    with pytest.raises(InputError, match="each larger"):
        deletion(score, pixels, heat(), shares=[0.5, 0.5])
    with pytest.raises(InputError, match="not finite"):
        perturbed(pixels, heat() * torch.nan, 0.5)
    with pytest.raises(InputError, match="'mean' or 'blur'"):
        perturbed(pixels, heat(), 0.5, fill="grey")
