"""The sink report: a planted sink head is named, and every number equals that of the dense matrix in float64."""

import dataclasses
import json

import pytest
import torch

from regard.vit.attention import Attention
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.maps import attention_rows
from regard.vit.maps.columns import columns
from regard.vit.maps.norms import OutlierRule
from regard.vit.maps.sinks import sink_report
from regard.vit.maps.trace import passages
from regard.vit.model import ViT

SIZE = (16, 40)  # grid 2 x 5
RULE = OutlierRule(deviations=0.5, times=1.01)  # in noise, some patch stands out a little
VARIANTS = {
    "plain": {},
    "registers after cls": dict(registers=2),
    "registers at the end, rope, qk norm": dict(registers=2, registers_place="end", positions="rope", qk_norm=True),
    "no class token": dict(class_token=False, pooling="mean", registers=1),
    "a learned sink": dict(registers=1, sink=True),
}


def dense(passage) -> torch.Tensor:
    """A in float64 with the learned sink's column last, `(B, H, S, S or S + 1)`, from its definition."""
    attn = passage.attn
    scores = passage.q.double() @ passage.kv.k.double().transpose(-2, -1) / attn.head_dim**0.5
    if attn.sink is not None:
        column = attn.sink.double()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_number_equals_that_of_the_dense_matrix(vit, variant):
    model, images = vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE)
    config = model.config
    report = sink_report(model, images, [2, 0], rule=RULE, epsilon=0.2)
    at_end = config.registers_place == "end"
    lead = config.class_token + (0 if at_end else config.registers)
    patches = list(range(lead, lead + 10))
    registers = [i for i in range(config.class_token, 10 + config.class_token + config.registers) if i not in patches]
    for passage in passages(model, images, [0, 2]):
        index = {2: 0, 0: 1}[passage.layer]
        a, keys = dense(passage), passage.q.shape[2]
        received = a.mean(2)
        found = RULE(passage.x[:, patches].norm(dim=-1).view(2, 2, 5)).flatten(1)[:, None]
        assert found.any()
        want = {
            "cls": received[..., 0] if config.class_token else torch.zeros(2, 2),
            "registers": received[..., registers].sum(-1),
            "outliers": (received[..., patches] * found).sum(-1),
            "patches": (received[..., patches] * ~found).sum(-1),
            "sink": received[..., keys:].sum(-1),
        }
        for name, share in want.items():
            close(report.mass[name][:, index], share)
        entropy = torch.special.entr(a).sum(-1)
        close(report.entropy[:, index], entropy.mean(-1) / torch.tensor(float(a.shape[-1])).log())
        close(report.support[:, index], entropy.exp().mean(-1))
        close(report.first[:, index], a[:, :, 1:, 0].mean(-1))
        alpha, key = received[..., :keys].max(-1)
        close(report.alpha[:, index], alpha)
        assert torch.equal(report.key[:, index], key)
        norms = passage.kv.v.norm(dim=-1)
        close(report.value_norm[:, index], norms.gather(-1, key[..., None])[..., 0])
        close(report.value_norm_all[:, index], norms.mean(-1))
    assert report.sink_rate == pytest.approx((report.alpha > 0.2).float().mean().item())
    assert report.first_share == pytest.approx(report.first.mean().item())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_masses_sum_to_one(vit, variant):
    report = sink_report(vit(**VARIANTS[variant]), torch.randn(2, 3, *SIZE), rule=RULE)
    total = sum(report.mass.values())
    torch.testing.assert_close(total, torch.ones(2, 3, 2))


def plant_sink(model: ViT, images: torch.Tensor, layer: int, head: int, token: int) -> None:
    """All queries of one head look at one token: each is turned to the direction in which its key leads the others'."""
    (passage,) = passages(model, images, layer)
    keys = passage.kv.k[:, head]  # (B, S, K)
    mine, rest = keys[:, token], keys[:, [i for i in range(keys.shape[1]) if i != token]].flatten(0, 1)
    rows = torch.cat((mine.repeat(len(rest), 1), rest)).double()
    want = torch.tensor([1.0] * (len(mine) * len(rest)) + [-1.0] * len(rest)).double()
    weights = torch.cat((torch.full((len(want) - len(rest),), 1 / len(mine)), torch.ones(len(rest)))).double()
    centred = rows - (rows[-len(rest) :].mean(0) + mine.double().mean(0)) / 2
    scaled = centred * weights[:, None]
    ridge = 1e-2 * torch.eye(rows.shape[1]).double()
    direction = torch.linalg.solve(scaled.T @ centred + ridge, scaled.T @ want).float()
    part = slice(head * 16, head * 16 + 16)
    with torch.no_grad():
        passage.attn.to_q.weight[part] = 0
        passage.attn.to_q.bias[part] = 60 * direction


