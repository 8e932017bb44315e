"""What a source states about its preprocessing, what the caller asks for, and what cannot be expressed."""

import json
from typing import Any

import numpy as np
import pytest

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.source import Source

SPACE = Preprocess(size=(224, 224))
HALF = (0.5, 0.5, 0.5)


def source(**stated: Any) -> Source:
    """What lies in files: plain JSON values."""
    return Source("model", {}, **{name: json.loads(json.dumps(values)) for name, values in stated.items()})


# as the hub's oldest files are: no kind, a bare number for a size, flags left out
OLD = {
    "vit": (
        dict(do_normalize=True, do_resize=True, image_mean=HALF, image_std=HALF, resample=2, size=224),
        Preprocess((224, 224), "squash", 1.0, "bilinear", HALF, HALF),
    ),
    "dinov2": (
        dict(size=256, crop_size=224, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
        Preprocess((224, 224), "crop", 0.875),
    ),
    "clip": (
        dict(crop_size=224, do_center_crop=True, size=224, resample=3),
        Preprocess((224, 224), "crop", 1.0, "bicubic", processors.OPENAI_MEAN, processors.OPENAI_STD),
    ),
    "deit": (
        dict(feature_extractor_type="DeiTFeatureExtractor", size=256, crop_size=224),
        Preprocess((224, 224), "squash", 0.875, "bicubic", HALF, HALF),
    ),
    "siglip": (
        dict(size={"height": 384, "width": 384, "shortest_edge": None}),
        Preprocess((384, 384), "squash", 1.0, "bicubic", HALF, HALF),
    ),
}


@pytest.mark.parametrize("model_type", OLD)
def test_old_files_are_read_as_transformers_reads_them(model_type):
    said, expected = OLD[model_type]
    found = processors.transformers(source(processor=said, settings={"model_type": model_type}), SPACE)
    assert found == Preprocess(**{**vars(expected), "crop_offset": "floor"})


def test_a_ratio_resizes_to_exactly_the_pixels_meant():
    for cut in (1, 56, 121, 224, 336, 518):
        for resized in range(max(1, cut // 2), 2 * cut + 400):
            ratio = processors.crop_ratio(cut, resized)
            assert int(cut / ratio) == resized, (cut, resized)
            assert ratio == pytest.approx(cut / resized, rel=1e-12)


@pytest.mark.parametrize("made", [1, 3])
def test_a_model_of_one_channel_takes_grey_pictures(made):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("vit_small_patch16_224", in_chans=made, img_size=48, embed_dim=48, depth=1, num_heads=3)
    vit = ViT.from_pretrained(model, channels=1)
    batch = vit.preprocess(np.full((60, 80, 3), 255, np.uint8))
    assert batch.shape == (1, 1, 48, 48)
    assert batch.max() == batch.min() == 1, "0.5 and 0.5, as for each of three channels"
    assert vit(batch).grid == (3, 3)
    assert any("grey" in note for note in vit.report.assumed)


def test_what_the_caller_asks_for_wins_and_the_rest_stays():
    cfg = dict(input_size=(3, 224, 224), crop_pct=0.9, interpolation="bilinear", mean=[0.5] * 3, std=[0.5] * 3)
    stated = processors.timm(source(processor=cfg), SPACE)
    wider = processors.timm(source(processor=cfg, changes={"image_size": [96, 160]}), SPACE)
    assert wider == Preprocess(**{**vars(stated), "size": (96, 160)})
    own = Preprocess((32, 64), "squash", background=(0, 0, 0))
    held = source(processor=dict(cfg, crop_mode="border"))
    held.changes = {"preprocess": own, "image_size": (96, 160)}
    assert processors.timm(held, SPACE) == own, "even where what the source states cannot be done"
    assert processors.timm(source(), SPACE) == SPACE
    bare = processors.transformers(source(changes={"image_size": 112}), SPACE)
    assert (bare.size, bare.crop_offset) == ((112, 112), "floor"), "a live module states nothing"


def test_each_layout_reads_what_its_own_library_states_first():
    timm = dict(input_size=(3, 224, 224), crop_pct=0.9, mean=[0.1] * 3, std=[0.5] * 3)
    open_clip = {"preprocess_cfg": dict(mean=[0.2] * 3, std=[0.5] * 3)}
    transformers = dict(image_processor_type="ViTImageProcessor", image_mean=[0.3] * 3)
    settings = {"architecture": "vit", "pretrained_cfg": timm, "open_clip": open_clip}
    held = source(processor=transformers, settings=settings)
    assert processors.timm(held, SPACE).mean[0] == 0.1
    assert processors.open_clip(held, SPACE).mean[0] == 0.2
    assert processors.transformers(held, SPACE).mean[0] == 0.3
    held.settings.pop("pretrained_cfg")
    assert processors.timm(held, SPACE).mean[0] == 0.2
    held.settings.pop("open_clip")
    assert processors.timm(held, SPACE).mean[0] == 0.3
    flat = source(settings={"architecture": "vit", **timm})
    assert processors.timm(flat, SPACE).crop_ratio == 0.9, "as timm's oldest files have it"


def of_timm(**cfg: Any) -> tuple[str, dict[str, Any]]:
    return "timm", dict(processor=dict(input_size=(3, 9, 9), **cfg))


def of_open_clip(cfg: Any) -> tuple[str, dict[str, Any]]:
    return "open_clip", dict(settings={"open_clip": cfg})


def of_transformers(kind: str, **said: Any) -> tuple[str, dict[str, Any]]:
    return "transformers", dict(processor=dict(image_processor_type=kind and f"{kind}ImageProcessor", **said))


WRONG = {
    "crop_mode": (of_timm(crop_mode="border"), "'border'"),
    "timm's interpolation": (of_timm(interpolation="cubic"), "interpolation"),
    "crop_pct": (of_timm(crop_pct=87.5), "crop_ratio"),
    "channels": (of_timm(mean=[0.1] * 4), "mean"),
    "resize_mode": (of_open_clip({"preprocess_cfg": {"resize_mode": "longest"}}), "'longest'"),
    "a number for all": (of_open_clip(3), "preprocess"),
    "resample": (of_transformers("ViT", resample=9), "resample 9"),
    "no crop": (of_transformers("ViT", size={"shortest_edge": 9}), "without a crop"),
    "crop": (of_transformers("CLIP", crop_size={"height": 9, "width": 8}), "9 x 8"),
    "crop alone": (of_transformers("CLIP", do_resize=False), "without resizing"),
    "two ratios": (of_transformers("DeiT", crop_size={"height": 256, "width": 128}), "(256, 128)"),
    "longest": (of_transformers("ViT", size={"longest_edge": 9}), "longest_edge"),
    "pad": (of_transformers("ViT", do_pad=True), "do_pad"),
    "kind": (of_transformers("Other", crop_pct=0.9), "Other"),
    "no kind": (of_transformers("", size=9), "resample missing"),
    "text for a size": (of_transformers("ViT", size="9"), "'9'"),
    "text for a mean": (of_transformers("ViT", image_mean="half"), "mean"),
    "a list for a factor": (of_transformers("ViT", rescale_factor=[1]), "preprocess"),
    "nothing for a size": (of_transformers("ViT", size=0), "size 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_expressed_is_one_line_and_no_other_picture(what):
    (library, stated), word = WRONG[what]
    with pytest.raises(InputError) as caught:
        getattr(processors, library)(source(**stated), SPACE)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kind_that_is_not_known_but_plain_is_read_and_told_of():
    stated = dict(size=112, resample=3, image_mean=HALF, image_std=HALF)
    held = source(processor=dict(image_processor_type="OtherImageProcessorFast", **stated))
    assert processors.transformers(held, SPACE).size == (112, 112)
    assert "Other" in held.assumed[0]
