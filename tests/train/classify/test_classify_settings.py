"""The task `classify`: the weights it starts from, and the settings it takes and refuses."""

from pathlib import Path
from typing import Any

import picture_run as script
import pytest
import torch
from classify_cases import recipe, small

from regard.train.classify.building import build
from regard.train.classify.recipe import ClassifyRecipe
from regard.train.classify.task import prepare
from regard.train.recipe import load_recipe, names
from regard.vit.errors import InputError

# Weights to start from


@pytest.mark.parametrize("classes", [0, 3, 5])
def test_pretrained_weights_keep_a_head_that_fits_and_lose_another(
    data: Path, plain: Path, tmp_path: Path, classes: int
) -> None:
    source = small(classes=classes)
    source.save_pretrained(tmp_path / "vit")
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "vit")), script.CLASSES)
    saved = source.state_dict()
    for name, tensor in vit.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, saved[name]), name
    assert vit.config.drop_path == 0.2
    if classes == 3:
        assert torch.equal(vit.head.weight, saved["head.weight"])
        assert "its head of 3 classes is trained on" in told
    else:
        assert not vit.head.weight.any()
        assert vit.head.weight.shape == (3, 16)
        assert told.endswith(
            "a new head of 3 classes on it" if not classes else "a new head of 3 classes takes its place"
        )
    assert ("its head is of 5 classes" in told) == (classes == 5)


def test_a_head_of_other_class_names_gives_way(picture_run: Any, tmp_path: Path, plain: Path, data: Path) -> None:
    picture_run(tmp_path / "run", epochs=1)
    same, told = build(recipe(plain, data, pretrained=str(tmp_path / "run")), script.CLASSES)
    assert "its head of 3 classes is trained on" in told
    assert same.head.weight.any()
    other, told = build(recipe(plain, data, pretrained=str(tmp_path / "run")), ["a", "b", "c"])
    assert "its head is of other classes (dark, left, right); a new one of 3 takes its place" in told
    assert not other.head.weight.any()


def test_weights_of_another_library_with_another_head_get_a_new_one(data: Path, plain: Path, tmp_path: Path) -> None:
    source = small(classes=5, image_size=(12, 12), position_rows="cls+patches")
    source.export(tmp_path / "timm", "timm")
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "timm")), script.CLASSES)
    assert "it has a classifier of 5 classes; a new head of 3 classes takes its place" in told
    assert torch.equal(vit.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)
    same, told = build(recipe(plain, data, pretrained=str(tmp_path / "timm")), list("abcde"))
    assert "its head of 5 classes is trained on" in told
    assert torch.equal(same.head.weight, source.head.weight)


def test_pretrained_weights_are_laid_out_for_another_size_and_pooling(data: Path, plain: Path, tmp_path: Path) -> None:
    source = small()
    source.save_pretrained(tmp_path / "vit")
    changes = {"image_size": [24, 16], "pooling": "cls+mean"}
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "vit"), vit=changes), script.CLASSES)
    assert (vit.config.grid, vit.preprocess.size, vit.head.in_features) == ((6, 4), (24, 16), 32)
    images = torch.randn(2, 3, 24, 16)
    vit.eval()
    torch.testing.assert_close(vit(images).patches, source.eval()(images).patches)
    assert "a new head of 3 classes" in told
    with pytest.raises(InputError, match="saved by Regard"):
        build(recipe(plain, data, pretrained=str(tmp_path / "vit"), vit={"depth": 1}), script.CLASSES)


# The recipe


def test_a_misspelt_key_is_told_with_the_right_one(plain: Path) -> None:
    with pytest.raises(InputError, match="no field 'label_smoothin'; did you mean 'label_smoothing'"):
        load_recipe(plain, ClassifyRecipe, label_smoothin=0.1)
    plain.write_text("mixxup: 0.2\n")
    with pytest.raises(InputError, match="did you mean 'mixup'"):
        load_recipe(plain, ClassifyRecipe)


def test_every_recipe_that_comes_along_can_be_read_and_says_what_it_reaches() -> None:
    assert {"vit_s16_scratch", "deit3_s16_scratch", "fine_tune", "fashion_mnist", "linear_probe"} <= set(
        names(ClassifyRecipe)
    )
    for name in names(ClassifyRecipe):
        own = load_recipe(name, ClassifyRecipe)
        assert len(own.about) > 10


def test_every_field_is_documented() -> None:
    told = ClassifyRecipe.__doc__ or ""
    missing = [name for name in ClassifyRecipe.__dataclass_fields__ if f"\n        {name}: " not in told]
    assert missing == ["task"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"mixup": -1.0}, "mixup is -1.0"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"drop_path": 1.0}, "drop_path is 1.0"),
        ({"loss": "mse"}, "choose one of ce, bce"),
        ({"optimizer": "sgd"}, "choose one of adamw, muon"),
        ({"crop_scale": (0.5, 0.1)}, "the smaller first"),
        ({"warmup_steps": 3, "warmup_epochs": 1.0}, "say the same"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"muon_lr": 0.0}, "muon_lr is 0.0"),
        ({"freeze_vit": True, "optimizer": "muon", "drop_path": 0.0}, "muon trains those alone"),
        ({"freeze_vit": True, "drop_path": 0.1}, "leave layer_decay and drop_path out"),
    ],
)
def test_impossible_settings_are_told(plain: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_recipe(plain, ClassifyRecipe, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "smal"}, "no ViT preset is called 'smal'"),
        ({"vit": {"dimm": 3}}, "dimm"),
        ({"vit": {"classes": 3}}, "vit.classes is given by the data"),
        ({"vit": {"drop_path": 0.1}}, "vit.drop_path is a field of the recipe itself"),
        ({"freeze_vit": True, "drop_path": 0.0}, "give pretrained"),
        ({"rand_augment": "2,10"}, "rand_augment"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_what_contradicts_the_data_or_the_model_is_told(
    data: Path, plain: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        prepare(recipe(plain, **{"data": data, **change}))
