"""The register report: where the special tokens look, and what changes without registers."""

import json

import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps import attention_rows
from regard.vit.maps.norms import token_norms
from regard.vit.maps.registers import register_report
from regard.vit.maps.twin import without_registers
from regard.vit.model import ViT

SIZE = (16, 40)
VARIANTS = {
    "after cls": dict(registers=2),
    "at the end": dict(registers=2, registers_place="end", positions="rope"),
    "with rows of the table": dict(registers=2, position_rows="cls+registers+patches"),
    "no class token": dict(registers=2, class_token=False, pooling="mean"),
    "a learned sink": dict(registers=2, sink=True),
    "none": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_masses_are_those_of_the_attention_rows(vit, variant):
    model, images = vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE)
    report = register_report(model, images, [2, 0])
    config = model.config
    names = ["cls"] * config.class_token + ["registers"] * bool(config.registers)
    rows = attention_rows(model, images, names, [2, 0])
    assert report.queries == rows.queries
    mass = rows.mass()
    torch.testing.assert_close(report.mass["cls"], mass["cls"])
    torch.testing.assert_close(report.mass["registers"], mass["registers"])
    torch.testing.assert_close(report.mass["sink"], mass["sink"])
    torch.testing.assert_close(report.mass["outliers"] + report.mass["patches"], mass["patches"])
    torch.testing.assert_close(sum(report.mass.values()), torch.ones(2, 2, 2, len(rows.queries)))
    parts = [
        rows.patches.flatten(-2),
        rows.registers,
        *(part[..., None] for part in (rows.cls, rows.sink) if part is not None),
    ]
    whole = torch.cat(parts, dim=-1).double()
    entropy = -(whole * whole.clamp_min(1e-300).log()).sum(-1) / torch.tensor(float(whole.shape[-1])).log()
    torch.testing.assert_close(report.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


def test_overlap_is_the_mean_cosine_of_two_different_maps(vit):
    model, images = vit(registers=3), torch.randn(2, 3, *SIZE)
    report = register_report(model, images, "all")
    maps = attention_rows(model, images, "registers", "all").patches.flatten(-2)
    pairs = [torch.cosine_similarity(maps[..., i, :], maps[..., j, :], dim=-1) for i, j in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(report.overlap, torch.stack(pairs).mean(0))
    assert register_report(vit(registers=1), images).overlap.isnan().all()


def test_the_mass_on_a_planted_outlier_is_told_apart(vit, plant, bright):
    model = vit(positions="none", registers=1)
    plant(model, 1, 7)
    report = register_report(model, bright)
    rows = attention_rows(model, bright, ["cls", "registers"], "all")
    assert (report.mass["outliers"][:, 1] == 0).all()
    for image, (row, column) in enumerate([(3, 1), (0, 4)]):
        torch.testing.assert_close(report.mass["outliers"][image, 2], rows.patches[image, 2, ..., row, column])
    assert (report.outliers == torch.tensor([0, 1, 1])).all()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "none"])
def test_registers_taken_out_are_attended_by_nobody(vit, variant):
    """The twin equals the model whose every register key is masked away, computed by hand."""
    model, images = vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE)
    out = without_registers(model)
    assert out.config.registers == 0
    x, grid = model.embed(images)
    rotary = model.rotary(grid, x.device)
    places = model.name(torch.arange(x.shape[1])[None, :, None], grid).registers.flatten()
    mask = torch.ones(x.shape[1], dtype=torch.bool)
    mask[places] = False
    for block in model.blocks:
        x = x + block.attn(block.norm1(x), mask=mask[None, None, None], rotary=rotary)
        x = x + block.mlp(block.norm2(x))
    want, got = model.name(model.norm(x), grid), out(images)
    torch.testing.assert_close(got.patches, want.patches, rtol=1e-4, atol=1e-4)
    if want.cls is not None:
        torch.testing.assert_close(got.cls, want.cls, rtol=1e-4, atol=1e-4)
    assert out.norm.weight.data_ptr() == model.norm.weight.data_ptr()


def test_a_model_is_compared_with_itself_without_registers(vit):
    model, images = vit(registers=2), torch.randn(2, 3, *SIZE)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.norm.weight.requires_grad_(False)
    report = register_report(model, images, compare="knocked out")
    assert report.against.queries == ("cls",)
    torch.testing.assert_close(report.against.norms.patches, token_norms(without_registers(model), images).patches)
    assert (report.change > 0).all()
    assert report.change.shape == (2,)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.norm.weight.requires_grad
    assert model.cls.requires_grad


def test_a_model_is_compared_with_another(vit):
    images = torch.randn(2, 3, *SIZE)
    model, other = vit(registers=2), vit(depth=3, dim=16, patch_size=4, class_token=False, pooling="mean")
    report = register_report(model, images, compare=other)
    assert report.against.queries == ()
    assert report.against.norms.patches.shape == (2, 3, 4, 10)
    assert report.change is None
    same = register_report(model, images, compare=model)
    torch.testing.assert_close(same.change, torch.zeros(2), rtol=0, atol=1e-6)
    for text in (str(report), str(same)):
        assert "Against" in text
        assert "reg1" in text


def test_a_report_reads_as_a_table_and_as_json(vit):
    report = register_report(vit(registers=2), torch.randn(2, 3, *SIZE), compare="knocked out")
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["queries"] == ["cls", "reg0", "reg1"]
    assert told["against"]["queries"] == ["cls"]
    assert len(str(report).splitlines()) == (2 + 9) + 2 + (1 + 3)


def test_mistakes_are_named(vit):
    images = torch.randn(1, 3, *SIZE)
    with pytest.raises(InputError, match="neither a class token nor registers"):
        register_report(vit(class_token=False, pooling="mean"), images)
    with pytest.raises(InputError, match="no registers"):
        register_report(vit(), images, compare="knocked out")
    with pytest.raises(InputError, match="'shuffled'"):
        register_report(vit(registers=1), images, compare="shuffled")
    with pytest.raises(InputError, match="layer 3"):
        register_report(vit(registers=1), images, 3)


def test_a_knock_out_that_is_going_on_goes_on_without_registers(vit):
    model = vit(registers=2)
    model.blocks[0].attn.edit = lambda z, kv: torch.zeros_like(z)
    images = torch.randn(1, 3, *SIZE)
    edited = without_registers(model)(images).patches
    model.blocks[0].attn.edit = None
    assert not torch.allclose(edited, without_registers(model)(images).patches)
    assert isinstance(without_registers(model), ViT)


def test_registers_cannot_be_taken_out_while_they_are_knocked_out(vit):
    model = vit(registers=2)
    model.blocks[0].edit = lambda x: x
    with pytest.raises(InputError, match="end that before"):
        without_registers(model)
