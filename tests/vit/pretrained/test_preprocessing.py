"""What each owner makes of real photographs, against ours: the same pixels."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.vit import ViT
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.source import Source

# Whole photographs first; then crops of odd sizes, 37 x 501 and one pixel wide, and two with hard edges.
PICTURES = ["astronaut", "chelsea", "coffee", "china", "strip", "column", "odd", "page", "horse"]
SOME = ["astronaut", "coffee", "strip", "column", "odd", "page"]
SPACE = Preprocess(size=(224, 224))


@functools.cache
def photograph(name: str) -> Image.Image:
    if name in ("china", "flower"):
        datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn, which has the photograph, is missing")
        return Image.fromarray(datasets.load_sample_image(f"{name}.jpg"))
    cuts = {
        "strip": ("coffee", slice(100, 137), slice(50, 551)),
        "column": ("astronaut", slice(100, 119), slice(200, 201)),
        "odd": ("rocket", slice(3, 258), slice(7, 230)),
    }
    whole, rows, columns = cuts.get(name, (name, slice(None), slice(None)))
    data = pytest.importorskip("skimage.data", reason="scikit-image, which has the photograph, is missing")
    array = np.asarray(getattr(data, whole)())[rows, columns]
    return Image.fromarray((array * 255 if array.dtype == bool else array).astype(np.uint8)).convert("RGB")


def source(**stated: Any) -> Source:
    """What lies in files: plain JSON values."""
    return Source("model", {}, **{name: json.loads(json.dumps(values)) for name, values in stated.items()})


def same(preprocess: Preprocess, picture: Image.Image, theirs: Tensor, levels: float = 0) -> None:
    """At most so many of 255 levels apart, exactly equal for 0."""
    ours = preprocess(picture)[0]
    assert ours.shape == theirs.shape
    std, mean = (torch.tensor(values)[:, None, None] for values in (preprocess.std, preprocess.mean))
    apart = ((ours - theirs).abs() * std).max().item()
    assert apart <= levels / 255 + 1e-6, f"{apart * 255:.2f} levels"
    if not levels:
        assert torch.equal(((theirs * std + mean) * 255).round().byte(), preprocess.pixels(picture))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# timm ----------------------------------------------------------------------------------------------------------------

TIMM = [
    "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit_base_patch16_siglip_384.webli",
    "vit_small_patch14_dinov2.lvd142m",
    "vit_small_patch16_dinov3.lvd1689m",
    "deit3_small_patch16_224.fb_in1k",
]
MADE_UP = {
    "high": dict(input_size=(3, 192, 128), crop_pct=0.95),
    "wide": dict(input_size=(3, 112, 240), crop_pct=1.0, interpolation="bilinear"),
    "squashed": dict(input_size=(3, 224, 224), crop_pct=0.95, crop_mode="squash"),
    "squashed wide": dict(input_size=(3, 96, 200), crop_pct=0.9, crop_mode="squash"),
    "odd": dict(input_size=(3, 225, 225), crop_pct=0.9),
    "small": dict(input_size=(3, 33, 33), crop_pct=0.7, interpolation="lanczos"),
    "nearest": dict(input_size=(3, 64, 64), crop_pct=0.875, interpolation="nearest"),
    "box": dict(input_size=(3, 64, 80), crop_pct=0.875, interpolation="box"),
    "hamming": dict(input_size=(3, 64, 64), crop_pct=0.875, interpolation="hamming"),
    "nothing stated": dict(input_size=(3, 224, 224)),
}


def timm_cfg(name: str) -> dict[str, Any]:
    models = pytest.importorskip("timm.models", reason="timm is not installed")
    return MADE_UP[name] if name in MADE_UP else models.get_pretrained_cfg(name).to_dict()


def timm_transform(cfg: dict[str, Any]) -> Any:
    data = pytest.importorskip("timm.data", reason="timm is not installed")
    return data.create_transform(**data.resolve_data_config({}, pretrained_cfg=cfg), is_training=False)


def of_timm(cfg: dict[str, Any]) -> Preprocess:
    return processors.timm(source(processor=cfg), Preprocess(size=tuple(cfg["input_size"][1:])))


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", [*TIMM, *MADE_UP])
def test_pixels_are_those_of_timms_transform(name, picture):
    cfg = timm_cfg(name)
    same(of_timm(cfg), photograph(picture), timm_transform(cfg)(photograph(picture)))


def test_every_configuration_of_timms_vision_transformers_is_read():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    names = [name for name in timm.list_pretrained() if name.startswith(("vit", "deit", "eva", "beit"))]
    cfgs = [timm.models.get_pretrained_cfg(name).to_dict() for name in names]
    kinds = {
        (c["crop_mode"], c["crop_pct"], c["interpolation"], tuple(c["input_size"]), tuple(c["mean"])): c for c in cfgs
    }
    assert len(kinds) > 20
    picture = photograph("chelsea").crop((0, 0, 90, 61))
    for cfg in kinds.values():
        same(of_timm(cfg), picture, timm_transform(cfg)(picture))


def test_a_live_model_of_timm_brings_its_preprocessing():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    small = dict(embed_dim=48, depth=1, num_heads=3)
    vit = ViT.from_pretrained(timm.create_model("vit_small_patch16_224", **small))
    model = timm.create_model("vit_small_patch16_224", **small)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model), is_training=False)
    same(vit.preprocess, photograph("coffee"), transform(photograph("coffee")))
    rectangular = ViT.from_pretrained(timm.create_model("vit_small_patch16_224", img_size=(96, 160), **small))
    assert rectangular.preprocess.size == rectangular.config.image_size == (96, 160), "not the 224 of its old weights"


# transformers --------------------------------------------------------------------------------------------------------


def box(height: int, width: int) -> dict[str, int]:
    return {"height": height, "width": width}


IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
# by kind: settings as files have them, beside what the kind itself says
TRANSFORMERS = {
    "ViT": [{}, dict(size=box(112, 200)), dict(size=box(384, 384), resample=3)],
    "DeiT": [{}, dict(size=box(255, 255)), dict(size=box(64, 128), crop_size=box(56, 112))],
    "Bit": [
        dict(size={"shortest_edge": 256}, **IMAGENET),
        dict(size={"shortest_edge": 257}),
        dict(size={"shortest_edge": 242}, resample=2, crop_size=box(225, 225)),
    ],
    "CLIP": [
        {},
        dict(size={"shortest_edge": 336}, crop_size=box(336, 336)),
        dict(size={"shortest_edge": 90}, crop_size=box(121, 121)),
    ],
    "Siglip": [{}, dict(size=box(160, 96))],
    "Blip": [{}],  # 384 px, squash
    "Beit": [{}, dict(do_center_crop=True, size=box(256, 256))],
}
CASES = [(kind, number) for kind, all_settings in TRANSFORMERS.items() for number in range(len(all_settings))]


def processor(kind: str, settings: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return getattr(transformers, kind)(**settings)


def of_transformers(owner: Any, version: str = "4.49.0", name: str | None = None) -> Preprocess:
    said = owner.to_dict() | ({} if name is None else {"image_processor_type": name})
    return processors.transformers(source(processor=said, settings={"transformers_version": version}), SPACE)


def theirs(owner: Any, picture: Image.Image) -> Tensor:
    return owner(picture, return_tensors="pt")["pixel_values"][0]


@pytest.mark.parametrize("picture", SOME)
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_pixels_are_those_of_transformers_pil_processors(kind, number, picture):
    owner = processor(f"{kind}ImageProcessorPil", TRANSFORMERS[kind][number])
    same(of_transformers(owner), photograph(picture), theirs(owner, photograph(picture)))


@pytest.mark.parametrize("picture", SOME)
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_pixels_are_those_of_transformers_processors_on_tensors(kind, number, picture):
    owner = processor(f"{kind}ImageProcessor", TRANSFORMERS[kind][number])
    ours = of_transformers(owner, name=f"{kind}ImageProcessorFast")
    assert ours == of_transformers(owner, "5.24.0"), "from version 5 on the name no longer says it"
    assert ours.resampler == "torch"
    same(ours, photograph(picture), theirs(owner, photograph(picture)))


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("settings", [{}, dict(size=box(256, 256)), dict(size=box(96, 160))], ids=str)
def test_pixels_are_within_half_a_level_of_dinov3s_processor(settings, picture):
    """It resizes floats; ours are rounded to 8 bits."""
    owner = processor("DINOv3ViTImageProcessor", settings)
    same(of_transformers(owner), photograph(picture), theirs(owner, photograph(picture)), levels=0.5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(do_normalize=False),
        dict(do_rescale=False, image_mean=[120.0, 110.0, 100.0], image_std=[50.0, 60.0, 70.0]),
        dict(do_rescale=False, do_normalize=False),
        dict(rescale_factor=1 / 127.5, image_mean=[1.0, 1.0, 1.0], image_std=[1.0, 1.0, 1.0]),
        dict(image_mean=0.5, image_std=0.25),
    ],
    ids=str,
)
def test_any_range_of_numbers_is_that_of_the_processor(settings):
    owner = processor("ViTImageProcessorPil", settings)
    said = owner.to_dict() | settings
    ours = processors.transformers(source(processor=said), SPACE)(photograph("coffee"))[0]
    if isinstance(settings.get("image_mean"), float):
        owner = processor("ViTImageProcessorPil", {name: [value] * 3 for name, value in settings.items()})
    expected = torch.as_tensor(theirs(owner, photograph("coffee"))).float()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_processor_that_does_not_resize_keeps_the_size():
    owner = processor("ViTImageProcessorPil", dict(do_resize=False))
    ours = of_transformers(owner)
    assert ours.size is None
    same(ours, photograph("chelsea"), theirs(owner, photograph("chelsea")))


@pytest.mark.parametrize("joint", [False, True])
def test_a_saved_folder_gives_the_pixels_of_its_automatic_processor(tmp_path, joint):
    """transformers 5 writes a processor of pictures alone, or one of pictures and text as one file."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Dinov2Config(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, image_size=56)
    transformers.Dinov2Model(config).save_pretrained(tmp_path)
    owner = processor("BitImageProcessor", TRANSFORMERS["Bit"][0])
    owner.save_pretrained(tmp_path)
    if joint:
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": owner.to_dict()}))
    automatic = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    vit = ViT.from_pretrained(tmp_path)
    for picture in ("astronaut", "coffee", "page"):
        same(vit.preprocess, photograph(picture), theirs(automatic, photograph(picture)))
    assert ViT.from_pretrained(tmp_path, image_size=(56, 56)).preprocess.size == (56, 56), "asked for"


