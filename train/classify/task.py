"""The task `classify`: train a ViT with labels as a recipe says, and keep the best of it."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.datasets.augment.views import CentreView, TrainView
from regard.datasets.pictures import PictureSet, load_pictures, require_classes, splits_of
from regard.train.checkpoints import load
from regard.train.classify.building import CLASSES, build, save_classifier
from regard.train.classify.module import ClassifyModule
from regard.train.classify.recipe import ClassifyRecipe
from regard.train.loop import fit
from regard.train.pictures import PictureBatch, PictureBatches, PictureData, require_channels
from regard.train.recipe import RECIPE, default_recipe, run_recipe, save_recipe
from regard.train.result import MODEL, Trained, next_score
from regard.train.steps import is_first_rank
from regard.vit.checkpoint import require_place
from regard.vit.errors import InputError
from regard.vit.files import typed_path

_HELD_OUT = 0.1  # where no split is there for it


class ClassifyData(PictureData):
    """Batches that leave on the host what the dice are made of: asking the device for it would wait for it.

    Their pictures have `channels` and (height, width) `size`.
    """

    def __init__(self, *batches: PictureBatches, channels: int, size: tuple[int, int], **options: Any):
        super().__init__(*batches, **options)
        self.channels, self.size = channels, size

    def transfer_batch_to_device(self, batch: PictureBatch, device: torch.device, dataloader_idx: int) -> PictureBatch:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return dataclasses.replace(moved, indices=batch.indices, epochs=batch.epochs)

    def example(self) -> PictureBatch:
        """A blank training batch, for its shapes; without indices, for nothing is to be mixed in it."""
        rows = torch.zeros(self.batch, dtype=torch.long)
        pixels = torch.zeros(self.batch, self.channels, *self.size, dtype=torch.uint8)
        return PictureBatch(pixels, rows, rows == 0, [""] * self.batch, rows[:0], rows[:0], [])


@dataclass(frozen=True)
class TrainedClassifier(Trained):
    """A finished run: the model folder that `ViT.from_pretrained` opens, and how training went.

    Attributes:
        averaged: whether the model is the running average of the weights.
        splits: of the data, for a score on another one than was trained on.
    """

    averaged: bool = False
    splits: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "averaged_weights": self.averaged}

    def next_commands(self) -> list[str]:
        run, data = self.quoted
        of = ["the model is the average of the weights"] if self.averaged else []
        return [*of, next_score("classify", run, data, self.splits)]


def train_classify(
    recipe: str | Path | None = None,
    *,
    out: str | Path = "runs/classify",
    resume: bool = False,
    limit: int | None = None,
    fast_dev_run: bool = False,
    profile: bool = False,
    **changes: Any,
) -> TrainedClassifier:
    """Train a ViT with labels as a recipe says, in the folder `out`; the best epoch's weights go to `out/model`.

    `recipe` is a name or a YAML file; by default `fashion_mnist` on that set and the fields' defaults on other data.
    `changes` are any fields of `ClassifyRecipe`. `out/model` is a plain ViT with its head, its class names beside it
    in `classes.json`; where the recipe averages weights, it holds the average. With `resume` the run in `out` goes on,
    with its own recipe, to the weights it would have reached uninterrupted. `limit`, `fast_dev_run` and `profile` are
    as in `regard.train.loop.fit`.
    Raises InputError for what the user can mend, Interrupted after Ctrl-C or SIGTERM.
    """
    folder = typed_path(out)
    settings = run_recipe(
        ClassifyRecipe, default_recipe(ClassifyRecipe, "fashion_mnist", changes), recipe, folder, resume, changes
    )
    module, data, told = prepare(settings)
    names = data.training.pictures.classes

    def claimed() -> None:
        if not fast_dev_run:
            require_place(folder / MODEL, CLASSES)  # before the training, not after it
            save_recipe(settings, folder / RECIPE)
        held_out = data.held_out.pictures if data.held_out is not None else None
        chosen = "" if held_out is None else f", choosing the best epoch on {len(held_out)} of {held_out.name}"
        pictures = data.training.pictures
        print(told, file=sys.stderr)
        print(
            f"training on {len(pictures)} pictures of {pictures.name} in {len(names)} classes{chosen}",
            file=sys.stderr,
            flush=True,
        )

    result = fit(
        module,
        data,
        out=folder,
        epochs=settings.epochs,
        seed=settings.seed,
        monitor=module.monitor,
        resume=resume,
        save_every_steps=settings.save_every_steps,
        trainer=settings.trainer,
        claimed=claimed,
        compile=settings.compile,
        limit=limit,
        fast_dev_run=fast_dev_run,
        profile=profile,
    )
    place = result.out / MODEL
    if is_first_rank():
        module.load_state_dict(load(result.best or result.last)["state_dict"])
        save_classifier(place, module.best.cpu(), names)
    return TrainedClassifier(
        place, result, settings.data, averaged=module.average is not None, splits=splits_of(settings.data)
    )


def prepare(recipe: ClassifyRecipe) -> tuple[ClassifyModule, ClassifyData, str]:
    """The module and the data of a recipe, and a line about where the weights come from.

    Raises InputError for data that no classifier can be trained on, and for settings that contradict them.
    """
    training, held_out = pictures_of(recipe)
    vit, told = build(recipe, training.classes)
    preprocess = vit.preprocess
    require_channels(vit)
    assert preprocess.size is not None
    skipping = "error" if recipe.bad_images == "error" else "skip"
    common: dict[str, Any] = {
        "seed": recipe.seed,
        "bad_images": recipe.bad_images,
        "keep": recipe.workers == 0,
        "channels": vit.config.channels,
        "background": preprocess.background,
    }
    view = TrainView(
        preprocess.size,
        crop_scale=recipe.crop_scale,
        crop_ratio=recipe.crop_ratio,
        interpolation=recipe.interpolation,
        flip=recipe.flip,
        shift=recipe.shift,
        color_jitter=recipe.color_jitter,
        rand_augment=recipe.rand_augment,
        three_augment=recipe.three_augment,
        erase=recipe.erase,
        fill=tuple(round(255 * level) for level in preprocess.mean),
    )
    data = ClassifyData(
        PictureBatches(training, view, reduced=recipe.reduced, **common),
        # A replacement would be scored twice.
        PictureBatches(held_out, CentreView(preprocess), **common | {"bad_images": skipping}),
        batch=recipe.batch,
        seed=recipe.seed,
        workers=recipe.workers,
        channels=vit.config.channels,
        size=preprocess.size,
    )
    module = ClassifyModule(
        vit,
        seed=recipe.seed,
        loss=recipe.loss,
        label_smoothing=recipe.label_smoothing,
        mixup=recipe.mixup,
        cutmix=recipe.cutmix,
        ema=recipe.ema,
        layer_decay=recipe.layer_decay,
        optimizer=recipe.optimizer,
        muon_lr=recipe.muon_lr,
        lr_scale=recipe.lr_scale,
        lr_batch=recipe.lr_batch,
        warmup_epochs=recipe.warmup_epochs,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        warmup_steps=recipe.warmup_steps,
        betas=(recipe.beta1, recipe.beta2),
        clip_norm=recipe.clip_norm,
    )
    return module, data, told


def pictures_of(recipe: ClassifyRecipe) -> tuple[PictureSet, PictureSet]:
    """(training, held out): a share of the training split, or the split `val`. The split `test` is never read."""
    pictures = load_pictures(recipe.data, recipe.split)
    require_classes(pictures)
    has_val = "val" in splits_of(recipe.data) and recipe.split != "val"
    share = recipe.held_out if recipe.held_out is not None else 0.0 if has_val else _HELD_OUT
    if share:
        return pictures.split(share, recipe.seed)
    if not has_val:
        raise InputError(f"{recipe.data}: has no split val to choose the best epoch by; set held_out to a share")
    held_out = load_pictures(recipe.data, "val")
    if held_out.classes != pictures.classes:
        raise InputError(f"{held_out.name}: its classes are not those of {pictures.name}, of which a model learns")
    return pictures, held_out
