"""A field is changed by Python's values or JSON's, and its kind is always checked."""

import pytest

from regard.vit import ViT, ViTConfig
from regard.vit.config import changed_vit
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.values import changed, from_json, merged


def test_a_mapping_changes_some_fields_of_a_nested_config():
    config = changed(ViTConfig(), {"preprocess": {"fit": "crop"}, "image_size": [32, 48]})
    assert config.preprocess == Preprocess(fit="crop")
    assert config.image_size == (32, 48)
    assert changed(config, {"preprocess": Preprocess(size=None)}).preprocess.size is None


def test_another_image_size_is_preprocessed_to_unless_a_size_is_stated():
    assert changed_vit(ViTConfig(), {"image_size": (32, 48)}).preprocess.size == (32, 48)
    assert changed_vit(ViTConfig(), {"image_size": (32, 48), "preprocess": {"fit": "crop"}}).preprocess == Preprocess(
        size=(32, 48), fit="crop"
    )
    assert changed_vit(ViTConfig(), {"image_size": (32, 48), "preprocess": Preprocess()}).preprocess.size == (224, 224)
    assert changed_vit(ViTConfig(), {"image_size": (32, 48), "preprocess": {"size": None}}).preprocess.size is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dim": "x"}, "ViTConfig.dim: expected int"),
        ({"dim": True}, "ViTConfig.dim: expected int"),
        ({"qkv_bias": 1}, "ViTConfig.qkv_bias: expected bool"),
        ({"drop_path": float("nan")}, "ViTConfig.drop_path: nan is not a finite number"),
        ({"positions": ["learned"]}, "ViTConfig.positions is"),
        ({"preprocess": {"fitt": "crop"}}, "Preprocess has no field 'fitt'"),
        ({"preprocess": None}, "ViTConfig.preprocess: expected an object"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_named(changes, says):
    with pytest.raises(InputError) as caught:
        ViT.preset("tiny", **changes)
    assert says in str(caught.value)


def test_whole_numbers_are_numbers_and_the_infinite_is_none():
    assert from_json(3, float, "x") == 3.0
    with pytest.raises(InputError, match="finite"):
        from_json(float("inf"), float, "x")


def test_merging_goes_as_deep_as_both_sides_do():
    assert merged({"a": {"b": 1, "c": {"d": 2}}, "e": 3}, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {
        "a": {"b": 1, "c": {"d": 2, "f": 4}},
        "e": {"g": 5},
    }
