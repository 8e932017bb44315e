"""Scoring what was trained, or what others have trained: a classifier, k-NN on features, a linear probe on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.datasets.pictures import PictureSet, load_pictures, require_classes
from regard.train.classify.building import class_names
from regard.train.classify.neighbours import NeighbourScore, best_of, score_neighbours
from regard.train.classify.probe import train_probe
from regard.train.classify.score import rightly
from regard.train.features import Pooled, Progress, features, natural, raw_pixels, scored_batches
from regard.vit import Preprocess, ViT
from regard.vit.errors import InputError
from regard.vit.pretrained.files import locate
from regard.vit.pretrained.opening import is_own


@dataclass(frozen=True)
class ClassScore:
    """How often a classifier is right on a set of pictures.

    Attributes:
        top1: share of pictures whose likeliest class is the right one.
        top5: share of those with the right one among the five likeliest; None for five classes or fewer.
        per_class: top1 by class; None for a class without pictures.
        n_pictures: how many there are.
        data: name of the set and split.
    """

    top1: float
    top5: float | None
    per_class: dict[str, float | None]
    n_pictures: int
    data: str

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        told = {name: share for name, share in self.per_class.items() if share is not None}
        lowest = min(told, key=lambda name: told[name])
        highest = max(told, key=lambda name: told[name])
        top5 = "" if self.top5 is None else f", {self.top5:.2%} among the first five"
        return (
            f"{self.data}: {self.top1:.2%} right of {self.n_pictures} pictures{top5};"
            f" best class {highest} {told[highest]:.2%}, worst {lowest} {told[lowest]:.2%}"
        )


@dataclass(frozen=True)
class NeighbourScores:
    """k-NN accuracy for each number of neighbours tried, `features` says of what."""

    scores: tuple[NeighbourScore, ...]
    temperature: float
    features: str
    n_known: int
    n_pictures: int
    data: str

    @property
    def best(self) -> NeighbourScore:
        return best_of(self.scores)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "scores": [vars(score) for score in self.scores]}

    def __str__(self) -> str:
        shown = ", ".join(f"k={score.k} {score.top1:.2%}" for score in self.scores)
        return (
            f"{self.data}: {self.best.top1:.2%} right by the {self.best.k} nearest of {self.n_known} training pictures"
            f" ({shown}; {self.features}, cosine, temperature {self.temperature:g}; {self.n_pictures} pictures)"
        )


@dataclass(frozen=True)
class LinearScore:
    """Accuracy of a linear classifier on features, and how its learning rate was chosen; `features` says of what."""

    top1: float
    top5: float | None
    lr: float
    held_out_accuracy: float
    tried: dict[float, float]
    features: str
    n_pictures: int
    data: str

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "tried": {f"{lr:g}": score for lr, score in self.tried.items()}}

    def __str__(self) -> str:
        return (
            f"{self.data}: {self.top1:.2%} right of {self.n_pictures} pictures by a linear classifier on"
            f" {self.features} (lr {self.lr:g} of {len(self.tried)}, chosen on held-out training pictures:"
            f" {self.held_out_accuracy:.2%})"
        )


def open_classifier(model: str | Path, pictures: PictureSet) -> tuple[ViT, list[int]]:
    """A ViT with a head for the classes of a set, and the model's output of each of these classes.

    Where class names lie beside the model they are compared, in whatever order; elsewhere the order is taken to be that
    of the set. Raises InputError for a model without a head, and for classes that are not the model's.
    """
    require_labels(pictures)
    count, place = len(pictures.classes), locate(model)
    vit = ViT.from_pretrained(model) if is_own(place) else ViT.from_pretrained(model, classes=count)
    if vit.head is None:
        raise InputError(
            f"{model}: a ViT without a classifier; train one on it: regard train classify --pretrained {model} --data …"
        )
    own = class_names(place)
    if own is None:
        if vit.config.classes != count:
            raise InputError(f"{model}: has {vit.config.classes} classes; {pictures.name} has {count}")
        return vit, list(range(count))
    if strange := [name for name in pictures.classes if name not in own]:
        raise InputError(
            f"{pictures.name}: its class {strange[0]!r} is none of the model's ({', '.join(own[:5])}"
            f"{', …' if len(own) > 5 else ''})"
        )
    return vit, [own.index(name) for name in pictures.classes]


@torch.inference_mode()
def classify_pictures(
    vit: ViT,
    pictures: PictureSet,
    order: Sequence[int],
    *,
    batch: int = 128,
    workers: int = 0,
    progress: Progress | None = None,
) -> ClassScore:
    """Score a classifier on every picture of a set; `order` is the model's output of each class of the set."""
    device, training = next(vit.parameters()).device, vit.training
    vit.eval()
    outputs = torch.tensor(list(order))
    right: list[Tensor] = []
    try:
        for seen in scored_batches(vit.preprocess, vit.config.channels, pictures, batch, workers, progress):
            assert isinstance(seen.pixels, Tensor)
            images = vit.preprocess.normalize(seen.pixels.to(device)).to(vit.dtype)
            right.append(rightly(vit.classify(images).float().cpu(), outputs[seen.labels]))
    finally:
        vit.train(training)
    found = torch.cat(right)
    first = found[:, 0].double()
    per_class = {}
    for label, name in enumerate(pictures.classes):
        own = first[pictures.labels == label]
        per_class[name] = float(own.mean()) if len(own) else None
    top5 = float(found.any(dim=1).double().mean()) if vit.config.classes > 5 else None
    return ClassScore(float(first.mean()), top5, per_class, len(pictures), pictures.name)


