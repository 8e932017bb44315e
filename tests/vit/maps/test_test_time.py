"""Test-time registers: a planted unit that writes outliers is found, and what it writes moves to a register."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps import attention_rows
from regard.vit.maps.norms import OutlierRule, token_norms
from regard.vit.maps.registers import register_report
from regard.vit.maps.sinks import sink_report
from regard.vit.maps.test_time import (
    RegisterUnit,
    RegisterUnits,
    find_register_units,
    random_units,
    with_test_time_registers,
)
from regard.vit.model import ViT

LAYER, UNIT = 1, 7
LAYOUTS = {
    "class token": {},
    "no class token": dict(class_token=False, pooling="mean"),
    "registers of its own": dict(registers=2),
    "registers of its own at the end": dict(registers=2, registers_place="end"),
    "swiglu, layer scale": dict(activation="swiglu", layer_scale=0.5),
    "sub-norms, pre-norm": dict(attn_norm=True, mlp_norm=True, pre_norm=True),
}


def given(*units: tuple[int, int]) -> RegisterUnits:
    return RegisterUnits(tuple(RegisterUnit(*u, 1.0) for u in units), 2, OutlierRule(), 1, 0)


@pytest.fixture
def planted(vit, plant):
    model = vit(positions="none")
    plant(model, LAYER, UNIT)
    return model


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_planted_unit_is_found_first(vit, plant, bright, sign):
    model = vit(positions="none", registers=1)
    plant(model, LAYER, UNIT, sign)
    found = find_register_units(model, bright, layer=-1, top_k=3)
    assert (found.units[0].layer, found.units[0].unit) == (LAYER, UNIT)
    assert found.units[0].score > 2 * found.units[1].score
    assert (found.layer, found.images, found.without) == (2, 2, 0)
    alone = find_register_units(model, bright, layer=1, top_layer=0, top_k=1)
    assert alone.units[0].layer == 0  # a layer above `top_layer` does not count


def test_the_score_is_the_mean_over_images_of_the_mean_at_their_outliers(planted, bright):
    images = torch.cat((bright, torch.zeros(1, 3, 32, 48)))
    images[0, :, :8, :8] = 2.0  # a second outlier in the first image alone
    rule = OutlierRule(deviations=2, times=1.5)
    (mask,) = rule(token_norms(planted, images, 1).patches).unbind(1)
    found = find_register_units(planted, images, layer=1, top_k=96, rule=rule)
    assert mask.sum((1, 2)).tolist() == [2, 1, 0]
    assert (found.images, found.without) == (2, 1)
    captured = {}
    for number in (0, 1):
        fc2 = planted.blocks[number].mlp.fc2
        handle = fc2.register_forward_pre_hook(lambda m, a, number=number: captured.update({number: a[0].abs()}))
        planted(images)
        handle.remove()
    for unit in found.units:
        patches = captured[unit.layer][:, 1:, unit.unit]
        want = torch.stack([patches[i][mask[i].flatten()].mean() for i in (0, 1)]).mean()
        assert unit.score == pytest.approx(want.item(), rel=1e-4, abs=1e-6)
    assert len(found.units) == 96
    assert [u.score for u in found.units] == sorted((u.score for u in found.units), reverse=True)


def test_batches_pictures_and_one_tensor_say_the_same(planted, bright):
    planted.config = dataclasses.replace(
        planted.config, preprocess=dataclasses.replace(planted.preprocess, size=None, mean=(0.5,) * 3, std=(0.5,) * 3)
    )
    pictures = [np.zeros((32, 48, 3), dtype=np.uint8) for _ in range(2)]
    pictures[0][8:16, 8:16] = 255
    pictures[1][24:32, 16:24] = 200
    rule = OutlierRule(deviations=1, times=1.01)
    images = planted.preprocess(pictures)
    want = find_register_units(planted, images, layer=1, rule=rule)
    for given_as in (pictures, [images[:1], images[1:]], (image for image in images.split(1))):
        got = find_register_units(planted, given_as, layer=1, rule=rule)
        assert [(u.layer, u.unit) for u in got.units] == [(u.layer, u.unit) for u in want.units]
        assert got.images == want.images


def test_units_that_are_busy_everywhere_can_be_left_out(planted, bright):
    with torch.no_grad():  # a unit that is the most active of all, but on every patch
        planted.blocks[0].mlp.fc1.bias[3] = 500.0
        planted.blocks[0].mlp.fc2.weight[:, 3] = 0
    assert find_register_units(planted, bright, layer=1, top_k=1).units[0].unit == 3
    quiet = find_register_units(planted, bright, layer=1, top_k=1, quiet=0.5)
    assert (quiet.units[0].layer, quiet.units[0].unit) == (LAYER, UNIT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_norm_moves_to_the_register_in_every_image_of_a_batch(vit, plant, bright, layout, sign):
    model = vit(positions="none", **LAYOUTS[layout])
    plant(model, LAYER, UNIT, sign)
    own = model.config.registers
    moved = with_test_time_registers(model, given((LAYER, UNIT)))
    before, after = token_norms(model, bright, LAYER), token_norms(moved, bright, LAYER)
    assert after.registers.shape == (2, 1, own + 1)
    assert (before.peaks() > 6).all()
    assert (after.peaks() < 3).all()
    assert (after.registers[..., -1] > 5 * after.medians()).all()
    tokens = moved(bright)
    assert tokens.registers.shape == (2, own + 1, 32)
    assert tokens.patches.shape == (2, 24, 32)
    for image in range(2):
        alone = moved(bright[image : image + 1])
        torch.testing.assert_close(tokens.registers[image], alone.registers[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tokens.patches[image], alone.patches[0], rtol=1e-4, atol=1e-4)


def test_zeroing_cleans_the_patches_and_fills_no_register(planted, bright):
    zeroed = token_norms(with_test_time_registers(planted, given((LAYER, UNIT)), how="zero"), bright, LAYER)
    moved = token_norms(with_test_time_registers(planted, given((LAYER, UNIT))), bright, LAYER)
    assert (zeroed.peaks() < 3).all()
    torch.testing.assert_close(zeroed.patches, moved.patches)
    assert (moved.registers[..., 0] > 4 * zeroed.registers[..., 0]).all()


def test_each_unit_and_image_has_a_maximum_of_its_own_with_its_sign(vit):
    model, images = vit(registers=1, activation="swiglu"), torch.randn(3, 3, 16, 40)
    units = [2, 5, 11]
    moved = with_test_time_registers(model, given(*((1, unit) for unit in units)), count=2)
    seen = {}
    x, grid = moved.embed(images)
    rotary = moved.rotary(grid, x.device)
    x = moved.blocks[0](x, rotary)
    mlp = moved.blocks[1].mlp
    handle = mlp.fc2.register_forward_pre_hook(lambda m, a: seen.update(edited=a[0]))
    norm2 = moved.blocks[1].norm2
    read = norm2.register_forward_hook(lambda m, a, out: seen.update(x=out))
    moved.blocks[1](x, rotary)
    handle.remove(), read.remove()
    plain = model.blocks[1].mlp.inner(seen["x"])
    got, want = moved.name(seen["edited"], grid), moved.name(plain, grid)
    rest = [i for i in range(48) if i not in units]
    torch.testing.assert_close(seen["edited"][..., rest], plain[..., rest])
    torch.testing.assert_close(got.cls, want.cls)
    torch.testing.assert_close(got.registers[:, 0], want.registers[:, 0])  # its own register is left as it is
    assert (got.patches[..., units] == 0).all()
    signs = set()
    for image in range(3):
        for unit in units:
            values = want.patches[image, :, unit]
            largest = values[values.abs().argmax()]
            signs.add(bool(largest > 0))
            assert (got.registers[image, 1:, unit] == largest).all()
    assert signs == {True, False}


@pytest.mark.parametrize(
    "options",
    [dict(), dict(positions="rope"), dict(positions="learned+rope", registers=2, registers_place="end"),
     dict(position_rows="cls+registers+patches", registers=2), dict(position_rows="cls+registers+patches"),
     dict(positions="sincos", registers=1), dict(sink=True)],
)  # fmt: skip
def test_without_units_it_is_the_model_with_one_blank_token_and_no_other_change(vit, options):
    """The blank token stands behind the model's own and has neither content nor place."""
    model, images = vit(**options), torch.randn(2, 3, 16, 40)
    moved = with_test_time_registers(model, given())
    x, grid = model.embed(images)
    ours, _ = moved.embed(images)
    old, new = model.name(x, grid), moved.name(ours, grid)
    assert torch.equal(old.cls, new.cls)
    assert torch.equal(old.patches, new.patches)
    assert torch.equal(torch.cat((old.registers, torch.zeros(2, 1, 32)), dim=1), new.registers)
    with torch.no_grad():  # nobody can attend to a key that a rope or a norm cannot hide: compare by hand
        rows = attention_rows(moved, images, layers=0)
        was = attention_rows(model, images, layers=0)
    rest = 1 - rows.registers[..., -1:]
    torch.testing.assert_close(rows.cls / rest[..., 0], was.cls, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rows.patches / rest[..., None], was.patches, rtol=1e-4, atol=1e-6)


