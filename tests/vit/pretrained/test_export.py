"""What leaves Regard is opened by the library it was written for, by the line the report gives, with our numbers."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.vit import PositionResize, RopeRecipe, ViT, ViTConfig
from regard.vit.errors import InputError
from regard.vit.pretrained.exports import LAYOUTS
from regard.vit.pretrained.exports import place as places
from regard.vit.pretrained.exports.target import PLAIN
from regard.vit.pretrained.report import ExportReport

TIMM = PositionResize("bicubic", antialias=True)
PLAIN_RESIZE = PositionResize("bicubic", antialias=False)
SMALL: dict[str, Any] = dict(image_size=(48, 64), patch_size=8, dim=48, depth=3, heads=3, hidden_dim=96)
SQUARE: dict[str, Any] = SMALL | dict(image_size=(48, 48), position_resize=PLAIN_RESIZE)
EVA02: dict[str, Any] = dict(rope=RopeRecipe("index", 10000.0, (16, 16)), key_bias=False)
REGISTERS: dict[str, Any] = dict(registers=4, layer_scale=1.0, position_rows="cls+patches")
CLIP: dict[str, Any] = dict(pre_norm=True, activation="quick_gelu", norm_eps=1e-5, position_rows="cls+patches")
SIGLIP: dict[str, Any] = dict(class_token=False, pooling="map", activation="gelu_tanh")
GAP: dict[str, Any] = dict(class_token=False, pooling="mean", classes=5)
DINOV3: dict[str, Any] = dict(positions="rope", registers=4, layer_scale=1.0, key_bias=False, norm_eps=1e-5)

Fill = Callable[[nn.Module], ViT]


@pytest.fixture
def made(fill: Fill) -> Callable[..., ViT]:
    return lambda **fields: fill(ViT(ViTConfig(**fields)))


def opened(report: ExportReport, **libraries: Any) -> Any:
    """The model that the report's own line of code gives."""
    names = {"torch": torch, "functools": functools, **libraries}
    exec(report.code, names)
    return names["model"].eval()


def sequence(vit: ViT, images: Tensor) -> Tensor:
    tokens = vit(images)
    cls = [] if tokens.cls is None else [tokens.cls[:, None]]
    return torch.cat([*cls, tokens.registers, tokens.patches], dim=1)


def test_every_setting_of_a_vit_is_decided_for_a_target() -> None:
    assert set(PLAIN) == {field.name for field in dataclasses.fields(ViTConfig)}


TIMMS: dict[str, dict[str, Any]] = {
    "plain": dict(position_rows="cls+patches"),
    "deit3": dict(layer_scale=1e-4, position_rows="patches", drop_path=0.1),
    "dinov2": dict(position_rows="cls+patches", layer_scale=1e-5),
    "dinov2 with registers": REGISTERS,
    "rows for registers": dict(registers=2, position_rows="cls+registers+patches"),
    "clip": CLIP,
    "clip with gelu": CLIP | dict(activation="gelu"),
    "siglip": SIGLIP,
    "gap with fc_norm": GAP | dict(norm_place="pooled", registers=2, position_rows="cls+registers+patches"),
    "gap without fc_norm": GAP | dict(qkv_bias=False),
    "fc_norm on the class token": dict(norm_place="pooled", classes=3),
    "no norm": dict(norm_place="none"),
    "swiglu": REGISTERS | dict(activation="swiglu", hidden_dim=100),
    "classifier": dict(classes=7, position_rows="cls+patches"),
    "norms inside": dict(attn_norm=True, mlp_norm=True, qk_norm=True, key_bias=False),
    "grey": dict(channels=1),
    "dinov3": DINOV3,
    "dinov3, gated, without biases": DINOV3
    | dict(activation="swiglu", qkv_bias=False, hidden_dim=100, layer_scale=None),
    "eva02": EVA02
    | dict(positions="learned+rope", activation="swiglu", attn_norm=True, mlp_norm=True, position_rows="cls+patches"),
    "rope gap": EVA02 | GAP | dict(positions="rope", registers=1, norm_place="pooled"),
}


