"""`best.ckpt` and `last.ckpt`: when they are written, how, and how a run goes on from one bit for bit.

Lightning's ModelCheckpoint cannot save every N steps and after each validation at once, saves by step
before the validation has run (Lightning #20919), forgets the best score when the folder moves, and after a
resume may save in the middle of a gradient accumulation. Its file writer holds a second copy of the
checkpoint in memory. The callback and the writer below do these few things only:

- A checkpoint is taken only where an optimizer step has just ended and, at the end of an epoch, only after
  its validation. A run killed in between repeats the steps since, with the same batches and the same
  dropout.
- The position (epoch, batch) travels in the checkpoint and is given to `TrainBatches` before Lightning asks
  the loader for its first batch, which it does before `on_train_start` (Lightning #18780, #20550).
- A file appears whole or not at all, and loading one executes nothing.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from regard.train.finite import NonFiniteError
from regard.train.interrupt import Interrupts
from regard.train.logs import MetricsTable
from regard.train.module import RegardModule
from regard.train.steps import train_batches
from regard.vit.errors import InputError, reason
from regard.vit.files import write_atomically

KEY = "regard"
"""Where in a checkpoint the position, the best score and the settings that fix the data order lie."""


class AtomicFiles(CheckpointIO):
    """Writes a checkpoint whole or not at all, and reads tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `path`; on a full or read-only disk raise InputError and leave the earlier file as it was."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: _save(checkpoint, file))
        except OSError as error:
            before = "the one before it is whole; make room, then pass --resume" if path.exists() else "make room"
            raise InputError(f"cannot write the checkpoint {path}: {error.strerror or error}; {before}") from error

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read `path`; InputError where it is missing, damaged, or would have to execute something."""
        return load(Path(path), map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def load(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A training checkpoint as a dict of tensors and plain values, or InputError naming the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a foreign pickle before it refuses it
            checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"there is no checkpoint {path}") from error
    except Exception as error:
        what = f"cannot be read: {reason(error)}"
        if type(error).__name__ == "UnpicklingError":  # of a module that this house does not import
            what = "is damaged, or holds more than tensors and plain values, which could run code: refused"
        raise InputError(f"the checkpoint {path} {what}; pass another checkpoint or start anew") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError(f"{path} is no training checkpoint: it holds no state_dict")
    return checkpoint


class _Watched:
    """A file for torch.save that remembers the first OSError: the zip writer hides it behind a later
    RuntimeError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    watched = _Watched(file)
    try:
        torch.save(checkpoint, watched)  # type: ignore[arg-type]
    except Exception as error:
        if watched.error is not None:
            raise watched.error from error
        raise


