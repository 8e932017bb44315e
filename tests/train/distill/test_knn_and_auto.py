"""The k-NN that looks while a model trains, and settings derived from the number of images."""

import numpy as np
import pytest
import torch
from dino_reference import RECIPE

from regard.datasets.pictures import PictureSet
from regard.train.distill.auto import derived
from regard.train.distill.knn import KnnScore, asks, looked_at
from regard.train.distill.recipe import DistillRecipe
from regard.train.recipe import load_recipe, names

OPEN = {
    "prototypes",
    "tau_teacher",
    "tau_teacher_start",
    "tau_warmup_epochs",
    "momentum",
    "freeze_epochs",
    "warmup_epochs",
}


def knn_in_numpy(keys: np.ndarray, labels: np.ndarray, asks: np.ndarray, wanted: np.ndarray) -> float:
    right = 0
    for x, y in zip(asks, wanted, strict=True):
        cosines = keys @ x / np.linalg.norm(keys, axis=1) / np.linalg.norm(x)
        votes = np.zeros(labels.max() + 1)
        for near in np.argsort(-cosines)[:20]:
            votes[labels[near]] += np.exp(cosines[near] / 0.07)
        right += int(votes.argmax() == y)
    return right / len(asks)


def test_the_score_is_the_published_vote_whatever_the_order_and_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (150,), generator=generator)
    features = torch.randn(150, 8, generator=generator) + 1.5 * torch.eye(8)[labels]
    asking = torch.arange(150) % 5 == 4
    known, asked = (tensor.numpy() for tensor in (features[~asking], features[asking]))
    expected = knn_in_numpy(known, labels[~asking].numpy(), asked, labels[asking].numpy())
    assert 0.4 < expected < 0.95
    score = KnnScore(150)
    order = torch.randperm(150, generator=generator)
    for rows in order.split(32):
        padding = torch.cat((rows, rows[-1:]))
        counts = torch.ones(len(padding), dtype=torch.bool)
        counts[-1] = False
        score.add(features[padding] * torch.where(counts, 1.0, -9.0)[:, None], labels[padding], padding, counts)
    assert score.accuracy(lambda rows: rows) == pytest.approx(expected, abs=1e-9)
    assert score._rows == []


def test_what_cannot_be_scored_is_no_number() -> None:
    score = KnnScore(5)
    score.add(torch.randn(3, 4), torch.tensor([0, 1, 0]), torch.arange(3), torch.ones(3).bool())
    assert np.isnan(score.accuracy(lambda rows: rows))


def pictures(labels: list[int]) -> PictureSet:
    pixels = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None]
    return PictureSet("toy/train", ("a", "b"), torch.tensor(labels), pixels)


def test_the_pictures_looked_at_are_labelled_and_apart() -> None:
    found = looked_at(pictures([0, 1, -1] * 20), 30, seed=1)
    assert found is not None
    assert len(found) == 30
    assert (found.labels >= 0).all()
    assert found.pixels is not None
    assert len(found.pixels.unique()) == 30
    assert int(asks(torch.arange(30)).sum()) == 6


@pytest.mark.parametrize("labels", [[-1] * 9, [0] * 9, [0, 1, -1]])
def test_without_two_classes_and_enough_labels_nothing_is_looked_at(labels: list[int]) -> None:
    assert looked_at(pictures(labels), 100, seed=0) is None


def test_few_images_have_few_prototypes_sharp_targets_and_a_fast_teacher() -> None:
    recipe = DistillRecipe(epochs=100)
    found = [derived(recipe, images, 256)[0] for images in (1000, 20_000, 60_000, 300_000, 1_281_167)]
    assert [r.prototypes for r in found] == [1024, 1024, 4096, 32_768, 65_536]
    for name, first, last in (("tau_teacher", 0.02, 0.07), ("momentum", 0.99, 0.996)):
        values = [getattr(r, name) for r in found[1:]]
        assert values == sorted(values)
        assert (values[0], values[-1]) == pytest.approx((first, last))
    assert all(r.tau_teacher_start <= min(r.tau_teacher, 0.04) for r in found)
    assert found[0].freeze_epochs == 10.0  # 1,250 steps would be more than a tenth of the run
    assert found[-1].freeze_epochs == 1.0


def test_a_short_run_has_a_faster_teacher() -> None:
    recipe, reasons = derived(DistillRecipe(epochs=1), 60_000, 256)
    assert recipe.momentum == pytest.approx(1 - 20 / 234, abs=1e-5)
    assert any(reason.startswith("momentum") and "234 steps" in reason for reason in reasons)


def test_what_is_set_stays_and_gets_no_reason() -> None:
    recipe, reasons = derived(DistillRecipe(**RECIPE), 60_000, 256)
    assert recipe == DistillRecipe(**RECIPE)
    assert reasons == []
    bare, reasons = derived(DistillRecipe(), 60_000, 256)
    assert {reason.split()[0] for reason in reasons} == OPEN
    assert all(getattr(bare, name) is not None for name in OPEN)


@pytest.mark.parametrize("name", names(DistillRecipe))
def test_recipes_that_come_along_can_be_read(name: str) -> None:
    recipe = load_recipe(name, DistillRecipe)
    assert "easured" in recipe.about  # or not measured: each says which
    assert f"--recipe {name}" in recipe.about


def test_the_published_recipe_has_none_of_what_came_later() -> None:
    recipe = load_recipe("dino_s16", DistillRecipe)
    later = ("sinkhorn", "koleo", "ibot", "drop_path_subset", "drop_path_uniform")
    assert not any(getattr(recipe, name) for name in later)
    assert "registers" not in recipe.vit
    assert (recipe.blur, recipe.clip_mode, recipe.tau_per) == ("v1", "per_parameter", "epoch")
    assert all(getattr(recipe, name) is not None for name in OPEN)
    v2 = load_recipe("dinov2_s16", DistillRecipe)
    assert all(getattr(v2, name) for name in later)
    assert (v2.koleo, v2.ibot, v2.blur) == (0.1, 1.0, "v2")
