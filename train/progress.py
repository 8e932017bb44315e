"""What a person sees while a model trains, on stderr: a bar on a terminal, one line per epoch everywhere.

Lightning's bar redraws up to 100 times a second by default and competes with the training for the
interpreter (Lightning #20896); ours does it five times. Elsewhere than on a terminal a bar would fill a log
with control characters.
"""

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from regard.train.steps import batches_per_epoch, epochs, train_batches

_REFRESH_HZ = 5

# Lightning's advice that either does not hold here or that nobody at a command line can follow.
_HINTS = (
    r".*does not have many workers.*",
    r".*\d+ module\(s\) in eval mode at the start of training.*",
    r".*your dataloader is not resumable.*",
    r".*Checkpoint directory .* exists and is not empty.*",
)


def progress_callbacks() -> list[Callback]:
    """A line per epoch, and a bar under the lines where stderr is a terminal."""
    bar = [RichProgressBar(refresh_rate=_REFRESH_HZ, console_kwargs={"stderr": True})] if sys.stderr.isatty() else []
    return [*bar, EpochLines()]


class EpochLines(Callback):
    """Prints `epoch i/n`, train loss, validation scores, images/s, time spent and time left.

    The train loss is the mean over the epoch's batches and all ranks; it survives a resume in mid-epoch.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | float = 0.0
        self._batches = 0
        self._started = self._epoch_started = 0.0
        self._train_seconds = 0.0
        self._batches_here = self._batches_epoch_here = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loss": float(self._loss), "batches": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loss, self._batches = state_dict["loss"], state_dict["batches"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._epoch_started = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss, self._batches = 0.0, 0
        self._epoch_started, self._batches_epoch_here = time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning has divided the loss by the number of accumulated batches.
        self._loss = self._loss + outputs["loss"] * trainer.accumulate_grad_batches
        self._batches += 1
        self._batches_here += 1
        self._batches_epoch_here += 1
        self._train_seconds = time.monotonic() - self._epoch_started

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.strategy.reduce(torch.as_tensor(self._loss, device=pl_module.device) / self._batches)
        if not trainer.is_global_zero:
            return
        scores = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        data = train_batches(trainer)
        images = self._batches_epoch_here * data.batch_size * data.world
        elapsed = time.monotonic() - self._started
        epoch, last = trainer.current_epoch + 1, epochs(trainer)
        left = elapsed / self._batches_here * (last - epoch) * batches_per_epoch(trainer)
        parts = [
            f"epoch {epoch}/{last}",
            f"train loss {float(loss):.4f}",
            *(f"{name} {float(value):.4f}" for name, value in sorted(scores.items())),
            f"{images / max(self._train_seconds, 1e-9):.0f} images/s",
            f"{_clock(elapsed)} elapsed",
            f"{_clock(left)} left",
        ]
        _print_above_bar(trainer, "  ".join(parts))


def _print_above_bar(trainer: Trainer, line: str) -> None:
    bar = getattr(trainer.progress_bar_callback, "progress", None)
    if bar is None:
        print(line, file=sys.stderr, flush=True)
    else:
        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's notices and hints off the screen, not its warnings; afterwards everything is as
    before.
    """
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    console = rich.get_console()
    # Lightning's bar reconfigures rich's global console.
    console_state = dict(console.__dict__)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.*")
        for hint in _HINTS:
            warnings.filterwarnings("ignore", message=hint)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            console.__dict__ = console_state
