"""`--profile`: where the time of a step goes, by torch's profiler, as a table at the end and a trace to look into."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

_FIRST, _STEPS = 3, 5  # batches before (caches fill, blocks compile), and batches that are watched
_ROWS = 15


class Profile(Callback):
    """Watches a few batches of the first epoch on the first rank; `trace.json` goes into `folder`, where one is given.

    The trace opens in https://ui.perfetto.dev or `chrome://tracing`. A run too short to warm up is watched from its
    first batch.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._seen = 0
        self._profile: Any = None
        self._done = False
        self._table = ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Begun after the first batch has come: what is watched ends and begins where a batch arrives.
        first = min(_FIRST, max(0, trainer.num_training_batches - _STEPS))
        if self._profile is None and not self._done and self._seen >= first and trainer.is_global_zero:
            gpu = trainer.strategy.root_device.type == "cuda"
            self._profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu)
            self._profile.__enter__()
        elif self._profile is not None and self._seen >= first + _STEPS:
            self._finish(trainer)
        self._seen += 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._table:
            where = "" if self.folder is None else f"\ntrace: {self.folder / 'trace.json'}"
            print(f"{self._table}{where}", file=sys.stderr, flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    def _finish(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        gpu = trainer.strategy.root_device.type == "cuda"
        if gpu:
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.folder / "trace.json"))
        by = "self_device_time_total" if gpu else "self_cpu_time_total"
        self._table = self._profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=48)
        self._profile, self._done = None, True
