"""A tiny training run for the tests, also as its own process: `python toy_run.py '{"out": ...}'` in JSON.

An MLP with dropout learns 40 points; 13 more are for validation, a number that 2 does not divide.
The result goes to `report` as JSON. `kill` names a moment at which the process sends itself `signum`,
e.g. ["batch", epoch, batch]; `kill_rank` names the one rank that does so. `fatal` is an (epoch, sample) at which a data
worker kills itself.
"""

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchmetrics import SumMetric

from regard.train import module as train_module
from regard.train.interrupt import Interrupted
from regard.train.loop import fit
from regard.train.sampling import Draw, EvalBatches, TrainBatches, sample_seed
from regard.vit.errors import InputError

SAMPLES, HELD_OUT, FEATURES = 40, 13, 6
SEED = 7


class Points(Dataset):
    def __init__(self, size: int, first: int, poison: int | None = None, fatal: list[int] | None = None) -> None:
        self.fatal = fatal
        generator = torch.Generator().manual_seed(first)
        self.x = torch.randn(size, FEATURES, generator=generator)
        self.y = (self.x.sum(1) + 2.0 * torch.randn(size, generator=generator) > 0).long()
        self.noisy = first == 0
        if poison is not None:
            self.x[poison] = float("inf")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        if self.fatal == [draw.epoch, draw.index] and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        x = self.x[draw.index]
        if self.noisy:
            generator = torch.Generator().manual_seed(sample_seed(SEED, draw.epoch, draw.index))
            x = x + 0.05 * torch.randn(FEATURES, generator=generator)
        return x, self.y[draw.index], draw.index, draw.valid


class Data(LightningDataModule):
    def __init__(
        self, batch_size: int, poison: int | None = None, workers: int = 0, fatal: list[int] | None = None
    ) -> None:
        super().__init__()
        self.fatal = fatal
        self.batch_size, self.poison, self.workers = batch_size, poison, workers

    def setup(self, stage: str) -> None:
        ranks = {"rank": self.trainer.global_rank, "world": self.trainer.world_size}
        self.train_batches = TrainBatches(SAMPLES, self.batch_size, seed=SEED, **ranks)
        self.val_batches = EvalBatches(HELD_OUT, self.batch_size, **ranks)

    def train_dataloader(self) -> DataLoader:
        points = Points(SAMPLES, 0, self.poison, self.fatal)
        return DataLoader(
            points,
            batch_sampler=self.train_batches,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            multiprocessing_context="fork" if self.workers else None,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(HELD_OUT, 1), batch_sampler=self.val_batches)


class Module(train_module.RegardModule):
    def __init__(self, dropout: float = 0.2, **optimization: Any) -> None:
        super().__init__(**{"lr": 0.01, "warmup_steps": 3, **optimization})
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 2))
        self.correct, self.count = SumMetric(), SumMetric()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index, _ = batch
        self.seen.append(index.tolist())
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return self.check_finite(loss, [f"sample-{i}" for i in index.tolist()])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _, valid = batch
        self.correct.update(((self.net(x).argmax(-1) == y) & valid).sum())
        self.count.update(valid.sum())

    def on_validation_epoch_end(self) -> None:
        self.log("val/accuracy", self.correct.compute() / self.count.compute())
        self.log("val/count", self.count.compute())
        self.correct.reset()
        self.count.reset()


class Moment(Callback):
    """Sends this process a signal at a named moment of the training."""

    def __init__(self, moment: list[Any], signum: int, rank: int | None = None) -> None:
        self.moment, self.signum, self.rank = moment, signum, rank

    def _reached(self, *moment: Any) -> None:
        here = self.rank is None or int(os.environ.get("LOCAL_RANK", 0)) == self.rank
        if here and list(moment) == self.moment:
            os.kill(os.getpid(), self.signum)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._reached("batch", trainer.current_epoch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._reached("batch end", trainer.current_epoch, batch_idx)

    def on_validation_batch_end(self, trainer: Any, *rest: Any) -> None:
        self._reached("validation", trainer.current_epoch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._reached("validated", trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._reached("epoch", trainer.current_epoch)


def digest(state: dict[str, torch.Tensor]) -> str:
    """A fingerprint of the exact bits."""
    bits = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(state.items()))
    return hashlib.sha256(bits).hexdigest()


def run(
    out: str,
    *,
    report: str | None = None,
    epochs: int = 3,
    batch_size: int = 4,
    kill: list[Any] | None = None,
    signum: int = signal.SIGKILL,
    kill_rank: int | None = None,
    fatal: list[int] | None = None,
    accumulate: int = 1,
    poison: int | None = None,
    workers: int = 0,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return what can be compared: weights, score, steps, batches seen; or the error."""
    os.environ.update(environment or {})
    if report is not None:
        torch.set_num_threads(1)
    net = Module(**(module or {}))
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": accumulate,
        "enable_progress_bar": False,
        "callbacks": [Moment(kill, signum, kill_rank)] if kill else [],
        **(trainer or {}),
    }
    result: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            data = Data(batch_size, poison, workers, fatal)
            done = fit(net, data, out=out, epochs=epochs, seed=SEED, trainer=arguments, **options)
            result.update(score=done.best_score, epochs=done.epochs_done, steps=done.steps)
        except InputError as error:
            result["error"] = f"{type(error).__name__}: {error}"
        except Interrupted as error:
            result.update(error=f"{error}", exit_code=error.exit_code)
    result["stderr"] = said.getvalue()
    # A sharded run that failed leaves pieces, and nobody to gather them with.
    weights = {
        name: value.to_local() if hasattr(value, "to_local") else value for name, value in net.net.state_dict().items()
    }
    flat = torch.cat([value.flatten() for value in weights.values()]).tolist()
    result.update(weights=digest(weights), flat=flat, seen=net.seen)
    if report is not None:
        Path(report).write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    answer = run(**json.loads(sys.argv[1]))
    sys.exit(answer.get("exit_code", 2 if "error" in answer else 0))