@pytest.mark.parametrize("case", TIMMS)
def test_timm_opens_the_folder_by_itself(
    case: str, made: Callable[..., ViT], agree: Callable[..., None], timm_tokens: Callable[..., Any], tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    vit = made(**SMALL | TIMMS[case] | dict(position_resize=TIMM))
    report = vit.export(tmp_path / "out", "timm")
    added = "without biases" in case
    assert report.notes == (("layer scales of 1 were added, which change no number",) if added else ())
    model = opened(report, timm=timm)
    agree(vit, timm_tokens(model))
    images = torch.randn(2, vit.config.channels, 48, 64)
    with torch.no_grad():
        if vit.config.classes:
            torch.testing.assert_close(model(images), vit.classify(images), rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(model(images), vit.pool(vit(images)), rtol=1e-5, atol=1e-5)
    data = timm.data.resolve_model_data_config(model)
    preprocess = vit.config.preprocess
    assert (data["input_size"], data["crop_mode"]) == ((vit.config.channels, *preprocess.size), "squash")
    assert (tuple(data["mean"]), tuple(data["std"])) == (preprocess.mean, preprocess.std)
    assert data["interpolation"] == preprocess.interpolation


DINOV2_ROWS = dict(position_rows="cls+patches", layer_scale=1e-5)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("ViTModel", dict(norm_eps=1e-12)),
    "without biases": ("ViTModel", dict(qkv_bias=False, position_rows="cls+patches", activation="gelu_tanh")),
    "classifier": ("ViTForImageClassification", dict(classes=7, position_rows="cls+patches")),
    "dinov2": ("Dinov2Model", DINOV2_ROWS),
    "dinov2, gated": ("Dinov2Model", DINOV2_ROWS | dict(activation="swiglu", hidden_dim=128)),
    "dinov2 classifier": ("Dinov2ForImageClassification", DINOV2_ROWS | dict(classes=7, pooling="cls+mean")),
    "gap with a class token": ("Dinov2ForImageClassification", dict(classes=7, pooling="mean")),
    "registers": ("Dinov2WithRegistersModel", REGISTERS | dict(position_resize=TIMM)),
    "registers, classifier of the class token": (
        "Dinov2WithRegistersForImageClassification",
        dict(registers=2, classes=7, key_bias=False, position_resize=TIMM),
    ),
    "dinov3": ("DINOv3ViTModel", DINOV3 | dict(image_size=(48, 64))),
    "dinov3, gated": ("DINOv3ViTModel", DINOV3 | dict(registers=0, activation="swiglu", qkv_bias=False)),
    "clip": ("CLIPVisionModel", CLIP | dict(norm_place="pooled")),
    "clip, norm on all tokens": ("CLIPVisionModel", CLIP),
    "siglip": ("SiglipVisionModel", SIGLIP),
    "gap": ("SiglipForImageClassification", GAP),
}


def hidden_states(model: Any, vit: ViT, report: ExportReport) -> Callable[[Tensor], Mapping[Any, Tensor]]:
    """What `agree` asks of a model of transformers'."""
    asked = any("interpolate_pos_encoding" in note for note in report.notes)
    normed = any("post_layernorm" in note for note in report.notes)
    tower = next(model.children()) if vit.config.classes else model

    def run(images: Tensor) -> Mapping[Any, Tensor]:
        ask = {"interpolate_pos_encoding": True} if asked else {}
        out = tower(images, output_hidden_states=True, **ask)
        final = tower.post_layernorm(out.last_hidden_state) if normed else out.last_hidden_state
        return {"final": final, 0: out.hidden_states[1], 1: out.hidden_states[2]}

    return run


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_opens_the_folder_by_itself(
    case: str, made: Callable[..., ViT], agree: Callable[..., None], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name, fields = TRANSFORMERS[case]
    vit = made(**SQUARE | fields)
    report = vit.export(tmp_path / "out", "transformers")
    model = opened(report, transformers=transformers)
    assert report.model == type(model).__name__ == name
    _, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    agree(vit, hidden_states(model, vit, report))
    images = torch.randn(2, 3, *vit.config.image_size)
    with torch.no_grad():
        out, pooled = model(images), vit.pool(vit(images))
    ours = (vit.head(pooled), out.logits) if vit.head is not None else (pooled, out.pooler_output)
    torch.testing.assert_close(*ours, rtol=1e-5, atol=1e-5)


def test_a_rectangular_native_grid_survives_in_transformers(made: Callable[..., ViT], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vit = made(**SMALL)
    report = vit.export(tmp_path / "out", "transformers")
    assert "sizes other than 48 x 64 px are not possible there" in report.notes
    images = torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        theirs = opened(report, transformers=transformers)(images).last_hidden_state
        torch.testing.assert_close(theirs, sequence(vit, images), rtol=1e-5, atol=1e-5)


TORCHVISION: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "rows": dict(position_rows="cls+patches", qkv_bias=False),
    "classifier": dict(classes=7, norm_eps=1e-12),
}


@pytest.mark.parametrize("case", TORCHVISION)
def test_torchvision_loads_the_file_strictly(case: str, made: Callable[..., ViT], tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    vit = made(**SQUARE | TORCHVISION[case])
    report = vit.export(tmp_path / "new" / "out.pth", "torchvision")
    model = opened(report, torchvision=torchvision)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        ours = vit.classify(images) if vit.head is not None else vit(images).cls
        torch.testing.assert_close(model(images), ours, rtol=1e-5, atol=1e-5)
        x = torch.cat((model.class_token.expand(2, -1, -1), model._process_input(images)), dim=1)
        torch.testing.assert_close(model.encoder(x), sequence(vit, images), rtol=1e-5, atol=1e-5)


DINOV2: dict[str, dict[str, Any]] = {
    "plain": DINOV2_ROWS,
    "without layer scale": dict(),
    "gated": DINOV2_ROWS | dict(activation="swiglu"),
    "registers": REGISTERS,
}


@pytest.mark.parametrize("case", DINOV2)
def test_timm_reads_the_dinov2_file_as_it_reads_the_authors(
    case: str, made: Callable[..., ViT], tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from timm.models.vision_transformer import checkpoint_filter_fn

    vit = made(**SQUARE | DINOV2[case])
    vit.export(tmp_path / "out.pth", "dinov2")
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    assert state["mask_token"].shape == (1, 48)
    kind, gates = ("giant", 2) if case == "gated" else ("small", 1)
    model = timm.create_model(
        f"vit_{kind}_patch14_{'reg4_' if vit.config.registers else ''}dinov2",
        patch_size=8, img_size=48, embed_dim=48, depth=3, num_heads=3, mlp_ratio=gates * 96 / 48,
    ).eval()  # fmt: skip
    model.load_state_dict(checkpoint_filter_fn(state, model))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(images), sequence(vit, images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "without layer scale", "gated"])
def test_the_authors_own_class_loads_the_dinov2_file_strictly(
    case: str, made: Callable[..., ViT], tmp_path: Path
) -> None:
    pytest.importorskip("dinov2.models.vision_transformer", reason="the authors' package dinov2 is not installed")
    import dinov2

    vit = made(**SQUARE | DINOV2[case])
    report = vit.export(tmp_path / "out.pth", "dinov2")
    # The package of 2023 on PyPI knows neither registers nor how to choose a recipe.
    code = report.code.replace(", num_register_tokens=0, interpolate_antialias=False, interpolate_offset=0.0", "")
    model = opened(dataclasses.replace(report, code=code), dinov2=dinov2)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        theirs = model.forward_features(images)
        whole = torch.cat((theirs["x_norm_clstoken"][:, None], theirs["x_norm_patchtokens"]), dim=1)
        torch.testing.assert_close(whole, sequence(vit, images), rtol=1e-5, atol=1e-5)


def test_another_native_size_is_resampled_beforehand_as_the_model_does(
    made: Callable[..., ViT], tmp_path: Path
) -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    vit = made(**SQUARE | dict(position_resize=PositionResize("bicubic", antialias=False, offset=0.1)))
    report = vit.export(tmp_path / "out.pth", "torchvision", image_size=(64, 64))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        theirs = opened(report, torchvision=torchvision)(images)
        torch.testing.assert_close(theirs, vit(images).cls, rtol=1e-5, atol=1e-5)
    assert vit.config.image_size == (48, 48)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("torchvision", dict(registers=4), "no registers 4; timm, transformers, dinov2, onnx, torch can"),
    ("torchvision", dict(image_size=(48, 64)), "no image_size (48, 64); timm, transformers, onnx, torch can"),
    ("torchvision", dict(channels=1, activation="quick_gelu"), "no channels 1 and no activation 'quick_gelu'"),
    ("timm", dict(positions="sincos"), "no positions 'sincos'; onnx, torch can"),
    ("timm", dict(registers=2, registers_place="end"), "no registers_place 'end'; onnx, torch can"),
    ("timm", dict(norm_eps=1e-12), "no norm_eps 1e-12; transformers, torchvision, onnx, torch can"),
    ("timm", dict(classes=3, pooling="cls+mean"), "no pooling 'cls+mean'; transformers, onnx, torch can"),
    ("timm", dict(head_dim=24), "no head_dim 24; onnx, torch can"),
    (
        "timm",
        DINOV3 | dict(rope=RopeRecipe(periods=(1.0, 2.0, 3.0, 4.0))),
        "open the model with rope={'periods': None}",
    ),
    ("timm", DINOV3 | dict(rope=RopeRecipe("index")), "no rope by 'index' coordinates, base 100; onnx, torch can"),
    ("dinov2", dict(classes=3), "no classes 3; timm, transformers, torchvision, onnx, torch can"),
    ("dinov2", DINOV3, "no positions 'rope'"),
    ("dinov2", dict(activation="swiglu", hidden_dim=100), "no hidden_dim 100; timm, onnx, torch can"),
    ("transformers", dict(layer_scale=1.0, hidden_dim=100), "Dinov2Model has no hidden_dim 100"),
    ("transformers", dict(norm_place="pooled", classes=2), "no norm_place 'pooled'; timm, onnx, torch can"),
    ("transformers", CLIP | dict(classes=3), "no classes 3; timm, onnx, torch can"),
    ("transformers", dict(qk_norm=True), "no qk_norm True; timm, onnx, torch can"),
]


@pytest.mark.parametrize(("layout", "fields", "words"), REFUSED)
def test_what_a_format_cannot_hold_is_one_line_that_names_the_setting_and_who_could(
    layout: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    vit = ViT(ViTConfig(**SQUARE | fields))
    with pytest.raises(InputError) as caught:
        vit.export(tmp_path / "out.pth", layout)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{layout} cannot hold this model: ")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_report_says_where_numbers_will_differ(made: Callable[..., ViT], tmp_path: Path) -> None:
    vit = made(**SQUARE | dict(position_resize=PositionResize("bicubic", antialias=False, offset=0.1)))
    for layout in ("timm", "transformers", "torchvision"):
        report = vit.export(tmp_path / f"{layout}.pth", layout)
        note = next(note for note in report.notes if "resample" in note)
        assert "here bicubic, offset 0.1" in note
        assert "the same at 48 x 48 px and differ at other sizes" in note
        assert note in str(report)
    assert not any("resample" in note for note in vit.export(tmp_path / "dinov2.pth", "dinov2").notes)
    mean = made(**SQUARE | dict(pooling="mean"))
    assert "this model pools by 'mean'; pooler_output is the class token there" in (
        mean.export(tmp_path / "mean", "transformers").notes
    )


def test_an_unknown_target_is_told_of_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no export is called 'tf'; choose one of {', '.join(LAYOUTS)}"):
        ViT(ViTConfig(**SMALL)).export(tmp_path / "out", "tf")
    with torch.device("meta"):
        empty = ViT(ViTConfig(**SMALL))
    with pytest.raises(InputError, match="meta device"):
        empty.export(tmp_path / "out", "timm")
    with pytest.raises(InputError, match=r"image_size \(60, 64\) is no multiple of the patches of 8 px"):
        ViT(ViTConfig(**SMALL)).export(tmp_path / "out", "timm", image_size=(60, 64))


def test_nothing_of_ours_or_of_others_is_overwritten(tmp_path: Path) -> None:
    vit = ViT(ViTConfig(**SMALL))
    vit.save_pretrained(tmp_path / "ours")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years")
    for place in ("ours", "other"):
        with pytest.raises(InputError, match="exists already"):
            vit.export(tmp_path / place, "timm")
    with pytest.raises(InputError, match="a model that Regard saved is there"):
        vit.export(tmp_path / "ours", "timm", overwrite=True)
    with pytest.raises(InputError, match=r"'thesis\.tex' is there"):
        vit.export(tmp_path / "other", "transformers", overwrite=True)
    for place in ("other", "model.bin"):
        with pytest.raises(InputError, match=r"writes one file; give it a name that ends in \.pth or \.pt"):
            ViT(ViTConfig(**SQUARE)).export(tmp_path / place, "dinov2", overwrite=True)
    assert ViT.from_pretrained(tmp_path / "ours").config == vit.config
    vit.export(tmp_path / "again", "timm")
    vit.export(tmp_path / "again", "timm", overwrite=True)
    assert {file.name for file in (tmp_path / "again").iterdir()} == {"config.json", "model.safetensors"}


def test_an_export_that_fails_halfway_leaves_the_older_one_as_it_was(
    made: Callable[..., ViT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(**SMALL).export(tmp_path / "out", "timm")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    write, calls = places.write_atomically, []

    def full(path: Path, put: Callable[..., object]) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(path, put)

    monkeypatch.setattr(places, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        made(**SMALL | dict(layer_scale=1.0)).export(tmp_path / "out", "timm", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("layout", ["timm", "transformers"])
def test_weights_keep_their_dtype(layout: str, made: Callable[..., ViT], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made(**SQUARE | REGISTERS).to(torch.bfloat16).export(tmp_path / "out", layout)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    if layout == "transformers":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