def test_the_model_itself_is_not_touched_even_where_its_twin_fails(planted, bright):
    state = {name: tensor.clone() for name, tensor in planted.state_dict().items()}
    kinds = [type(module) for module in planted.modules()]
    planted.cls.requires_grad_(False)
    before = planted(bright).patches
    moved = with_test_time_registers(planted, given((LAYER, UNIT)))
    moved(bright)
    with pytest.raises(InputError):
        moved(bright[:, :1])
    assert torch.equal(planted(bright).patches, before)
    assert [type(module) for module in planted.modules()] == kinds
    assert all(torch.equal(state[name], tensor) for name, tensor in planted.state_dict().items())
    assert not planted.cls.requires_grad
    assert planted.norm.weight.requires_grad
    assert moved.norm.weight.data_ptr() == planted.norm.weight.data_ptr(), "the weights are shared, not copied"
    assert not moved.training


def test_maps_and_reports_work_on_the_moved_model(planted, bright):
    moved = with_test_time_registers(planted, given((LAYER, UNIT)))
    assert attention_rows(moved, bright, ["cls", "reg0"], "all").patches.shape == (2, 3, 2, 2, 4, 6)
    assert "reg0" in sink_report(moved, bright).names
    report = register_report(moved, bright, compare=planted)
    assert report.queries == ("cls", "reg0")
    assert (report.outliers[:, LAYER:] == 0).all()
    assert (report.against.outliers[:, LAYER:] == 1).all()


