"""The meter counts images and waiting, leaves validation out, and never asks the device for a number."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run

from regard.train import meter as meters
from regard.train import progress
from regard.train.loop import fit
from regard.train.meter import Meter, Reading, peak_flops
from regard.train.steps import train_batches


class Slow(toy_run.Module):
    """Steps, validations and batches of known lengths."""

    def __init__(self, step: float, validation: float) -> None:
        super().__init__()
        self.step_s, self.validation_s = step, validation

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.validation_s)
        super().validation_step(batch, batch_idx)

    def picture_flops(self) -> float:
        return 1e9


class SlowData(toy_run.Data):
    def __init__(self, fetch: float) -> None:
        super().__init__(8)
        self.fetch_s = fetch

    def train_dataloader(self) -> Any:
        loader, fetch = super().train_dataloader(), self.fetch_s

        def collate(samples: Any) -> Any:
            time.sleep(fetch)
            return torch.utils.data.default_collate(samples)

        loader.collate_fn = collate
        return loader


class Watch(meters.Callback):
    """Keeps the run's meter."""

    meter: Meter

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.meter = next(c for c in trainer.callbacks if isinstance(c, Meter))
        self.images = 2 * len(train_batches(trainer)) * 8


def measured(out: Path, step: float, fetch: float, validation: float = 0.0) -> Watch:
    watch = Watch()
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [watch]}
    fit(Slow(step, validation), SlowData(fetch), out=out, epochs=2, seed=1, trainer=quiet, save_every_steps=1)
    return watch


def test_waiting_for_data_is_told_from_working(tmp_path: Path) -> None:
    starved, fed = measured(tmp_path / "a", 0.01, 0.04), measured(tmp_path / "b", 0.04, 0.0)
    assert 0.6 < starved.meter.now().data_wait < 0.82
    assert fed.meter.now().data_wait < 0.1
    for watch in (starved, fed):
        assert watch.meter.now().images == watch.images


def test_validation_and_checkpoints_are_nobodys_training_time(tmp_path: Path) -> None:
    reading = measured(tmp_path, 0.02, 0.0, validation=0.2).meter.now()
    # 10 batches of 20 ms; the validations take 0.8 s, and a checkpoint follows each step.
    assert 0.2 < reading.seconds < 0.45
    assert reading.images_per_second == pytest.approx(80 / reading.seconds)


def test_readings_subtract() -> None:
    between = Reading(30, 3.0, 1.5) - Reading(10, 1.0, 0.5)
    assert (between.images_per_second, between.data_wait) == (10.0, 0.5)
    assert Reading().data_wait == 0.0


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", 989e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989e12),
        ("NVIDIA H100 NVL", "16-mixed", 835e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA H200", "32-true", None),
        ("An unknown card", "bf16-mixed", None),
    ],
)
def test_the_peak_is_known_by_the_devices_name_and_the_precision(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), precision) == peak
    assert peak_flops(torch.device("cpu"), precision) is None


def test_a_known_peak_gives_mfu_and_an_unknown_one_flops() -> None:
    meter, reading = Meter(), Reading(images=1000, seconds=2.0)
    assert meter.rate(reading) is None
    meter.flops = 27.6e9
    assert meter.rate(reading) == "13.8 TFLOP/s" or meter.rate(reading) == "14 TFLOP/s"
    meter.peak, meter.world = 989e12, 2
    assert meter.rate(reading) == f"MFU {27.6e9 * 500 / (2 * 989e12):.1%}"


def test_status_lines_come_at_intervals_and_name_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_S", 0.1)
    fit(Slow(0.03, 0.0), SlowData(0.01), out=tmp_path, epochs=1, seed=1, trainer={"accelerator": "cpu"})
    lines = capfd.readouterr().err.splitlines()
    status = [line for line in lines if "batch " in line]
    assert 1 <= len(status) <= 3
    for part in ("epoch 1/1", "/5  train loss 0.", "images/s", "GFLOP/s", "data wait ", "memory ", " left"):
        assert part in status[0]
    assert lines[-1].startswith("epoch 1/1  train loss")


def test_the_loss_is_not_read_between_status_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    plain = torch.Tensor.__float__

    def counted(tensor: torch.Tensor) -> float:
        reads.append(Path(sys._getframe(1).f_code.co_filename).stem)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "__float__", counted)
    counts = []
    for batch in (10, 4):  # 4 and 10 batches an epoch
        reads.clear()
        data = SlowData(0.0)
        data.batch_size = batch
        out = tmp_path / str(batch)
        fit(Slow(0.0, 0.0), data, out=out, epochs=2, seed=1, trainer={"accelerator": "cpu"})
        counts.append(reads.count("progress") + reads.count("meter"))
    # A checkpoint more or less, of a better epoch, reads the loss too; 12 batches more would be 12 reads.
    assert 0 < counts[1] < counts[0] + 6
