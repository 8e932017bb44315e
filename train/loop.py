"""`fit`: one function that trains any RegardModule on any data module, and can be killed at any time.

It builds the Lightning Trainer out of our parts and leaves nothing global behind. The data module owes it
`train_batches`, a `TrainBatches` made in `setup("fit")` with the trainer's rank and world size, and must
use it as the `batch_sampler` of its training loader.
"""

import difflib
import errno
import inspect
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from regard.train.cards import StartCard
from regard.train.checkpoints import KEY, Accepted, AtomicFiles, Checkpoints, compare_data, identity_of, load
from regard.train.failures import explained
from regard.train.folder import claim
from regard.train.interrupt import Interrupted, Interrupts
from regard.train.limits import DEV_LIMITS, Limit, LogSpacing, TrialFolder
from regard.train.logs import Events, MetricsTable
from regard.train.memory import MemoryEstimate, needed
from regard.train.meter import Meter
from regard.train.module import RegardModule
from regard.train.precision import precision_of
from regard.train.profiling import Profile
from regard.train.progress import progress_callbacks, quiet_lightning
from regard.train.randomness import StepRandomness
from regard.train.steps import batches_per_epoch, train_batches
from regard.train.strategies import ShardedStrategy, strategy_of, unshard
from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path

_OURS = {
    "max_epochs": "set the number of epochs with --epochs",
    "default_root_dir": "set the folder with --out",
    "logger": "logs are written to the logs folder of --out",
    "enable_checkpointing": "checkpoints are always written",
    "num_sanity_val_steps": "a check before training would change the state that a resume relies on",
    "use_distributed_sampler": "the samplers know their ranks already",
    "gradient_clip_val": "set clip_norm of the module",
    "gradient_clip_algorithm": "gradients are clipped by their norm",
    "max_steps": "a run is measured in epochs",
    "min_steps": "a run is measured in epochs",
    "max_time": "send SIGTERM when the time is over; the run saves and stops",
    "val_check_interval": "validation runs after whole epochs; see check_val_every_n_epoch",
    "overfit_batches": "it replaces the samplers; use --limit",
    "fast_dev_run": "Lightning's writes no checkpoint; use --fast_dev_run",
    "reload_dataloaders_every_n_epochs": "the resumed position would be lost",
    "barebones": "it writes no checkpoint",
    "enable_model_summary": "the card before the run tells the model",
}
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@dataclass(frozen=True)
class FitResult:
    """What a run left behind: files, the best value of the monitored score, and how far it went."""

    best: Path | None
    last: Path
    best_score: float | None
    epochs_done: int
    steps: int
    seconds: float

    folder: TrialFolder | None = field(default=None, repr=False, compare=False)
    """Of a trial run: the temporary folder that holds these files, and goes with this object."""

    @property
    def out(self) -> Path:
        """The folder of the run, of a trial its temporary one."""
        return self.last.parent.parent