def test_the_moved_model_passes_gradients(planted, bright):
    moved = with_test_time_registers(planted, given((LAYER, UNIT)))
    moved(bright).registers.square().sum().backward()
    assert (moved.blocks[LAYER].mlp.fc1.weight.grad[UNIT] != 0).any()


def test_an_experiment_is_not_written_as_a_model(planted, tmp_path):
    moved = with_test_time_registers(planted, given((LAYER, UNIT)))
    for attempt in (
        lambda: moved.save_pretrained(tmp_path / "m"),
        lambda: moved.export(tmp_path / "m", "timm"),
        moved.as_encoder,
        moved.with_registers,
        lambda: with_test_time_registers(moved, given()),
    ):
        with pytest.raises(InputError, match="the model itself"):
            attempt()
    assert isinstance(planted.as_encoder(), ViT)


def test_random_units_are_others_of_the_same_layers(planted):
    units = given((0, 1), (1, UNIT), (1, 9))
    drawn = random_units(planted, units, seed=3)
    assert [u.layer for u in drawn.units] == [0, 1, 1]
    assert not {(u.layer, u.unit) for u in drawn.units} & {(u.layer, u.unit) for u in units.units}
    assert drawn.by_layer() == random_units(planted, units, seed=3).by_layer()
    assert any(random_units(planted, units, seed=s).by_layer() != drawn.by_layer() for s in range(3))


def test_units_read_as_a_table_and_as_json(planted, bright):
    units = find_register_units(planted, bright, layer=1, top_k=2)
    assert len(str(units).splitlines()) == 4
    told = json.loads(json.dumps(units.as_dict(), allow_nan=False))
    assert told["units"][0] == {"layer": LAYER, "unit": UNIT, "score": units.units[0].score}


@pytest.mark.parametrize(
    ("options", "words"),
    [(dict(layer=3), "layer 3"), (dict(layer=0, top_layer=1), "behind"), (dict(top_k=0), "top_k"),
     (dict(top_k=1000), "96 units"), (dict(rule=OutlierRule(1e9)), "none of 2 images")],
)  # fmt: skip
def test_mistakes_in_finding_are_named(planted, bright, options, words):
    with pytest.raises(InputError, match=words):
        find_register_units(planted, bright, **options)


@pytest.mark.parametrize(
    ("units", "options", "words"),
    [((3, 0), {}, "layer 3"), ((0, 48), {}, "unit 48"), ((0, 0), dict(count=0), "at least 1"),
     ((0, 0), dict(how="mean"), "'mean'")],
)  # fmt: skip
def test_mistakes_in_moving_are_named(planted, units, options, words):
    with pytest.raises(InputError, match=words):
        with_test_time_registers(planted, given(units), **options)