# torchvision, open_clip, and the authors of DINO ---------------------------------------------------------------------


def test_pixels_are_those_of_torchvisions_presets():
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    names = ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"]
    presets = [weights.transforms() for name in names for weights in models.get_model_weights(name)]
    different = {repr(preset): preset for preset in presets}
    assert len(different) >= 5
    for preset in different.values():
        (cut,), (resized,) = preset.crop_size, preset.resize_size
        ours = Preprocess((cut, cut), "crop", processors.crop_ratio(cut, resized), preset.interpolation.value)
        for picture in SOME:
            same(ours, photograph(picture), preset(photograph(picture)))


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize(
    "cfg",
    [
        {},
        dict(mean=[0.5] * 3, std=[0.5] * 3, interpolation="bicubic", resize_mode="squash"),
        dict(interpolation="bilinear", mean=0.4),
    ],
    ids=str,
)
def test_pixels_are_those_of_open_clips_steps(cfg, picture):
    steps = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    mode = steps.InterpolationMode(cfg.get("interpolation", "bicubic"))
    short = [steps.Resize(224, interpolation=mode), steps.CenterCrop((224, 224))]
    squash = [steps.Resize((224, 224), interpolation=mode)]
    mean, std = cfg.get("mean", processors.OPENAI_MEAN), cfg.get("std", processors.OPENAI_STD)
    mean = [mean] * 3 if isinstance(mean, float) else mean
    chosen = squash if cfg.get("resize_mode") == "squash" else short
    transform = steps.Compose([*chosen, steps.ToTensor(), steps.Normalize(mean, std)])
    ours = processors.open_clip(source(settings={"open_clip": {"preprocess_cfg": cfg}}), SPACE)
    same(ours, photograph(picture), transform(photograph(picture)))


@pytest.mark.parametrize("picture", PICTURES)
def test_pixels_are_those_of_the_authors_of_dino(picture):
    """DINO and DINOv2 resize pictures, DINOv3 tensors."""
    old = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    new = pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")
    mean, std = processors.IMAGENET_MEAN, processors.IMAGENET_STD
    short = [old.Resize(256, interpolation=old.InterpolationMode.BICUBIC), old.CenterCrop(224), old.ToTensor()]
    squash = [new.ToImage(), new.Resize((256, 256), antialias=True), new.ToDtype(torch.float32, scale=True)]
    for steps, ours in (
        (short, Preprocess((224, 224), "crop", 0.875)),
        (squash, Preprocess((256, 256), "squash", 1.0, "bilinear", resampler="torch")),
    ):
        same(ours, photograph(picture), old.Compose([*steps, old.Normalize(mean, std)])(photograph(picture)))
