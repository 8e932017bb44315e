"""`ViTConfig` and the presets by name."""

import dataclasses

import pytest
import torch

from regard.vit.config import PATCH_SIZES, PRESETS, PositionResize, ViTConfig, preset_config
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.preprocess import Preprocess

# millions of parameters without a head at patch 16 and 224 px; heads
SIZES = {
    "tiny": (5.5, 3),
    "small": (21.7, 6),
    "base": (85.8, 12),
    "large": (303.3, 16),
    "so400m": (412, 16),
    "giant": (1134, 24),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_of_their_name(name):
    assert set(PRESETS) == set(SIZES)
    millions, heads = SIZES[name]
    for patch in PATCH_SIZES:
        with torch.device("meta"):
            model = ViT.preset(name, patch_size=patch)
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert count == pytest.approx(millions, rel=0.005 if patch == 16 else 0.1)
        assert model.config.heads == heads
        assert model.config.dim % heads == 0
        assert model.config.grid == (224 // patch, 224 // patch)


def test_a_preset_takes_any_field():
    config = preset_config("tiny", patch_size=8, registers=4, image_size=(96, 160), heads=6)
    assert (config.dim, config.heads, config.registers, config.grid) == (192, 6, 4, (12, 20))
    assert config.preprocess.size == (96, 160), "the model must be fed at its native size"
    own = preset_config("tiny", image_size=(96, 160), preprocess=Preprocess(size=None))
    assert own.preprocess.size is None


def test_unknown_presets_and_fields_are_named():
    with pytest.raises(InputError, match=r"'bass'.*base"):
        preset_config("bass")
    with pytest.raises(InputError, match="'register'"):
        ViT.preset("tiny", register=4)


def test_configs_are_frozen_hashable_and_equal_by_value():
    a, b = ViTConfig(registers=4), ViTConfig(registers=4)
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b, ViTConfig()}) == 2
    for config in (a, a.preprocess, a.position_resize):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.size = 3


BAD = {
    "patch_size": 0,
    "channels": 0,
    "dim": 0,
    "depth": 0,
    "heads": 0,
    "head_dim": 0,
    "hidden_dim": -1,
    "registers": -1,
    "drop_path": 1.0,
    "positions": "sinus",
    "position_rows": "all",
    "registers_place": "start",
    "activation": "relu",
    "pooling": "max",
    "size_policy": "stretch",
    "image_size": (8, 224),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_an_error_that_names_its_field(name):
    with pytest.raises(InputError, match=name) as caught:
        ViTConfig(**{name: BAD[name]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [224, (224,), (224, 224, 3), (0, 224)])
def test_an_image_size_that_is_no_height_and_width_is_refused(size):
    with pytest.raises(InputError, match="image_size"):
        ViTConfig(image_size=size)
    with pytest.raises(InputError, match="image_size"):
        preset_config("tiny", image_size=size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(dim=100, heads=3), "head_dim"),
        (dict(class_token=False), "class_token"),
        (dict(class_token=False, pooling="cls+mean"), "class_token"),
        (dict(dim=30, heads=3, positions="sincos"), "multiple of 4"),
        (dict(dim=36, heads=6, positions="rope"), "multiple of 4"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        ViTConfig(**changes)


@pytest.mark.parametrize(
    "build",
    [
        lambda: PositionResize(mode="cubic"),
        lambda: Preprocess(fit="centre"),
        lambda: Preprocess(interpolation="cubic"),
        lambda: Preprocess(interpolation="lanczos", resampler="torch"),
        lambda: Preprocess(resampler="pil"),
        lambda: Preprocess(crop_offset="round"),
        lambda: Preprocess(crop_ratio=87.5),
        lambda: Preprocess(crop_ratio=0.0),
        lambda: Preprocess(size=(0, 224)),
        lambda: Preprocess(size=224),
        lambda: Preprocess(std=(1.0, 1.0, 0.0)),
        lambda: Preprocess(mean=(0.5, 0.5), std=(0.5, 0.5)),
        lambda: Preprocess(mean=(0.5,)),
    ],
)
def test_bad_values_of_the_nested_recipes_are_refused(build):
    with pytest.raises(InputError) as caught:
        build()
    assert "\n" not in str(caught.value)
