"""Token norms and outlier patches: an outlier planted in a given layer is found there and not before."""

import json

import pytest
import torch
from PIL import Image

from regard.vit.errors import InputError
from regard.vit.maps.norms import (
    PAPER,
    OutlierRule,
    bimodality,
    neighbour_cosine,
    outlier_report,
    token_norms,
    widest_gap,
)
from regard.vit.maps.trace import passages
from regard.vit.model import ViT

WHERE = [(3, 1), (0, 4)]  # the bright patch of each image


def test_norms_are_of_the_stream_before_the_final_norm(vit):
    model, images = vit(registers=2, registers_place="end"), torch.randn(2, 3, 16, 40)
    norms = token_norms(model, images)
    assert (norms.cls.shape, norms.registers.shape, norms.patches.shape) == ((2, 3), (2, 3, 2), (2, 3, 2, 5))
    for layer, tokens in enumerate(model.intermediates(images, "all")):
        assert torch.equal(norms.cls[:, layer], tokens.cls.norm(dim=-1))
        assert torch.equal(norms.registers[:, layer], tokens.registers.norm(dim=-1))
        assert torch.equal(norms.patches[:, layer].flatten(1), tokens.patches.norm(dim=-1))
    normed = model(images).patches.norm(dim=-1)
    assert not torch.allclose(norms.patches[:, -1].flatten(1), normed, rtol=0.1)


def test_layers_come_in_the_order_asked_for_and_only_as_many_run_as_are_needed(vit, monkeypatch):
    model, images = vit(), torch.randn(1, 3, 16, 40)
    everything = token_norms(model, images)
    monkeypatch.setattr(model.blocks[2], "forward", lambda *a: pytest.fail("the last layer was not asked for"))
    some = token_norms(model, images, [1, 0])
    assert some.layers == (1, 0)
    assert torch.equal(some.patches, everything.patches[:, [1, 0]])


def test_norms_of_half_precision_do_not_overflow(vit):
    model = vit(positions="none").half()
    with torch.no_grad():
        model.blocks[2].mlp.fc2.bias.fill_(6e4)
    assert torch.isfinite(token_norms(model, torch.randn(1, 3, 16, 40).half()).patches).all()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_outlier_planted_in_a_layer_is_found_from_that_layer_on(vit, plant, bright, layer):
    model = vit(positions="none", registers=2)
    plant(model, layer, 7)
    report = outlier_report(model, bright)
    assert 8 < report.norms.peaks()[:, layer].min() < 14
    for image, place in enumerate(WHERE):
        for number in range(3):
            assert report.positions(image, number) == ([place] if number >= layer else [])
    from_here = report.fraction[:, layer:]
    torch.testing.assert_close(from_here, torch.full_like(from_here, 1 / 24))
    assert (report.gap[:, layer] > 5).all()
    assert (report.bimodality[:, layer] > 0.9).all()
    assert (report.cosine[:, layer:] < report.cosine_others[:, layer:]).all()
    assert report.cosine[:, :layer].isnan().all()


def test_the_paper_s_cut_off_is_a_length(vit, plant, bright):
    model = vit(positions="none")
    plant(model, 0, 7)
    assert PAPER.cutoff == 150
    norms = token_norms(model, bright)
    longest = norms.patches.flatten(2).amax(-1)
    low, high = OutlierRule(cutoff=longest.min().item() * 0.9), OutlierRule(cutoff=longest.max().item() * 1.1)
    assert outlier_report(model, bright, 0, rule=low).positions(0, 0)[0] == WHERE[0]
    assert not outlier_report(model, bright, "all", rule=high).found.any()


def test_an_image_is_judged_by_its_own_patches_alone(vit, plant, bright):
    model = vit(positions="none")
    plant(model, 1, 7)
    both = outlier_report(model, torch.cat((bright, bright.flip(0))))
    for image in range(2):
        alone = outlier_report(model, bright[image : image + 1])
        for name in ("found", "fraction", "gap", "received"):
            for index in (image, 3 - image):
                torch.testing.assert_close(
                    getattr(both, name)[index], getattr(alone, name)[0], equal_nan=True, rtol=1e-4, atol=1e-5
                )


