"""DINO's mass threshold."""

import itertools

import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps.mass import keep_mass


def test_the_papers_example_keeps_the_two_largest():
    assert keep_mass(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), 0.6).tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.05, 0.4, 0.6, 0.95])
def test_the_kept_mass_is_the_least_that_reaches_the_share(seed, share):
    maps = torch.rand(3, 2, 7, 11, generator=torch.Generator().manual_seed(seed)).pow(4)
    kept = keep_mass(maps, share)
    assert kept.shape == maps.shape
    assert kept.dtype == torch.bool
    for values, mask in zip(maps.double().flatten(0, 1), kept.flatten(0, 1), strict=True):
        mass, smallest = values[mask].sum() / values.sum(), values[mask].min() / values.sum()
        assert mass >= share - 1e-12
        assert mass - smallest <= share
        assert values[mask].min() >= values[~mask].max()


def test_it_is_the_ascending_sum_of_dinos_script():
    """Sorted upwards, patches are kept from where the running sum of shares exceeds 1 - share."""
    values = torch.rand(40, dtype=torch.float64)
    ranked, order = values.sort()
    theirs = torch.zeros(40, dtype=torch.bool)
    theirs[order] = (ranked / ranked.sum()).cumsum(0) > 0.4
    assert torch.equal(keep_mass(values.view(5, 8), 0.6).flatten(), theirs)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 3.0, 7e5])
@pytest.mark.parametrize("count", [5, 10, 15, 20])
def test_the_scale_of_a_map_does_not_matter_even_where_the_share_falls_between_two_patches(scale, count):
    even = torch.full((1, count), scale, dtype=torch.float64)
    assert keep_mass(even, 0.6).sum() == count * 3 // 5


def test_of_equal_patches_the_earlier_is_kept():
    maps = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 5.0]])
    assert keep_mass(maps, 0.7).tolist() == [[True, True, False], [False, False, True]]


def test_more_share_never_drops_a_patch():
    maps = torch.rand(6, 9)
    masks = [keep_mass(maps, share / 20) for share in range(1, 21)]
    assert all((small <= large).all() for small, large in itertools.pairwise(masks))


def test_sixteen_thousand_patches_are_summed_exactly():
    """In float32 the running sum would stand still long before its end."""
    maps = torch.full((128, 128), 1e-4)
    maps[0, 0] = 2e4
    total = 2e4 + (128 * 128 - 1) * float(torch.tensor(1e-4))
    kept = int(keep_mass(maps, (2e4 + 1000.5 * 1e-4) / total).sum())
    assert kept in (1001, 1002)


def test_all_of_a_map_is_what_it_holds_and_an_empty_map_holds_nothing():
    maps = torch.tensor([[0.0, 1.0], [2.0, 1e-20]])
    assert keep_mass(maps, 1).tolist() == [[False, True], [True, True]]
    assert not keep_mass(torch.zeros(2, 3, 4)).any()
    assert keep_mass(torch.zeros(0, 3, 4)).shape == (0, 3, 4)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_maps_are_taken(half):
    assert keep_mass(torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=half)).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(
    ("maps", "share", "words"),
    [
        (torch.ones(2, 2), 0.0, "share is 0.0"),
        (torch.ones(2, 2), 60, "share is 60"),
        (torch.tensor([[1.0, -1.0]]), 0.6, "below 0"),
        (torch.tensor([[1.0, torch.nan]]), 0.6, "finite"),
        (torch.ones(4), 0.6, "not \\(4,\\)"),
    ],
)
def test_what_is_no_map_or_share_is_refused(maps, share, words):
    with pytest.raises(InputError, match=words):
        keep_mass(maps, share)