@pytest.mark.parametrize(("token", "name"), [(0, "cls"), (2, "reg1"), (7, "patch (0, 4)")])
def test_a_planted_sink_head_is_the_one_that_is_named(vit, token, name):
    model, images = vit(registers=2, depth=2), torch.randn(2, 3, *SIZE)
    before = sink_report(model, images)
    plant_sink(model, images, layer=1, head=1, token=token)
    report = sink_report(model, images)
    assert [report.key_name(image, 1, 1) for image in range(2)] == [name, name]
    assert (report.alpha[:, 1, 1] > 0.9).all()
    others = torch.tensor([[0, 0], [0, 1], [1, 0]])
    for layer, head in others.tolist():
        assert (report.alpha[:, layer, head] < report.alpha[:, 1, 1]).all()
        assert torch.equal(report.alpha[:, layer, head], before.alpha[:, layer, head])
    kind = {"cls": "cls", "reg1": "registers"}.get(name, "patches")
    assert (report.mass[kind][:, 1, 1] > 0.9).all()
    assert (report.support[:, 1, 1] < 2).all()
    assert (report.entropy[:, 1, 1] < before.entropy[:, 1, 1]).all()
    assert ((report.first[:, 1, 1] > 0.9) == (name == "cls")).all()


def test_outliers_have_a_mass_of_their_own(vit, plant, bright):
    model = vit(positions="none")
    plant(model, 1, 7)
    report = sink_report(model, bright)
    assert (report.mass["outliers"][:, 1] == 0).all()
    patches = attention_rows(model, bright, "patches", 2).patches.mean((1, 3))  # (B, H, gh, gw)
    own = attention_rows(model, bright, "cls", 2).patches.mean((1, 3))
    for image, (row, column) in enumerate([(3, 1), (0, 4)]):
        want = (patches[image, :, row, column] * 24 + own[image, :, row, column]) / 25
        close(report.mass["outliers"][image, 2], want)


def test_what_a_learned_sink_takes_is_shown_and_never_made_good(vit):
    model, images = vit(sink=True), torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        model.blocks[0].attn.sink.copy_(torch.tensor([-100.0, 100.0]))
        model.blocks[1].attn.sink.zero_()
    report = sink_report(model, images)
    close(report.mass["sink"][:, 0], torch.tensor([0.0, 1.0]).expand(2, 2))
    close(report.alpha[:, 0, 1], torch.zeros(2))
    close(report.support[:, 0, 1], torch.ones(2))
    assert ((report.mass["sink"][:, 1] > 0) & (report.mass["sink"][:, 1] < 1)).all()
    assert "on sink" in str(report)


@pytest.mark.parametrize("block", [1, 5, 11, 12, 256])
def test_sums_do_not_depend_on_the_block(vit, block):
    (passage,) = passages(vit(registers=1), torch.randn(2, 3, *SIZE), 1)
    want, got = columns(passage), columns(passage, block)
    for name in ("received", "first", "sink", "entropy", "support"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6)


def test_no_more_than_a_block_of_rows_is_ever_held(vit, monkeypatch):
    model, images = vit(depth=1, sink=True), torch.randn(1, 3, 160, 200)  # 501 tokens
    seen, weights = [], Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda *a, **k: seen.append(weights(*a, **k).shape) or weights(*a, **k))
    sink_report(model, images)
    assert seen == [(1, 2, 256, 501), (1, 2, 245, 501)]


