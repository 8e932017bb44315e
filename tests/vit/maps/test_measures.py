"""Agreement of maps and boxes with drawn truth, against counts made by hand."""

import numpy as np
import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps.mass import keep_mass
from regard.vit.maps.measures import box_iou, corloc, jaccard, mask_iou, mass_in_mask, on_pixels, pointing_game, points


def mask(height: int, width: int, top: int, left: int, bottom: int, right: int) -> torch.Tensor:
    drawn = torch.zeros(height, width, dtype=torch.bool)
    drawn[top:bottom, left:right] = True
    return drawn


def peak(grid: tuple[int, int], row: int, column: int) -> torch.Tensor:
    heat = torch.full(grid, 0.001)
    heat[row, column] = 1.0
    return heat


def test_the_oracle_takes_a_head_per_object_and_the_fixed_head_one_for_all():
    # Two objects, each one patch of 2 x 4. Head 0 sees the first whole, head 1 the second, head 2 neither.
    objects = torch.stack([mask(20, 40, 0, 0, 10, 10), mask(20, 40, 10, 30, 20, 40)])
    maps = torch.stack([peak((2, 4), 0, 0), peak((2, 4), 1, 3), peak((2, 4), 0, 2)])
    found = jaccard([maps], [objects], share=0.6)
    assert found.oracle == 1.0
    assert found.fixed == 0.5
    assert found.fixed_head == 0
    assert found.heads == (0.5, 0.5, 0.0)
    # The mean map keeps two of the three peaks, the first two in reading order: the first object and a miss.
    assert found.mean_map == pytest.approx(0.25)
    assert (found.images, found.objects) == (1, 2)
    assert found.oracle >= found.fixed


def test_jaccard_is_a_mean_over_objects_then_images_at_any_size():
    first = jaccard([torch.rand(3, 4, 6)], [torch.rand(2, 40, 60) > 0.5])
    chance = torch.Generator().manual_seed(1)
    maps = [torch.rand(2, 4, 6, generator=chance), torch.rand(2, 3, 5, generator=chance)]
    objects = [torch.rand(3, 40, 60, generator=chance) > 0.6, torch.rand(1, 31, 47, generator=chance) > 0.3]
    found = jaccard(maps, objects, share=0.5)
    best, each, of_mean = [], [], []
    for heads, masks in zip(maps, objects, strict=True):
        rows = []
        for heat in [*heads, heads.mean(dim=0)]:
            kept = keep_mass(heat, 0.5)
            height, width = masks.shape[1:]
            row = []
            for truth in masks:
                both = either = 0
                for y in range(height):
                    for x in range(width):
                        a = bool(kept[y * kept.shape[0] // height, x * kept.shape[1] // width])
                        both += a and bool(truth[y, x])
                        either += a or bool(truth[y, x])
                row.append(both / either)
            rows.append(row)
        table = np.array(rows)
        best.append(table[:-1].max(axis=0).mean())
        each.append(table[:-1].mean(axis=1))
        of_mean.append(table[-1].mean())
    assert found.oracle == pytest.approx(np.mean(best))
    assert found.heads == pytest.approx(tuple(np.mean(each, axis=0)))
    assert found.mean_map == pytest.approx(np.mean(of_mean))
    assert "oracle" in str(first)
    assert first.as_dict()["objects"] == 2


def test_two_masks_that_share_a_third():
    a, b = mask(10, 10, 0, 0, 4, 10), mask(10, 10, 2, 0, 6, 10)
    assert mask_iou(a, b).item() == pytest.approx(20 / 60)
    assert mask_iou(a, ~a).item() == 0
    assert mask_iou(torch.zeros_like(a), torch.zeros_like(a)).item() == 0


def test_the_pointing_game_forgives_exactly_the_tolerance():
    heat = peak((3, 5), 1, 2)  # patches of 9 x 9 px: the peak's centre is pixel (13, 22)
    pixel = torch.zeros(27, 45, dtype=torch.bool)
    pixel[13, 22 + 15] = True
    assert bool(points(heat, pixel, tolerance=14.5))  # from the pixel's edge
    assert not bool(points(heat, pixel, tolerance=14.4))
    on_it = torch.zeros_like(pixel)
    on_it[13, 22] = True
    assert bool(points(heat, on_it, tolerance=0))
    assert pointing_game([heat, heat], [pixel, on_it], tolerance=0) == 0.5


def test_points_are_found_for_a_batch_of_maps_at_once():
    maps = torch.stack([peak((2, 4), 0, 0), peak((2, 4), 1, 3)])
    truth = mask(32, 64, 0, 0, 12, 12)
    assert points(maps, truth, tolerance=0).tolist() == [True, False]
    assert points(maps, truth, tolerance=100).tolist() == [True, True]


def test_a_patch_covered_by_half_counts_by_half():
    heat = torch.tensor([[3.0, 1.0]])
    assert mass_in_mask(heat, mask(8, 16, 0, 0, 8, 8)).item() == pytest.approx(0.75)
    assert mass_in_mask(heat, mask(8, 16, 0, 0, 4, 8)).item() == pytest.approx(0.375)
    assert mass_in_mask(heat, mask(8, 16, 0, 0, 8, 16)).item() == pytest.approx(1.0)
    assert mass_in_mask(torch.zeros(1, 2), mask(8, 16, 0, 0, 8, 8)).item() == 0
    assert mass_in_mask(heat.expand(2, 3, 1, 2), mask(8, 16, 0, 0, 8, 8)).shape == (2, 3)


def test_box_iou_and_corloc_by_hand():
    boxes = torch.tensor([[0, 0, 10, 10], [20, 20, 30, 40]])
    others = torch.tensor([[0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10]])
    assert box_iou(boxes, others)[0].tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    assert box_iou(boxes, others)[1].tolist() == [0.0, 0.0, 0.0]
    half = torch.tensor([0, 0, 10, 5])  # IoU of exactly a half with the first box
    assert corloc([half, half], [boxes, others[1:]]) == 0.5
    assert corloc([half], [boxes], threshold=0.51) == 0.0
    assert corloc([half, half], [torch.zeros(0, 4), boxes]) == 0.5


def test_every_pixel_has_the_value_of_its_patch():
    heat = torch.arange(6.0).view(2, 3)
    expected = np.kron(heat.numpy(), np.ones((4, 5)))
    assert np.array_equal(on_pixels(heat, (8, 15)).numpy(), expected)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="one of each per image"):
        jaccard([torch.rand(2, 3, 3)], [])
    with pytest.raises(InputError, match="they must agree"):
        jaccard([torch.rand(2, 3, 3), torch.rand(1, 3, 3)], [torch.ones(1, 9, 9)] * 2)
    with pytest.raises(InputError, match="not empty"):
        jaccard([torch.rand(2, 3, 3)], [torch.ones(0, 9, 9)])
    with pytest.raises(InputError, match="ends before it begins"):
        box_iou(torch.tensor([[5, 0, 1, 4]]), torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(InputError, match="tolerance"):
        points(torch.rand(2, 2), torch.ones(4, 4), tolerance=-1)
