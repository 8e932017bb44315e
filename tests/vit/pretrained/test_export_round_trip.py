"""Out of its owner, into Regard, out again and in once more: every number is the same to the last bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from regard.vit import Preprocess, ViT, ViTConfig

SMALL: dict[str, Any] = dict(embed_dim=48, depth=3, num_heads=3)
# What an export may write in another way that gives the same numbers: only new weights are made with it.
FREE = ("layer_scale", "position_rows", "key_bias", "drop_path")

Fill = Callable[[nn.Module], nn.Module]


def whole(vit: ViT, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        tokens = vit(images)
        pooled = vit.pool(tokens)
        logits = [vit.head(pooled)] if vit.head is not None else []
    return [*([] if tokens.cls is None else [tokens.cls]), tokens.registers, tokens.patches, pooled, *logits]


def assert_same(vit: ViT, back: ViT, *sizes: tuple[int, int]) -> None:
    for height, width in (vit.config.image_size, *sizes):
        images = torch.randn(2, vit.config.channels, height, width)
        for ours, again in zip(whole(vit, images), whole(back, images), strict=True):
            assert torch.equal(ours, again), (height, width)


def fixed(config: ViTConfig, *also: str) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in (*FREE, *also)}


TIMMS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": dict(img_size=(48, 64), num_classes=5),
    "vit_small_patch14_dinov2": dict(img_size=56),
    "vit_small_patch14_reg4_dinov2": dict(img_size=56),
    "vit_giant_patch14_dinov2": dict(img_size=56, mlp_ratio=4.0),
    "deit3_small_patch16_224": dict(img_size=64),
    "vit_base_patch16_clip_224": dict(img_size=64),
    "vit_base_patch16_clip_quickgelu_224": dict(img_size=64),
    "vit_base_patch32_siglip_256": dict(img_size=128),
    "vit_base_patch16_siglip_224": dict(img_size=64),
    "vit_so150m2_patch16_reg1_gap_256": dict(img_size=64, num_classes=5),
    "vit_betwixt_patch16_reg4_gap_256": dict(img_size=64, num_classes=5),
    "vit_small_patch16_dinov3": dict(img_size=64),
    "vit_small_plus_patch16_dinov3_qkvb": dict(img_size=64),
    "eva02_small_patch14_224": dict(img_size=56),
    "eva02_base_patch14_448": dict(img_size=56, num_classes=5),
    "vit_medium_patch16_rope_reg1_gap_256": dict(img_size=64),
}


@pytest.mark.parametrize("name", TIMMS)
def test_a_model_of_timms_comes_back_through_timms_own_folder(name: str, fill: Fill, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = fill(timm.create_model(name, **{"num_classes": 0, **SMALL, **TIMMS[name]}))
    vit = ViT.from_pretrained(model, classes=TIMMS[name].get("num_classes"))
    vit.export(tmp_path / "out", "timm")
    back = ViT.from_pretrained(tmp_path / "out", classes=TIMMS[name].get("num_classes"))
    patch = vit.config.patch_size
    assert fixed(vit.config) == fixed(back.config)
    assert_same(vit, back, (2 * patch, 3 * patch))


HIDDEN: dict[str, Any] = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=32, patch_size=8)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTModel", dict(intermediate_size=96)),
    "ViT classifier": ("ViTForImageClassification", dict(intermediate_size=96, num_labels=5)),
    "Dinov2": ("Dinov2Model", dict()),
    "Dinov2, gated": ("Dinov2Model", dict(use_swiglu_ffn=True)),
    "Dinov2 classifier": ("Dinov2ForImageClassification", dict(num_labels=5)),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", dict()),
    "DINOv3ViT": ("DINOv3ViTModel", dict(intermediate_size=96, num_register_tokens=4)),
    "DINOv3ViT, gated": ("DINOv3ViTModel", dict(intermediate_size=96, use_gated_mlp=True, hidden_act="silu")),
    "CLIPVision": ("CLIPVisionModel", dict(intermediate_size=96)),
    "SiglipVision": ("SiglipVisionModel", dict(intermediate_size=96)),
}


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_a_model_of_transformers_comes_back_through_its_own_folder(case: str, fill: Fill, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name, fields = TRANSFORMERS[case]
    kind = getattr(transformers, name)
    model = fill(kind(kind.config_class(**HIDDEN, **fields)))
    model.save_pretrained(tmp_path / "theirs")
    vit = ViT.from_pretrained(tmp_path / "theirs", classes=fields.get("num_labels"))
    report = vit.export(tmp_path / "out", "transformers")
    assert report.model == name
    back = ViT.from_pretrained(tmp_path / "out", classes=fields.get("num_labels"))
    assert fixed(vit.config, "preprocess") == fixed(back.config, "preprocess")
    assert_same(vit, back, (16, 40))


def test_a_model_of_torchvisions_comes_back(fill: Fill, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    model = torchvision.models.VisionTransformer(32, 8, 3, 3, 48, 96, num_classes=5)
    vit = ViT.from_pretrained(fill(model), classes=5)
    vit.export(tmp_path / "out.pth", "torchvision")
    back = ViT.from_pretrained(tmp_path / "out.pth", classes=5, heads=3)
    assert fixed(vit.config) == fixed(back.config)
    assert_same(vit, back, (16, 40))


@pytest.mark.parametrize("registers", [False, True])
def test_dinov2_comes_back_from_the_form_its_authors_publish(registers: bool, fill: Fill, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = transformers.Dinov2WithRegistersModel if registers else transformers.Dinov2Model
    vit = ViT.from_pretrained(fill(kind(kind.config_class(**HIDDEN))))
    report = vit.export(tmp_path / "out.pth", "dinov2")
    assert len(report.notes) == 1  # of the preprocessing alone
    assert report.notes[0].startswith("pictures are brought to 224 x 224 px by crop, 0.875 of each side, bicubic")
    back = ViT.from_pretrained(tmp_path / "out.pth", heads=3)
    assert fixed(vit.config, "preprocess") == fixed(back.config, "preprocess")
    assert_same(vit, back, (16, 40))


def test_a_model_passes_from_library_to_library(fill: Fill, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = fill(timm.create_model("vit_small_patch14_reg4_dinov2", img_size=56, **SMALL))
    vit = first = ViT.from_pretrained(model)
    for number, layout in enumerate(("transformers", "dinov2", "transformers", "timm")):
        place = tmp_path / f"{number}{'.pth' if layout == 'dinov2' else ''}"
        vit.export(place, layout)
        vit = ViT.from_pretrained(place, heads=3)
    assert_same(first, vit, (28, 70))
    images = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        theirs = transformers.AutoModel.from_pretrained(tmp_path / "0")(images).last_hidden_state
        torch.testing.assert_close(theirs, model.forward_features(images), rtol=1e-5, atol=1e-5)


def test_layer_scale_called_gamma_survives_safetensors_and_the_tools_of_transformers(
    noisy_gamma: ViT, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Config(transformers.PreTrainedConfig):
        model_type = "regard_test"

    class Wrapped(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any):
            super().__init__(config)
            self.vit = ViT(noisy_gamma.config)
            self.post_init()

    wrapped = Wrapped(Config())
    wrapped.vit.load_state_dict(noisy_gamma.state_dict())
    wrapped.save_pretrained(tmp_path / "wrapped")
    back, told = Wrapped.from_pretrained(tmp_path / "wrapped", output_loading_info=True)
    assert not any(told.values())
    noisy_gamma.save_pretrained(tmp_path / "ours")
    for again in (back.vit, ViT.from_pretrained(tmp_path / "ours")):
        state = again.state_dict()
        assert any(name.endswith("gamma") for name in state)
        for name, tensor in noisy_gamma.state_dict().items():
            assert torch.equal(state[name], tensor), name


@pytest.fixture
def noisy_gamma(fill: Fill) -> ViT:
    config = ViTConfig(image_size=(32, 48), patch_size=8, dim=48, depth=2, heads=3, hidden_dim=96, layer_scale=1e-5)
    filled = fill(ViT(config))
    assert isinstance(filled, ViT)
    return filled


PREPROCESS = {
    "squash": Preprocess((32, 48), "squash", 1.0, "bilinear", (0.5, 0.5, 0.5), (0.2, 0.3, 0.4)),
    "crop": Preprocess((32, 32), "crop", 0.8, "bicubic", crop_offset="floor"),
    "squash and crop": Preprocess((32, 32), "squash", 0.8, "bicubic", crop_offset="floor"),
    "own size": Preprocess(None, "crop"),
}


@pytest.mark.parametrize("case", PREPROCESS)
def test_the_image_processor_that_is_written_gives_our_pixels(case: str, noisy_gamma: ViT, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    preprocess = PREPROCESS[case]
    vit = noisy_gamma
    vit.config = dataclasses.replace(vit.config, preprocess=preprocess, image_size=(32, 32), layer_scale=1e-5)
    vit.positions = nn.Parameter(torch.zeros(16, 48))
    vit.export(tmp_path / "out", "transformers", image_size=None)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    for size in ((57, 91), (90, 40)):
        picture = Image.effect_noise(size, 90).convert("RGB").resize(size)
        theirs = processor(picture, return_tensors="pt")["pixel_values"]
        ours = preprocess(picture)
        assert theirs.shape == ours.shape
        std = torch.tensor(preprocess.std)[:, None, None]
        assert ((theirs - ours) * std).abs().max() <= 1 / 255 + 1e-6
    back = ViT.from_pretrained(tmp_path / "out").preprocess
    assert back == dataclasses.replace(preprocess, crop_offset="floor", fit=back.fit)
    assert back.fit == preprocess.fit or preprocess.size is None
