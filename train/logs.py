"""`metrics.csv`: one row per logged step, whole after every crash and continued by a resumed run.

Lightning's CSVLogger deletes the rows of the run that it continues, and rewrites the file in place.
"""

import csv
import io
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from regard.vit.errors import InputError
from regard.vit.files import write_atomically

_SAVE_EVERY_S = 10.0


class MetricsTable(Logger):
    """Collects rows and writes them with each checkpoint, every ten seconds, and at the end.

    With `resume_step` the rows of `path` before this optimizer step are kept; later steps will be made again.
    Lightning logs a step after the checkpoint taken at it, so a kill may cost the row of that one step.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path = path
        self._written = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        if resume_step is not None and path.exists():
            try:
                with path.open(newline="", encoding="utf-8") as file:
                    self._rows = [row for row in csv.DictReader(file) if int(row["step"]) < resume_step]
            except (ValueError, KeyError, TypeError, csv.Error) as error:
                raise InputError(f"{path}: not the table this run wrote; move it away, then resume") from error

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._rows.append({"step": step, **{key: float(value) for key, value in metrics.items()}})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: a table holds no settings."""

    @rank_zero_only
    def save(self) -> None:
        """Write if the file is old; Lightning calls this after every logged step."""
        if time.monotonic() - self._written > _SAVE_EVERY_S:
            self.write()

    @rank_zero_only
    def write(self) -> None:
        """Replace the file with all rows."""
        self._written = time.monotonic()
        if not self._rows:
            return
        names = sorted({name for row in self._rows for name in row} - {"step", "epoch"})
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=["step", "epoch", *names], restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.write()


class Events(TensorBoardLogger):
    """TensorBoard's events in `logs`, which reach the disk every ten seconds and at the end.

    Lightning flushes them, and waits for the disk, after every logged step.
    """

    def __init__(self, out: Path, resume_step: int | None = None) -> None:
        super().__init__(out, name="logs", version="", default_hp_metric=False, purge_step=resume_step or 0)
        self._written = time.monotonic()

    @rank_zero_only
    def save(self) -> None:
        """Flush if the last time is long ago."""
        if time.monotonic() - self._written > _SAVE_EVERY_S:
            self._written = time.monotonic()
            super().save()