def test_the_attention_on_outliers_is_what_the_next_layer_gives_them(vit, plant, bright):
    model = vit(positions="none", registers=2)
    plant(model, 0, 7)
    report = outlier_report(model, bright)
    for passage in passages(model, bright, [1, 2]):
        dense = passage.attn.weights(passage.q.double(), passage.kv.k.double()).mean((1, 2))  # (B, S)
        want = torch.stack([dense[image, 3 + row * 6 + column] for image, (row, column) in enumerate(WHERE)])
        torch.testing.assert_close(report.received[:, passage.layer - 1].double(), want, rtol=1e-5, atol=1e-6)
    assert report.received[:, 2].isnan().all()


def test_the_robust_rule_needs_both_conditions_and_no_spread():
    norms = torch.full((4, 6), 10.0)
    assert not OutlierRule()(norms).any()
    norms[1, 2] = 29.0  # infinitely many deviations, but not three medians
    assert not OutlierRule()(norms).any()
    norms[1, 2] = 31.0
    assert OutlierRule()(norms).nonzero().tolist() == [[1, 2]]
    wide = torch.linspace(1, 100, 24).view(4, 6)
    wide[0, 0] = 200.0  # over three medians, but within eight deviations
    assert not OutlierRule()(wide).any()


def test_bimodality_and_gap_tell_two_kinds_from_one():
    torch.manual_seed(0)
    one = (torch.randn(100, 100) * 0.1).exp()
    two = torch.ones(100, 100)
    two[0, :10] = 10.0
    assert bimodality(one).item() == pytest.approx(1 / 3, abs=0.02)
    assert bimodality(two).item() == pytest.approx(1, abs=1e-4)
    assert bimodality(torch.ones(3, 4)).isnan()
    assert widest_gap(two).item() == pytest.approx(10)
    assert widest_gap(one).item() < 1.2


def test_neighbour_cosine_equals_a_loop():
    patches = torch.randn(2, 5, 3, 4)
    got = neighbour_cosine(patches)
    for row in range(3):
        for column in range(4):
            near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
            near = [(r, c) for r, c in near if 0 <= r < 3 and 0 <= c < 4]
            each = [torch.cosine_similarity(patches[:, :, row, column], patches[:, :, r, c]) for r, c in near]
            torch.testing.assert_close(got[:, row, column], torch.stack(each).mean(0))
    assert (neighbour_cosine(patches[:, :, :1, :1]) == 0).all()


def test_a_report_reads_as_a_table_and_as_json(vit, plant, bright):
    model = vit(positions="none")
    plant(model, 1, 7)
    report = outlier_report(model, bright)
    lines = str(report).splitlines()
    assert "2 images" in lines[0]
    assert len(lines) == 2 + 3
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["norms"]["layers"] == [0, 1, 2]
    assert "reg1" in str(token_norms(vit(registers=2), torch.randn(1, 3, 16, 40)))


def test_mistakes_are_named(vit):
    with pytest.raises(InputError, match="layer 3"):
        token_norms(vit(), torch.randn(1, 3, 16, 40), 3)
    with pytest.raises(InputError, match="no layers"):
        token_norms(vit(), torch.randn(1, 3, 16, 40), [])
    with pytest.raises(InputError, match="cutoff"):
        OutlierRule(cutoff=-1)
    with pytest.raises(InputError, match="not in this report"):
        outlier_report(vit(), torch.randn(1, 3, 16, 40), 0).positions(0, 2)


def test_maps_of_a_model_without_a_class_token(vit):
    norms = token_norms(vit(class_token=False, pooling="mean"), torch.randn(2, 3, 16, 40))
    assert norms.cls is None
    assert "cls" not in str(norms)


def test_dinov2_small_has_no_outliers_at_any_layer(dinov2_small):
    """Darcet et al. find them in DINOv2's L and g alone; its S is clean, by either rule."""
    pictures = pytest.importorskip("skimage.data", reason="scikit-image, whose photographs are looked at, is absent")
    model = ViT.from_pretrained(dinov2_small)
    images = model.preprocess([Image.fromarray(getattr(pictures, name)()) for name in ("astronaut", "chelsea")])
    norms = token_norms(model, images)
    assert not OutlierRule()(norms.patches).any()
    assert not PAPER(norms.patches).any()
    assert (norms.peaks() < 2).all()
