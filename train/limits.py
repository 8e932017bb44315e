"""Runs that are shorter than they could be: `--limit`, `--fast_dev_run`, and how often a short run is logged."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from regard.train.steps import steps_per_epoch, total_steps, train_batches
from regard.vit.errors import InputError

DEV_LIMITS: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 2, "log_every_n_steps": 1}
"""A run that only proves its configuration: batches of training and of validation, and every step logged."""


class TrialFolder:
    """A temporary folder that goes when this object does, or when Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="regard-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class Limit(Callback):
    """Lets an epoch use `images` training images, and validation as many; each epoch draws others of the whole set.

    Raises InputError if that is less than one batch on every device.
    """

    def __init__(self, images: int) -> None:
        self.images = images

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        data = train_batches(trainer)
        together = data.batch_size * data.world
        if self.images < together:
            raise InputError(
                f"limit is {self.images} images, less than one batch of {data.batch_size} on {data.world} device(s); "
                f"set it to {together} or more, or lower the batch"
            )
        trainer.limit_train_batches = min(len(data), self.images // together)
        sampler = getattr(trainer.datamodule, "eval_batches", None)  # type: ignore[attr-defined]
        if sampler is not None:
            trainer.limit_val_batches = max(1, self.images // (sampler.batch_size * sampler.world))


class LogSpacing(Callback):
    """Logs a step in fifty at most and a hundred rows at least, so that a short run has curves too."""

    def __init__(self, asked: int | None) -> None:
        self.asked = asked

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.asked is None:
            every = max(1, min(50, total_steps(trainer) // 100, steps_per_epoch(trainer)))
            trainer.log_every_n_steps = every  # type: ignore[attr-defined]
