"""The task `distill`: train a ViT on pictures without labels, by self-distillation (DINO)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.datasets.pictures import splits_of
from regard.train.distill.building import prepare, tell
from regard.train.distill.module import DistillModule
from regard.train.distill.recipe import DistillRecipe
from regard.train.loop import fit
from regard.train.recipe import RECIPE, default_recipe, run_recipe, save_recipe
from regard.train.result import MODEL, Trained, next_score
from regard.train.steps import is_first_rank
from regard.vit import ViT
from regard.vit.checkpoint import require_place
from regard.vit.files import typed_path


@dataclass(frozen=True)
class TrainedDistill(Trained):
    """A finished run: the teacher's backbone, which `ViT.from_pretrained` opens, and how training went."""

    splits: tuple[str, ...] = ()

    score_name: ClassVar[str] = "knn_accuracy"
    score_told: ClassVar[str] = "best k-NN accuracy while training"

    def next_commands(self) -> list[str]:
        run, data = self.quoted
        return [
            "it is the teacher's backbone, a plain ViT",
            next_score("knn", run, data, self.splits),
            f"or: regard look PICTURE --model {run}",
        ]


def train_distill(
    recipe: str | Path | None = None,
    *,
    out: str | Path = "runs/distill",
    resume: bool = False,
    limit: int | None = None,
    fast_dev_run: bool = False,
    profile: bool = False,
    **changes: Any,
) -> TrainedDistill:
    """Train a ViT without labels as a recipe says, in the folder `out`; the teacher's backbone goes to `out/model`.

    `recipe` is a name or a YAML file; by default `fashion_mnist` on that set and the fields' defaults on other data.
    `changes` are any fields of `DistillRecipe`. With `resume` the run in `out` goes on, with its own recipe, to the
    weights it would have reached uninterrupted. The model is that of the epoch with the best k-NN score where there
    are labels to look at, else of the last one.
    `limit`, `fast_dev_run` and `profile` are as in `regard.train.loop.fit`.
    Raises InputError for what the user can mend, Interrupted after Ctrl-C or SIGTERM.
    """
    folder = typed_path(out)
    default = default_recipe(DistillRecipe, "fashion_mnist", changes)
    settings = run_recipe(DistillRecipe, default, recipe, folder, resume, changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module, data, reasons = prepare(settings)

    def claimed() -> None:
        if not fast_dev_run:
            require_place(folder / MODEL)  # before the training, not after it
            save_recipe(settings, folder / RECIPE)
        tell(module, data.training.pictures, reasons)

    result = fit(
        module,
        data,
        out=folder,
        epochs=settings.epochs,
        seed=settings.seed,
        monitor="val/knn",
        resume=resume,
        save_every_steps=settings.save_every_steps,
        trainer=_trainer(settings, module),
        claimed=claimed,
        compile=settings.compile,
        limit=limit,
        fast_dev_run=fast_dev_run,
        profile=profile,
    )
    place = result.out / MODEL
    if is_first_rank():
        ViT.from_pretrained(result.best or result.last).save_pretrained(place)
    return TrainedDistill(place, result, settings.data, splits_of(settings.data))


def _trainer(settings: DistillRecipe, module: DistillModule) -> dict[str, Any]:
    every = {} if module.knn is None else {"check_val_every_n_epoch": settings.knn_every}
    return {**every, **settings.trainer}
