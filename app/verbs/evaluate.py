"""`regard evaluate`: how right a model is, on questions, on classes, by its neighbours, and by a linear probe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from regard.datasets import load_questions, require_coverage
from regard.models import DEMO, choose_device, open_qa, open_vit
from regard.progress import bar
from regard.train.classify.evaluate import (
    ClassScore,
    LinearScore,
    NeighbourScores,
    classify_pictures,
    open_classifier,
    score_by_neighbours,
    score_linearly,
)
from regard.train.evaluate import Score
from regard.train.evaluate import evaluate_answer as score
from regard.train.features import Pooled
from regard.vit import Preprocess, ViT
from regard.vit.errors import InputError

PIXELS = "pixels"
"""In place of a model: the pictures' own pixels."""


def evaluate_answer(
    *,
    model: str | Path = DEMO,
    data: str = "easy-vqa",
    split: str = "test",
    batch_images: int = 64,
    device: str = "auto",
) -> Score:
    """Score a model on every question of a set; questions outside its answer list count as wrong.

    Args:
        model: model folder, run folder, or hub name; default: what `regard demo` trained.
        data: `easy-vqa`, a folder, or a table (JSONL, CSV) with the columns image, question, answer.
        split: which split of a folder.
        batch_images: pictures per step.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable model, data set or picture, or a data set that the answers do not fit.
    """
    questions = load_questions(data, split)
    qa = open_qa(model, device)
    if qa.config.head != "generate":  # which can answer what no list holds
        require_coverage(questions, qa.config.answers, at_least=0.01)
    with bar("evaluating", len(questions.images), "images") as update:
        return score(qa, questions, batch_images=batch_images, progress=update)


def evaluate_classify(
    *,
    model: str | Path = "runs/classify",
    data: str = "fashion-mnist",
    split: str = "test",
    batch: int = 128,
    workers: int = 0,
    device: str = "auto",
) -> ClassScore:
    """Score a classifier on every picture of a set: top-1, top-5 and the accuracy of each class.

    Args:
        model: model folder, run folder, hub name or timm name of a ViT with a head for the classes of the data.
        data: pictures with labels: a folder with one folder per class, a table, tar shards, or a name.
        split: which split of them.
        batch: pictures per step.
        workers: processes that open pictures; 0 opens them in this one.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable model, data set or picture, or classes that are not the model's.
    """
    from regard.datasets.pictures import load_pictures

    _require({"batch": (batch, 1), "workers": (workers, 0)})
    pictures = load_pictures(data, split)
    vit, order = open_classifier(model, pictures)
    vit = vit.to(choose_device(device))
    with bar("evaluating", len(pictures), "pictures") as update:
        return classify_pictures(vit, pictures, order, batch=batch, workers=workers, progress=update)


def evaluate_knn(
    *,
    model: str | Path,
    data: str = "fashion-mnist",
    split: str = "test",
    k: str | Sequence[int] = "10,20,100,200",
    temperature: float = 0.07,
    pooled: Pooled | None = None,
    blocks: int = 1,
    batch: int = 128,
    workers: int = 0,
    device: str = "auto",
) -> NeighbourScores:
    """Classify a split by the nearest neighbours of its features among the training split: nothing is trained.

    Args:
        model: any ViT: folder, run, file, hub name or timm name; `pixels` takes the pictures themselves as features.
        data: pictures with labels: a folder with one folder per class, a table, tar shards, or a name.
        split: which split is asked about; `train` answers.
        k: numbers of neighbours to try, separated by commas.
        temperature: of the softmax that weights the neighbours by their cosine.
        pooled: `cls`, `mean` of the patches or `cls+mean`; default: what the model pools by.
        blocks: take the same from so many last blocks, side by side.
        batch: pictures per step.
        workers: processes that open pictures; 0 opens them in this one.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable model, data set or picture.
    """
    ks = _numbers(k)
    _require({"batch": (batch, 1), "workers": (workers, 0), "blocks": (blocks, 1)})
    vit = _features_of(model, data, device)
    with bar("features", 0, "pictures") as update:
        return score_by_neighbours(
            vit,
            data,
            split,
            ks=ks,
            temperature=temperature,
            pooled=pooled,
            blocks=blocks,
            batch=batch,
            workers=workers,
            progress=update,
        )


def evaluate_linear(
    *,
    model: str | Path,
    data: str = "fashion-mnist",
    split: str = "test",
    pooled: Literal["cls", "mean", "cls+mean"] | None = None,
    blocks: int = 1,
    epochs: int = 30,
    held_out: float = 0.1,
    seed: int = 0,
    batch: int = 128,
    workers: int = 0,
    device: str = "auto",
) -> LinearScore:
    """Train a linear classifier on a model's features, kept as they are, and score it on a split.

    The features are computed once; many learning rates are trained on them side by side, and a held-out share of the
    training split chooses.

    Args:
        model: any ViT: folder, run, file, hub name or timm name; `pixels` takes the pictures themselves as features.
        data: pictures with labels: a folder with one folder per class, a table, tar shards, or a name.
        split: which split is scored, once; `train` is trained on.
        pooled: `cls`, `mean` of the patches or `cls+mean`; default: what the model pools by.
        blocks: take the same from so many last blocks, side by side.
        epochs: passes over the features.
        held_out: share of the training split that chooses the learning rate.
        seed: of the split and of the order.
        batch: pictures per step of the model.
        workers: processes that open pictures; 0 opens them in this one.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable model, data set or picture.
    """
    _require({"batch": (batch, 1), "workers": (workers, 0), "blocks": (blocks, 1), "epochs": (epochs, 1)})
    vit = _features_of(model, data, device)
    with bar("features", 0, "pictures") as update:
        return score_linearly(
            vit,
            data,
            split,
            pooled=pooled,
            blocks=blocks,
            epochs=epochs,
            held_out=held_out,
            seed=seed,
            batch=batch,
            workers=workers,
            progress=update,
        )


def _numbers(k: str | Sequence[int]) -> list[int]:
    try:
        return [int(part) for part in (k.strip("[]()").split(",") if isinstance(k, str) else k)]
    except ValueError as error:
        raise InputError(f"k is {k!r}; give whole numbers, separated by commas, as 10,20") from error


def _require(least: dict[str, tuple[int, int]]) -> None:
    """Raise InputError for an argument that is below its smallest value: `name=(value, smallest)`."""
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InputError(f"{name} is {value}; it must be at least {smallest}")


def _features_of(model: str | Path, data: str, device: str) -> ViT | Preprocess:
    if str(model) != PIXELS:
        return open_vit(model, device)
    from regard.datasets.pictures import load_pictures

    pixels = load_pictures(data).pixels
    if pixels is None:  # files of any size
        return Preprocess(size=(64, 64), fit="crop")
    channels = pixels.shape[1]
    return Preprocess(size=(pixels.shape[2], pixels.shape[3]), mean=(0.0,) * channels, std=(1.0,) * channels)
