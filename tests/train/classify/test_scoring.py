"""k-NN, linear probes and classifiers scored: each against a naive computation, and on what a run leaves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import picture_run as script
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.datasets.pictures import load_pictures
from regard.train.classify.evaluate import open_classifier
from regard.train.classify.neighbours import score_neighbours
from regard.train.classify.probe import train_probe
from regard.train.features import features, natural, raw_pixels
from regard.verbs.evaluate import evaluate_classify, evaluate_knn, evaluate_linear
from regard.vit import InputError, ViT


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = script.draw(tmp_path_factory.mktemp("data") / "pictures")
    return script.draw(folder, per_class=7, split="test", seed=1)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory, picture_run: Any) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    code, report = picture_run(out, data=str(data), epochs=6, lr=1e-2, mixup=0.0, cutmix=0.0, ema=0.5)
    assert code == 0, report
    return out


def vit(**changes: Any) -> ViT:
    torch.manual_seed(0)
    made = ViT.preset("small", **{**script.VIT, **changes})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def clusters(count: int, classes: int = 7, width: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, classes, (count,), generator=generator)
    return centres[labels] + 0.9 * torch.randn(count, width, generator=generator), labels


# Features


@pytest.mark.parametrize("pooled", ["cls", "mean", "cls+mean"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_features_are_those_of_the_named_tokens_one_picture_at_a_time(data: Path, pooled: Any, blocks: int) -> None:
    model, pictures = vit(registers=2).train(), load_pictures(data, "test")
    told: list[tuple[int, int]] = []
    found = features(
        model, pictures, pooled=pooled, blocks=blocks, batch=4, progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (21, 21)
    assert model.training
    model.eval()
    for index in (0, 5, 20):
        image = model.preprocess(pictures.image(index))
        parts = []
        for tokens in model.intermediates(image, range(2 - blocks, 2), norm=True):
            parts += [tokens.cls] if "cls" in pooled else []
            parts += [tokens.patches.mean(1)] if "mean" in pooled else []
        torch.testing.assert_close(found[index], torch.cat(parts, 1)[0], rtol=1e-4, atol=1e-5)


def test_raw_pixels_are_the_preprocessed_picture(data: Path) -> None:
    model, pictures = vit(), load_pictures(data, "test")
    found = raw_pixels(model.preprocess, pictures, batch=4)
    torch.testing.assert_close(found[9], model.preprocess(pictures.image(9)).flatten())


def test_what_a_model_pools_by_stands_for_the_picture() -> None:
    assert natural(vit()) == "cls"
    assert natural(vit(pooling="mean", class_token=False)) == "mean"
    assert natural(vit(pooling="map")) == "cls"
    with pytest.raises(InputError, match="no class token"):
        features(vit(pooling="mean", class_token=False), None, pooled="cls")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="blocks is 3; this ViT has 2"):
        features(vit(), None, blocks=3)  # type: ignore[arg-type]


# k-NN


def test_the_score_of_neighbours_is_that_of_a_naive_vote() -> None:
    (known, labels), (asked, right) = clusters(300), clusters(60, seed=1)
    scores = score_neighbours(known, labels, asked, right, ks=(1, 5, 20, 999), temperature=0.1)
    unit = functional.normalize(known.double(), dim=1).numpy()
    for score, k in zip(scores, (1, 5, 20, 300), strict=True):
        first = five = 0
        for query, truth in zip(functional.normalize(asked.double(), dim=1).numpy(), right.tolist(), strict=True):
            cosine = unit @ query
            votes = np.zeros(7)
            for place in np.argsort(-cosine)[:k]:
                votes[labels[place]] += np.exp(cosine[place] / 0.1)
            order = np.argsort(-votes)
            first += order[0] == truth
            five += truth in order[:5]
        assert score.top1 == pytest.approx(first / 60)
        assert score.top5 is None if k == 1 else score.top5 == pytest.approx(five / 60)


def test_neighbours_know_better_than_chance_and_fewer_than_a_hundred_may_be_asked(data: Path, run: Path) -> None:
    result = evaluate_knn(model=run, data=str(data), k=(1, 20, 500))
    assert [score.k for score in result.scores] == [1, 20, 500]
    assert result.best.top1 > 0.6
    assert (result.n_known, result.n_pictures, result.features) == (39, 21, "the class token")
    assert json.loads(json.dumps(result.as_dict()))["scores"][0]["k"] == 1
    assert "by the" in str(result)
    pixels = evaluate_knn(model="pixels", data=str(data), k=(5,))
    assert pixels.best.top1 > 0.6
    assert pixels.features == "raw pixels of 64 x 64"


def test_a_split_is_not_asked_about_itself(data: Path, run: Path) -> None:
    with pytest.raises(InputError, match="about themselves"):
        evaluate_knn(model=run, data=str(data), split="train")
    with pytest.raises(InputError, match="each at least 1"):
        evaluate_knn(model=run, data=str(data), k=(0,))


def test_numbers_of_neighbours_may_be_typed(data: Path, run: Path) -> None:
    for typed in ("5,20", "[5, 20]", [5, 20]):
        assert [score.k for score in evaluate_knn(model=run, data=str(data), k=typed).scores] == [5, 20]
    with pytest.raises(InputError, match="k is '5;20'; give whole numbers"):
        evaluate_knn(model=run, data=str(data), k="5;20")


# Linear probe


def test_heads_trained_side_by_side_are_those_trained_one_by_one() -> None:
    known, labels = clusters(400)
    rates = (0.01, 0.3, 3.0)
    both = train_probe(known, labels, 7, rates=rates, epochs=3, batch=64)
    for rate in rates:
        alone = train_probe(known, labels, 7, rates=(rate,), epochs=3, batch=64)
        assert alone.held_out_accuracy == pytest.approx(both.tried[rate])
        if rate == both.lr:
            torch.testing.assert_close(alone.head.weight, both.head.weight)
            torch.testing.assert_close(alone.head.bias, both.head.bias)


def test_it_is_sgd_on_standardised_features_as_torch_does_it() -> None:
    known, labels = clusters(100)
    known = known * 3 + 10
    probe = train_probe(known, labels, 7, rates=(0.1,), epochs=4, batch=1000, held_out=0.1)
    from regard.train.classify.probe import _split

    rows, _ = _split(labels, 0.1, 0)
    x, y = known[rows], labels[rows]
    mean, spread = x.mean(0), x.std(0, unbiased=False)
    head = nn.Linear(12, 7)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    sgd = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        sgd.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * step / 4))
        sgd.zero_grad()
        functional.cross_entropy(head((x - mean) / spread), y).backward()
        sgd.step()
    torch.testing.assert_close(probe.head(x), head((x - mean) / spread), rtol=1e-4, atol=1e-4)


def test_a_probe_separates_what_can_be_separated_and_names_its_rate() -> None:
    (known, labels), (asked, right) = clusters(600), clusters(200, seed=1)
    probe = train_probe(known, labels, 7)
    assert (probe.head(asked).argmax(1) == right).double().mean() > 0.85
    assert probe.held_out_accuracy == max(probe.tried.values()) == probe.tried[probe.lr]
    assert not any(p.requires_grad for p in probe.head.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": torch.zeros(20, dtype=torch.long)}, "two classes at least"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "do not fit"),
        ({"rates": ()}, "at least one"),
        ({"held_out": 0.0}, "held_out is 0.0"),
        ({"labels": torch.arange(20), "classes": 20}, "no class has two pictures"),
    ],
)
def test_what_no_probe_can_be_trained_on_is_told(change: dict[str, Any], said: str) -> None:
    given = {"features": torch.randn(20, 3), "labels": torch.arange(20) % 2, "classes": 2, **change}
    with pytest.raises(InputError, match=said):
        train_probe(**given)


def test_a_linear_probe_of_a_run_is_scored_on_the_test_split_alone(data: Path, run: Path) -> None:
    result = evaluate_linear(model=run, data=str(data), pooled="cls+mean", blocks=2)
    assert result.top1 > 0.6
    assert (result.n_pictures, result.data) == (21, "pictures/test")
    assert result.features == "class token and mean of the last 2 blocks"
    assert json.loads(json.dumps(result.as_dict()))["tried"]


# Classifiers


def test_a_run_is_scored_as_its_model_sees_each_picture(data: Path, run: Path) -> None:
    result = evaluate_classify(model=run, data=str(data), batch=5)
    model, pictures = ViT.from_pretrained(run), load_pictures(data, "test")
    logits = torch.cat([model.classify(model.preprocess(pictures.image(index))) for index in range(21)])
    right = logits.argmax(1) == pictures.labels
    assert result.top1 == pytest.approx(float(right.double().mean()))
    assert result.top5 is None
    for label, name in enumerate(script.CLASSES):
        assert result.per_class[name] == pytest.approx(float(right[pictures.labels == label].double().mean()))
    assert json.loads(json.dumps(result.as_dict()))["n_pictures"] == 21
    assert f"{result.top1:.2%} right of 21 pictures" in str(result)


def test_classes_are_found_by_name_in_whatever_order(data: Path, run: Path, tmp_path: Path) -> None:
    whole = evaluate_classify(model=run, data=str(data))
    names = sorted(script.CLASSES)
    moved = tmp_path / "model"
    moved.mkdir()
    for file in (run / "model").iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    opened = ViT.from_pretrained(moved)
    with torch.no_grad():  # the outputs in another order, and their names with them
        opened.head.weight.copy_(opened.head.weight[[2, 0, 1]].clone())
        opened.head.bias.copy_(opened.head.bias[[2, 0, 1]].clone())
    (moved / "classes.json").unlink()
    opened.save_pretrained(moved)
    (moved / "classes.json").write_text(json.dumps([names[2], names[0], names[1]]))
    assert evaluate_classify(model=moved, data=str(data)) == whole
    (moved / "classes.json").write_text(json.dumps(["cat", "dog", "dark"]))
    with pytest.raises(InputError, match="its class 'left' is none of the model's"):
        evaluate_classify(model=moved, data=str(data))


def test_a_model_without_a_head_or_with_another_is_told(data: Path, tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match="a ViT without a classifier; train one on it"):
        evaluate_classify(model=tmp_path / "bare", data=str(data))
    vit(classes=5).save_pretrained(tmp_path / "five")
    with pytest.raises(InputError, match="has 5 classes; pictures/test has 3"):
        open_classifier(tmp_path / "five", load_pictures(data, "test"))