def fit(
    module: RegardModule,
    data: LightningDataModule,
    *,
    out: str | Path,
    epochs: int,
    seed: int,
    monitor: str = "val/accuracy",
    mode: Literal["max", "min"] = "max",
    resume: bool = False,
    save_every_steps: int | None = None,
    trainer: dict[str, Any] | None = None,
    claimed: Callable[[], object] | None = None,
    compile: bool = False,
    limit: int | None = None,
    fast_dev_run: bool = False,
    profile: bool = False,
) -> FitResult:
    """Train to `epochs` epochs in the folder `out`, which gets the folders `checkpoints` and `logs`.

    `logs` holds `metrics.csv` and TensorBoard's events. `checkpoints/last.ckpt` is written after each
    epoch's validation and after every `save_every_steps` optimizer steps, `best.ckpt` when `monitor`
    improves. `resume=True` goes on from `last.ckpt`; on a CPU with the same settings the end is bit-equal
    to an uninterrupted run. `trainer` holds arguments of Lightning's Trainer by name. `claimed` is called on
    the first rank once `out` is known to be free and writable, before anything is trained.

    `compile` compiles each transformer block of `module.networks()`. `limit` lets an epoch use that many training
    images, others in every epoch, and validation as many. `fast_dev_run` trains one epoch of a few batches in a
    temporary folder, which lives as long as the result, to prove the configuration. `profile` prints at the end where
    the time of a step goes, and writes a trace into `logs`.

    Raises InputError for what the user can mend, NonFiniteError when the loss or gradient is NaN, and
    Interrupted after Ctrl-C or SIGTERM, with `last.ckpt` saved.
    """
    began = time.monotonic()
    trial = None
    if fast_dev_run:
        if resume:
            raise InputError("fast_dev_run leaves nothing that could be resumed; leave out one of the two")
        trial, epochs, trainer = TrialFolder(), 1, {**(trainer or {}), **DEV_LIMITS}
    out = typed_path(out) if trial is None else trial.path
    last = out / "checkpoints" / "last.ckpt"
    for name, value in {"epochs": epochs, "save_every_steps": save_every_steps, "limit": limit}.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    _check_arguments(trainer or {})
    position = _resumed_position(last) if resume else None
    if position is not None and position["epoch"] >= epochs:
        return _finished(module, data, last, position, epochs, began)

    random_state = torch.get_rng_state()
    try:
        with ExitStack() as held, quiet_lightning(), Interrupts() as interrupts:
            meter, card = Meter(), StartCard()
            # A resumed run claims nothing before its checkpoint is found to fit.
            extra: list[Callback] = [Accepted(claimed), card] if claimed is not None and resume else [card]
            extra += [Limit(limit)] if limit is not None else []
            extra += [Profile(out / "logs" if trial is None else None)] if profile else []
            built, checkpoints = _build(
                out, trainer or {}, interrupts, position, epochs, seed, monitor, mode, save_every_steps, meter, extra
            )
            if built.is_global_zero:
                held.enter_context(claim(out, resume))
                if claimed is not None and not resume:
                    claimed()
                card.memory = _memory(module, data, str(built.precision))
            module.train()
            module.compiled = compile
            _run(built, module, data, last if resume else None, last)
            if isinstance(built.strategy, ShardedStrategy):
                unshard(module)
    except OSError as error:
        if error.errno not in _FULL_DISK:
            raise
        before = "the last checkpoint is whole; make room, then pass --resume" if last.exists() else "make room"
        raise InputError(f"cannot write below {out}: {error.strerror}; {before}") from error
    finally:
        torch.set_rng_state(random_state)
    return FitResult(
        best=checkpoints.best if checkpoints.best_score is not None else None,
        last=checkpoints.last,
        best_score=checkpoints.best_score,
        epochs_done=checkpoints.epochs_done,
        steps=built.global_step,
        seconds=time.monotonic() - began,
        folder=trial,
    )


def _memory(module: RegardModule, data: LightningDataModule, precision: str) -> MemoryEstimate | None:
    """What a step will take, for the card, where the module has one and the data a batch to try."""
    example = getattr(data, "example", None)
    if example is None or not module.card() or not hasattr(module, "losses"):
        return None
    return needed(module.train(), example(), precision)


