"""Folders that an older version of Regard wrote open as what they were."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from regard.vit import checkpoint
from regard.vit.config import PositionResize, RopeRecipe, ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.values import to_json

# As version 0.1.0 wrote it.
FORMAT_1 = """{"format": 1, "kind": "ViTConfig", "image_size": [16, 40], "patch_size": 8, "channels": 3, "dim": 24,
"depth": 2, "heads": 3, "head_dim": null, "hidden_dim": 20, "class_token": true, "registers": 1,
"registers_place": "end", "positions": "learned", "position_rows": "patches",
"position_resize": {"mode": "bilinear", "antialias": false, "offset": 0.1}, "rope_base": 50.0, "activation": "gelu",
"norm_eps": 1e-06, "qkv_bias": true, "qk_norm": false, "layer_scale": null, "drop_path": 0.0, "pre_norm": false,
"pooling": "cls", "size_policy": "resize", "preprocess": {"size": [224, 224], "fit": "squash", "crop_ratio": 1.0,
"interpolation": "bicubic", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
"background": [255, 255, 255]}}"""
FORMAT_1_NAMES = (
    "cls registers positions tokenizer.proj.weight tokenizer.proj.bias norm.weight norm.bias "
    + " ".join(
        f"blocks.{i}.{part}.{kind}"
        for i in (0, 1)
        for part in ("norm1", "attn.to_q", "attn.to_k", "attn.to_v", "attn.out", "norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    )
).split()


@pytest.mark.parametrize("positions", ["learned", "rope", "sincos"])
def test_a_folder_of_format_1_opens_as_what_it_was(noisy, tmp_path, positions):
    passport = {**json.loads(FORMAT_1), "positions": positions, "dim": 24 if positions != "rope" else 48}
    own = (
        "image_size",
        "patch_size",
        "dim",
        "depth",
        "heads",
        "hidden_dim",
        "registers",
        "registers_place",
        "positions",
    )
    resize, rope = PositionResize("bilinear", False, 0.1, False), RopeRecipe("centred", 50.0, None, None)
    same = {name: tuple(v) if isinstance(v := passport[name], list) else v for name in own}
    model = noisy(ViT(ViTConfig(position_resize=resize, rope=rope, **same))).eval()
    (tmp_path / "config.json").write_text(json.dumps(passport))
    tensors = model.state_dict()
    assert set(tensors) | {"positions"} == set(FORMAT_1_NAMES)
    save_file(tensors, tmp_path / "model.safetensors")
    opened = ViT.from_pretrained(tmp_path)
    assert opened.config == model.config
    for size in ((16, 40), (24, 16)):
        assert torch.equal(opened(torch.ones(1, 3, *size)).patches, model(torch.ones(1, 3, *size)).patches)
    opened.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["format"] == 2


def test_an_old_passport_inside_a_larger_one_is_read_too(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Larger:
        vit: ViTConfig
        words: int

    old = json.loads(FORMAT_1)
    vit = {name: value for name, value in old.items() if name not in ("format", "kind")}
    (tmp_path / "config.json").write_text(json.dumps({"format": 1, "kind": "Larger", "vit": vit, "words": 3}))
    config = checkpoint.read_config(tmp_path, Larger)
    assert (config.words, config.vit.rope.base, config.vit.registers) == (3, 50.0, 1)


def test_a_field_of_format_2_in_format_1_is_unknown_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(FORMAT_1), "colour": "red"}))
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(tmp_path)
    text = str(caught.value)
    assert "config.json" in text
    assert "unknown field 'colour'" in text
    assert "\n" not in text


@pytest.mark.parametrize(("fit", "ratio"), [("squash", 1.0), ("crop", 0.5)])
def test_a_crop_ratio_that_squash_did_not_heed_still_cuts_nothing(tmp_path, fit, ratio):
    old = json.loads(FORMAT_1)
    old["preprocess"] |= {"fit": fit, "crop_ratio": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(old))
    preprocess = checkpoint.read_config(tmp_path, ViTConfig).preprocess
    assert (preprocess.crop_ratio, preprocess.crop_offset, preprocess.resampler) == (ratio, "even", "pillow")


@pytest.mark.parametrize("inside", [False, True])
def test_a_passport_from_before_sinks_is_of_a_vit_without_one(tmp_path, noisy, inside):
    @dataclasses.dataclass(frozen=True)
    class Larger:
        vit: ViTConfig
        words: int

    config = ViTConfig(image_size=(16, 40), patch_size=8, dim=24, depth=1, heads=3)
    kind, whole = ("Larger", Larger(config, 3)) if inside else ("ViTConfig", config)
    passport = to_json(whole)
    assert (passport["vit"] if inside else passport).pop("sink") is False
    (tmp_path / "config.json").write_text(json.dumps({"format": 2, "kind": kind, **passport}))
    assert checkpoint.read_config(tmp_path, type(whole)) == whole
