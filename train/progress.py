"""What a person sees while a model trains, on stderr: one status line, and one line per epoch that stays.

On a terminal the status line renews itself once a second; elsewhere it is a plain line, once in 30 seconds. Lightning's
bar redraws up to 100 times a second by default and competes with the training for the interpreter (Lightning #20896),
and reads the loss back from the device at every step.
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
from rich.console import Console
from rich.live import Live
from rich.text import Text

from regard.train.meter import Meter, Reading
from regard.train.steps import batches_per_epoch, epochs

LIVE_S, PLAIN_S = 1.0, 30.0
"""Seconds between two status lines: on a terminal, and elsewhere."""

# Lightning's advice that either does not hold here or that nobody at a command line can follow.
_HINTS = (
    r".*does not have many workers.*",
    r".*\d+ module\(s\) in eval mode at the start of training.*",
    r".*your dataloader is not resumable.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*Total length of `list` across ranks is zero.*",  # no held-out pictures, by choice
)


def progress_callbacks(meter: Meter) -> list[Callback]:
    """Status lines, and a line per epoch."""
    return [EpochLines(meter)]


class EpochLines(Callback):
    """Prints `epoch i/n`, train loss, validation scores, speed, memory, time spent and time left.

    The train loss is the mean over the epoch's batches and all ranks; it survives a resume in mid-epoch. That of a
    status line is the mean of the epoch so far on the first rank.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._loss: torch.Tensor | float = 0.0
        self._batches = 0
        self._started = self._shown = 0.0
        self._epoch_began = Reading()
        self._batches_here = 0
        self._live: Live | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"loss": float(self._loss), "batches": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loss, self._batches = state_dict["loss"], state_dict["batches"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._shown = time.monotonic()
        console = Console(stderr=True)
        if trainer.is_global_zero and sys.stderr.isatty() and console.is_terminal:
            # Redrawn by hand: a thread that redraws would take turns with the training.
            self._live = Live(Text(""), console=console, auto_refresh=False, transient=True)
            self._live.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss, self._batches = 0.0, 0
        self._epoch_began = self.meter.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning has divided the loss by the number of accumulated batches.
        self._loss = self._loss + outputs["loss"] * trainer.accumulate_grad_batches
        self._batches += 1
        self._batches_here += 1
        now = time.monotonic()
        every = PLAIN_S if self._live is None else LIVE_S
        if trainer.is_global_zero and (now - self._shown >= every or (self._live and self._batches_here == 1)):
            self._shown = now
            self._show(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.strategy.reduce(torch.as_tensor(self._loss, device=pl_module.device) / self._batches)
        if not trainer.is_global_zero:
            return
        scores = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        epoch, last = trainer.current_epoch + 1, epochs(trainer)
        parts = [
            f"epoch {epoch}/{last}",
            f"train loss {float(loss):.4f}",
            *(f"{name} {float(value):.4f}" for name, value in sorted(scores.items())),
            *self.meter.describe(self.meter.now() - self._epoch_began),
            f"{clock(time.monotonic() - self._started)} elapsed",
            f"{clock(self._left((last - epoch) * batches_per_epoch(trainer)))} left",
        ]
        say(trainer, "  ".join(parts), self._live)
        self._shown = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _show(self, trainer: Trainer, batch_idx: int) -> None:
        batches, last = batches_per_epoch(trainer), epochs(trainer)
        left = (last - trainer.current_epoch) * batches - batch_idx - 1
        parts = [
            f"epoch {trainer.current_epoch + 1}/{last}",
            f"batch {batch_idx + 1}/{batches}",
            f"train loss {float(self._loss) / self._batches:.4f}",
            *self.meter.describe(self.meter.now() - self._epoch_began),
            f"{clock(self._left(left))} left",
        ]
        line = "  ".join(parts)
        if self._live is None:
            say(trainer, line)
        else:
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def _left(self, batches: int) -> float:
        """Seconds for so many batches, validation included, at the speed of this run so far."""
        return (time.monotonic() - self._started) / max(self._batches_here, 1) * batches

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def say(trainer: Trainer, line: str, live: Live | None = None) -> None:
    """Print a line on stderr, above whatever bar or status stands there."""
    if live is None:
        live = next((c._live for c in trainer.callbacks if isinstance(c, EpochLines)), None)  # type: ignore[attr-defined]
    bar = getattr(trainer.progress_bar_callback, "progress", None)
    console = live.console if live is not None else getattr(bar, "console", None)
    if console is None:
        print(line, file=sys.stderr, flush=True)
    else:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
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
