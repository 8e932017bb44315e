"""iBOT's masks and loss."""

import random

import pytest
import torch

from regard.train.distill.ibot import MaskPlan, block_mask, draw_masks, ibot_loss

GRID = (14, 10)


def test_half_the_crops_are_masked_by_ratios_spread_over_the_bins() -> None:
    plan = MaskPlan()
    for seed in range(20):
        masks = draw_masks(16, GRID, plan, random.Random(seed))
        counts = masks.masked.sum(dim=1)
        masked = counts[counts > 0].sort().values.float() / 140
        assert len(masked) == 8
        # One in each bin of [0.1, 0.5]: at most that bin's end, and blocks seldom leave much of it open.
        ends = torch.linspace(0.1, 0.5, 9)[1:]
        assert (masked <= ends + 1e-6).all()
        assert masked.mean() > 0.2


def test_draws_are_functions_of_the_dice() -> None:
    one, same, other = (draw_masks(8, GRID, MaskPlan(), random.Random(seed)).masked for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_which_crop_gets_which_ratio_is_random() -> None:
    counts = torch.stack([draw_masks(8, GRID, MaskPlan(), random.Random(s)).masked.sum(1) for s in range(400)]).float()
    assert ((counts > 0).float().mean(0) - 0.5).abs().max() < 0.12
    assert (counts.mean(0) - counts.mean()).abs().max() < 0.2 * counts.mean()


def test_a_mask_is_made_of_blocks_and_never_exceeds_what_is_wanted() -> None:
    for seed in range(50):
        wanted = 1 + seed
        mask = torch.from_numpy(block_mask(GRID, wanted, MaskPlan(), random.Random(seed)))
        assert 1 <= int(mask.sum()) <= wanted
    neighbours, masked = 0, 0
    for seed in range(50):
        mask = torch.from_numpy(block_mask(GRID, 40, MaskPlan(), random.Random(seed)))
        masked += int(mask[:, :-1].sum())
        neighbours += int((mask[:, :-1] & mask[:, 1:]).sum())
    assert neighbours / masked > 0.6  # scattered patches would have 40 / 140


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2), (3, 4)])
def test_tiny_grids_have_masks_too(grid: tuple[int, int]) -> None:
    masks = draw_masks(4, grid, MaskPlan(), random.Random(0))
    assert int((masks.masked.sum(1) > 0).sum()) == 2


def test_the_loss_is_the_mean_over_crops_of_means_over_masked_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = draw_masks(6, GRID, MaskPlan(), random.Random(3))
    z = torch.randn(6, 140, 9, generator=generator, dtype=torch.float64)
    q = torch.softmax(torch.randn(6, 140, 9, generator=generator, dtype=torch.float64), -1)
    expected = 0.0
    for crop in range(6):
        places = masks.masked[crop].nonzero()[:, 0]
        each = [float(-(q[crop, n] * torch.log_softmax(z[crop, n] / 0.1, -1)).sum()) for n in places]
        expected += sum(each) / max(len(each), 1) / 6
    rows = [tensor.flatten(0, 1).index_select(0, masks.places) for tensor in (z, q)]
    assert float(ibot_loss(*rows, masks, 0.1)) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(masks.places, masks.masked.flatten().nonzero()[:, 0])