def test_a_learned_sink_needs_no_dense_mask(vit, monkeypatch):
    """The fused kernel gets the sink as one more key, and no matrix of T x N."""
    model, images = vit(sink=True), torch.randn(1, 3, *SIZE)
    masks, fused = [], torch.nn.functional.scaled_dot_product_attention

    def watch(*arguments, attn_mask=None, **options):
        masks.append(attn_mask)
        return fused(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    model(images)
    assert masks == [None] * 3


def test_images_do_not_see_each_other(vit):
    model, images = vit(registers=1), torch.randn(3, 3, *SIZE)
    every = sink_report(model, images)
    for image in range(3):
        alone = sink_report(model, images[image : image + 1])
        for name in ("first", "alpha", "entropy", "support", "value_norm"):
            torch.testing.assert_close(getattr(every, name)[image], getattr(alone, name)[0], rtol=1e-4, atol=1e-5)


def test_a_report_reads_as_a_table_and_as_json(vit):
    report = sink_report(vit(registers=1), torch.randn(2, 3, *SIZE), [0, 1])
    lines = str(report).splitlines()
    assert "2 images" in lines[0]
    assert len(lines) == 2 + 4
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["names"][:3] == ["cls", "reg0", "patch (0, 0)"]
    assert set(told["mass"]) == {"cls", "registers", "outliers", "patches", "sink"}
    with pytest.raises(InputError, match="not in this report"):
        report.key_name(0, 2, 0)
    with pytest.raises(InputError, match="layer 3"):
        sink_report(vit(), torch.randn(1, 3, *SIZE), 3)


def test_a_single_token_is_a_sink_of_its_own(vit):
    report = sink_report(vit(class_token=False, pooling="mean"), torch.randn(1, 3, 8, 8))
    assert (report.alpha == 1).all()
    assert (report.first == 0).all()
    assert torch.isfinite(report.entropy).all()


def test_a_learned_sink_starts_at_zero_and_is_learned_in_every_layer():
    model = ViT(ViTConfig(image_size=(16, 40), patch_size=8, dim=24, depth=2, heads=3, sink=True))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink.fill_(torch.nan)
    model.reset_parameters()
    assert all((block.attn.sink == 0).all() for block in model.blocks)
    model(torch.randn(1, 3, *SIZE)).patches.square().sum().backward()
    assert all((block.attn.sink.grad != 0).all() for block in model.blocks)


def test_a_low_sink_is_no_sink_and_a_high_one_silences_the_heads(vit):
    model, images = vit(sink=True), torch.randn(2, 3, *SIZE)
    without = ViT(dataclasses.replace(model.config, sink=False)).eval()
    without.load_state_dict({name: t for name, t in model.state_dict().items() if "sink" not in name})
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink.fill_(-100.0)
    torch.testing.assert_close(model(images).patches, without(images).patches)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink.fill_(100.0)
        for block in without.blocks:
            block.attn.to_v.weight.zero_(), block.attn.to_v.bias.zero_()
    torch.testing.assert_close(model(images).patches, without(images).patches)


def test_a_model_with_sinks_is_saved_and_opened(vit, tmp_path):
    model, images = vit(sink=True), torch.randn(1, 3, *SIZE)
    model.save_pretrained(tmp_path / "m")
    opened = ViT.from_pretrained(tmp_path / "m")
    assert opened.config.sink
    assert torch.equal(opened(images).patches, model(images).patches)
    with pytest.raises(InputError, match="sink"):
        model.export(tmp_path / "t", "timm")


@pytest.mark.slow
def test_a_model_with_sinks_is_exported_as_a_computation(vit, tmp_path):
    vit(sink=True).export(tmp_path / "m.pt2", "torch")  # which compares the two and refuses what differs
    vit(sink=True, image_size=(16, 24)).export(tmp_path / "m.onnx", "onnx")


@pytest.mark.parametrize("sink", [False, True])
def test_half_precision_gives_the_same_report_in_fp32(vit, sink):
    model, images = vit(registers=1, sink=sink), torch.randn(2, 3, *SIZE)
    exact = sink_report(model, images, 0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sink_report(model, images, 0)
    half = sink_report(model.bfloat16(), images.bfloat16(), 0)
    for report in (mixed, half):
        for name in ("first", "alpha", "entropy", "value_norm"):
            assert getattr(report, name).dtype == torch.float32
            torch.testing.assert_close(getattr(report, name), getattr(exact, name), rtol=0.05, atol=0.03)
        torch.testing.assert_close(sum(report.mass.values()), torch.ones(2, 1, 2), rtol=0, atol=1e-5)


def test_a_large_batch_takes_smaller_blocks(vit, monkeypatch):
    model, images = vit(depth=1, registers=1), torch.randn(3, 3, *SIZE)
    want = sink_report(model, images)
    monkeypatch.setattr("regard.vit.maps.columns.MOST", 3 * 2 * 12 * 5)
    seen, weights = [], Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda *a, **k: seen.append(weights(*a, **k).shape) or weights(*a, **k))
    torch.testing.assert_close(sink_report(model, images).alpha, want.alpha)
    assert [shape[2] for shape in seen] == [5, 5, 2]


def test_an_empty_batch_gives_an_empty_report(vit):
    report = sink_report(vit(registers=1, sink=True), torch.zeros(0, 3, *SIZE))
    assert report.alpha.shape == (0, 3, 2)