def score_by_neighbours(
    source: ViT | Preprocess,
    data: str | Path,
    split: str = "test",
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
    pooled: Pooled | None = None,
    blocks: int = 1,
    batch: int = 128,
    workers: int = 0,
    progress: Progress | None = None,
) -> NeighbourScores:
    """k-NN accuracy on a split of a set, by the features of its training split."""
    training, asked = _both(data, split)
    if not ks or min(ks) < 1:  # before the features are computed
        raise InputError(f"k is {list(ks)}; it must be numbers of neighbours, each at least 1")
    compute, told = _extractor(source, pooled, blocks, batch, workers, len(training) + len(asked), progress)
    known, queries = compute(training), compute(asked)
    scores = score_neighbours(known, training.labels, queries, asked.labels, ks=ks, temperature=temperature)
    return NeighbourScores(tuple(scores), temperature, told, len(training), len(asked), asked.name)


def score_linearly(
    source: ViT | Preprocess,
    data: str | Path,
    split: str = "test",
    *,
    pooled: Pooled | None = None,
    blocks: int = 1,
    epochs: int = 30,
    held_out: float = 0.1,
    seed: int = 0,
    batch: int = 128,
    workers: int = 0,
    progress: Progress | None = None,
) -> LinearScore:
    """Accuracy on a split of a set of a linear classifier, trained on the features of its training split."""
    training, asked = _both(data, split)
    compute, told = _extractor(source, pooled, blocks, batch, workers, len(training) + len(asked), progress)
    device = next(source.parameters()).device if isinstance(source, ViT) else torch.device("cpu")
    probe = train_probe(
        compute(training).to(device),
        training.labels,
        len(training.classes),
        epochs=epochs,
        held_out=held_out,
        seed=seed,
    )
    with torch.inference_mode():
        right = rightly(probe.head(compute(asked).to(device)).cpu(), asked.labels)
    top5 = float(right.any(dim=1).double().mean()) if len(training.classes) > 5 else None
    return LinearScore(
        top1=float(right[:, 0].double().mean()),
        top5=top5,
        lr=probe.lr,
        held_out_accuracy=probe.held_out_accuracy,
        tried=probe.tried,
        features=told,
        n_pictures=len(asked),
        data=asked.name,
    )


def require_labels(pictures: PictureSet) -> None:
    """Raise InputError for pictures without a label, which cannot be scored."""
    missing = (pictures.labels < 0).nonzero()[:, 0]
    if not pictures.classes or len(missing):
        first = f", first {pictures.id(int(missing[0]))}" if len(missing) else ""
        raise InputError(f"{pictures.name}: {len(missing)} pictures have no label{first}; scoring needs them")


def _both(data: str | Path, split: str) -> tuple[PictureSet, PictureSet]:
    """(training, asked about), with the same classes."""
    training = load_pictures(data, "train")
    require_classes(training)
    if split == "train":
        raise InputError("split train would ask pictures about themselves; give val or test")
    asked = load_pictures(data, split)
    require_labels(asked)
    if asked.classes != training.classes:
        raise InputError(f"{asked.name}: its classes are not those of {training.name}")
    return training, asked


def _extractor(
    source: ViT | Preprocess,
    pooled: Pooled | None,
    blocks: int,
    batch: int,
    workers: int,
    total: int,
    progress: Progress | None,
) -> tuple[Callable[[PictureSet], Tensor], str]:
    """A function from a set to its features, which tells its progress over several sets, and what the features are."""
    before = 0

    def compute(pictures: PictureSet) -> Tensor:
        nonlocal before
        told = None if progress is None else lambda done, _: progress(before + done, total)
        if isinstance(source, ViT):
            made = features(source, pictures, pooled=pooled, blocks=blocks, batch=batch, workers=workers, progress=told)
        else:
            made = raw_pixels(source, pictures, progress=told)
        before += len(pictures)
        return made

    if not isinstance(source, ViT):
        return compute, f"raw pixels of {source.size[0]} x {source.size[1]}" if source.size else "raw pixels"
    kind = {"cls": "the class token", "mean": "the mean of the patches", "cls+mean": "class token and mean"}
    last = "" if blocks == 1 else f" of the last {blocks} blocks"
    return compute, kind[pooled or natural(source)] + last