def _build(
    out: Path,
    arguments: dict[str, Any],
    interrupts: Interrupts,
    position: dict[str, Any] | None,
    epochs: int,
    seed: int,
    monitor: str,
    mode: str,
    save_every_steps: int | None,
    meter: Meter,
    extra: list[Callback],
) -> tuple[Trainer, Checkpoints]:
    step = None if position is None else position["step"]
    checkpoints = Checkpoints(
        out / "checkpoints",
        monitor=monitor,
        mode=mode,
        save_every_steps=save_every_steps,
        settings=lambda trainer: _settings(trainer, seed),
        interrupts=interrupts,
    )
    arguments = {"enable_model_summary": False, **arguments, "precision": precision_of(arguments)}
    if "strategy" in arguments:
        arguments["strategy"] = strategy_of(arguments["strategy"], arguments["precision"])
    plugins = arguments.pop("plugins", None)
    progress = progress_callbacks(meter) if arguments.pop("enable_progress_bar", True) else []
    spacing = LogSpacing(arguments.get("log_every_n_steps"))
    asked = _as_list(arguments.pop("callbacks", None))
    callbacks = [meter, *extra, *progress, *asked, StepRandomness(seed), spacing, checkpoints]
    loggers = [
        MetricsTable(out / "logs" / "metrics.csv", step),
        Events(out, step),
    ]
    try:
        trainer = Trainer(
            **arguments,
            callbacks=callbacks,
            plugins=[*_as_list(plugins), AtomicFiles()],
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            max_epochs=epochs,
            default_root_dir=out,
            logger=loggers,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"Lightning refuses these trainer settings: {reason(error)}") from error
    return trainer, checkpoints


def _run(trainer: Trainer, module: RegardModule, data: LightningDataModule, start: Path | None, last: Path) -> None:
    # Signals are agreed on by Interrupts; Lightning's own agreement would wait for the device on every batch.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    except BaseException as error:
        # Ranks that the launcher started would wait in a collective for the one that failed.
        graceful = isinstance(error, Interrupted) and not error.at_once
        launcher = trainer.strategy.launcher
        kill = getattr(launcher, "kill", None)
        said = explained(error, getattr(launcher, "procs", []), last)
        if kill is not None and not graceful:
            kill(signal.SIGKILL)
        if said is not None:
            raise said from error
        raise


def _check_arguments(arguments: dict[str, Any]) -> None:
    known = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    for name in arguments:
        if name in _OURS:
            raise InputError(f"trainer.{name} cannot be set: {_OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known - set(_OURS), n=1)
            hint = f"; did you mean trainer.{near[0]}?" if near else ""
            raise InputError(f"Lightning's Trainer has no argument {name!r}{hint}")
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        value = arguments.get(name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise InputError(f"trainer.{name} is {value!r}; it must be a whole number of at least 1")
    if odd := [c for c in _as_list(arguments.get("callbacks")) if not isinstance(c, Callback)]:
        raise InputError(f"trainer.callbacks holds {odd[0]!r}, which is no Callback; only Python can pass one")


def _settings(trainer: Trainer, seed: int) -> dict[str, Any]:
    data = train_batches(trainer)
    return {
        "seed": seed,
        **identity_of(trainer.datamodule),  # type: ignore[attr-defined]
        "training samples": data.size,
        "batch size": data.batch_size,
        "devices": trainer.world_size,
        "batches per epoch": batches_per_epoch(trainer),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def _resumed_position(last: Path) -> dict[str, Any]:
    if not last.exists():
        raise InputError(f"nothing to resume: there is no {last}; leave --resume out to start a run, or check --out")
    checkpoint = load(last)
    if KEY not in checkpoint:
        raise InputError(f"{last} was not written by regard train; it cannot be resumed")
    return checkpoint[KEY]


def _finished(
    module: RegardModule, data: LightningDataModule, last: Path, position: dict[str, Any], epochs: int, began: float
) -> FitResult:
    compare_data(position["settings"], data, last)
    module.on_load_checkpoint(checkpoint := load(last))
    module.load_state_dict(checkpoint["state_dict"])
    done = f"{position['epoch']} of {epochs} epochs are done"
    print(f"{last.parent.parent} is finished: {done}; nothing to train", file=sys.stderr, flush=True)
    best, score = last.with_name("best.ckpt"), position["best_score"]
    return FitResult(
        best=best if score is not None and best.exists() else None,
        last=last,
        best_score=score,
        epochs_done=position["epoch"],
        steps=position["step"],
        seconds=time.monotonic() - began,
    )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