class Checkpoints(Checkpoint):
    """Keeps `best.ckpt` and `last.ckpt`, resumes the position in the data, and stops the run on a signal.

    `settings` is what the data order depends on; resuming with other ones is an InputError. A score that is
    not a number never becomes the best, and of equal ones the latest is kept, whose learning rate was lowest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        monitor: str,
        mode: str,
        save_every_steps: int | None,
        settings: Callable[[Trainer], dict[str, Any]],
        interrupts: Interrupts,
    ) -> None:
        self.best, self.last = folder / "best.ckpt", folder / "last.ckpt"
        self.monitor, self.mode, self.save_every_steps = monitor, mode, save_every_steps
        self.settings, self.interrupts = settings, interrupts
        self.best_score: float | None = None
        self.epochs_done = 0
        self._position = (0, 0)
        self._step = 0
        self._validated = False
        self._stop = 0
        self._good: dict[str, Any] | None = None
        self._rewind: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        train_batches(trainer).set_position(0)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint[KEY]
        _compare_settings(saved["settings"], self.settings(trainer), self.last)
        compare_data(saved["settings"], trainer.datamodule, self.last)  # type: ignore[attr-defined]
        self.best_score = saved["best_score"] if self.best.exists() else None  # a deleted best is no best
        self.epochs_done = saved["epoch"]
        self._position = (saved["epoch"], saved["batch"])
        train_batches(trainer).set_position(*self._position)
        self.interrupts.checkpoint = self.last

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._rewind is not None:
            checkpoint["loops"]["fit_loop"] = self._rewind
        epoch, batch = self._position
        checkpoint[KEY] = {
            "epoch": epoch,
            "batch": batch,
            "step": trainer.global_step,
            "best_score": self.best_score,
            "settings": self.settings(trainer),
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self.interrupts.install()
        self.interrupts.training, self.interrupts.rank = True, trainer.global_rank

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stop:
            raise self.interrupts.interruption(self._stop, at_once=False)
        self._validated = False
        self._good = None
        train_batches(trainer).set_position(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._step
        self._step = trainer.global_step
        # After the last batch the validation follows, and the save after it.
        if not stepped or trainer.is_last_batch:
            return
        self._position = (trainer.current_epoch, batch_idx + 1)
        self._good = trainer.fit_loop.state_dict()
        due = self.save_every_steps is not None and self._step % self.save_every_steps == 0
        stop = self.interrupts.agreed(trainer, now=due)
        if due or stop:
            self._write(trainer, self.last)
        if stop:
            raise self.interrupts.interruption(stop, at_once=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs_done = trainer.current_epoch + 1
        self._position = (self.epochs_done, 0)
        if self._validated and self._is_better(trainer):
            self._write(trainer, self.best)
        self._write(trainer, self.last)
        # Raised when the next epoch starts, after Lightning has logged this one.
        self._stop = self.interrupts.agreed(trainer, now=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The weights are those after the last whole step, so the loop's counters of that moment go with them.
        if isinstance(exception, NonFiniteError) and not exception.late and self._good is not None:
            self._rewind = self._good
            self._write(trainer, self.last)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.interrupts.training = False

    def _is_better(self, trainer: Trainer) -> bool:
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise InputError(
                f"the validation logged no {self.monitor!r} to choose the best checkpoint by; it logged: "
                f"{', '.join(sorted(metrics)) or 'nothing'}"
            )
        # A score may differ by rounding between ranks; saving is collective, so rank 0 decides for all.
        score = float(trainer.strategy.broadcast(float(metrics[self.monitor])))
        best = self.best_score
        better = score == score and (best is None or (score >= best if self.mode == "max" else score <= best))
        if better:
            self.best_score = score
        return better

    def _write(self, trainer: Trainer, path: Path) -> None:
        module = trainer.lightning_module
        if isinstance(module, RegardModule):
            module.settle()
        # What a checkpoint has behind it is in the table: a resumed run logs only what comes after.
        for logger in trainer.loggers:
            if isinstance(logger, MetricsTable):
                logger.write()
        trainer.save_checkpoint(path, weights_only=False)
        self.interrupts.checkpoint = self.last


_IDENTITY = "data"


def identity_of(data: Any) -> dict[str, str]:
    """What tells one set of training data from another, where the data module says so by `identity()`."""
    return {_IDENTITY: data.identity()} if hasattr(data, "identity") else {}


def compare_data(saved: dict[str, Any], data: Any, path: Path) -> None:
    """Raise InputError where `data` is not what the checkpoint at `path` was trained on."""
    now = identity_of(data).get(_IDENTITY)
    if now is not None and saved.get(_IDENTITY, now) != now:
        raise InputError(
            f"{path} was trained on other data: names, order, labels or classes are not what they were; "
            "resume with the same data, or start anew with another --out"
        )


class Accepted(Callback):
    """Calls `claimed` on the first rank once the checkpoint of a resumed run has been found to fit."""

    def __init__(self, claimed: Callable[[], object]) -> None:
        self.claimed = claimed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.claimed()


def _compare_settings(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    now = {name: value for name, value in now.items() if name != _IDENTITY}
    for name, value in now.items():
        if saved.get(name) != value:
            raise InputError(
                f"{path} was trained with {name} {saved.get(name)}, this run has {value}, and its batches would "
                "differ; resume with the same value, or start anew with another --out"
            )
