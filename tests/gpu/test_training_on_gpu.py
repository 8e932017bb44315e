"""The loop on a GPU: bf16, compiled, sharded, its norms read late; skipped where there is none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import toy_run
import vit_run

from regard.train.finite import NonFiniteError
from regard.train.loop import fit
from regard.train.meter import Meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def train(out: Path, data: Any = None, module: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    settings = {"accelerator": "gpu", "devices": 1, "enable_progress_bar": False, **options.pop("trainer", {})}
    module = module or vit_run.Module()
    fit(module, data or vit_run.Data(8), out=out, epochs=2, seed=toy_run.SEED, trainer=settings, **options)
    return vit_run.weights(out / "checkpoints" / "last.ckpt")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    apart = sum((one[name].cpu() - other[name].cpu()).square().sum() for name in one)
    return float(apart / sum(value.cpu().square().sum() for value in other.values())) ** 0.5


def test_compiled_sharded_and_plain_runs_end_close_together(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", trainer={"precision": "32-true"})
    for name, options in {
        "bf16": {},
        "compiled": {"compile": True},
        "sharded": {"trainer": {"strategy": "fsdp2"}},
    }.items():
        ended = train(tmp_path / name, **options)
        assert {value.dtype for value in ended.values()} == {torch.float32}
        assert distance(ended, plain) < 0.05, name


def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    class Strict(vit_run.Module):
        """From the fourth step on, any wait inside a step is an error."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("error" if batch_idx >= 3 else "default")

        def on_train_epoch_end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

        def on_train_batch_end(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    try:
        train(tmp_path, module=Strict(), trainer={"log_every_n_steps": 1000})
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_bad_step_is_skipped_on_the_device_and_named_a_step_later(tmp_path: Path) -> None:
    class Poisoned(vit_run.Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == 3:
                self.before = [p.detach().clone() for p in self.net.parameters()]
                batch[0].mul_(float("nan"))
            return super().training_step(batch, batch_idx)

    module = Poisoned()
    with pytest.raises(NonFiniteError, match="not a finite number at step 3") as found:
        train(tmp_path, module=module, save_every_steps=2)
    assert found.value.late
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(module.net.parameters(), module.before, strict=True))
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["regard"]["step"] == 2


def test_the_meter_reads_the_devices_own_clock(tmp_path: Path) -> None:
    meters: list[Meter] = []

    class Watched(vit_run.Module):
        def picture_flops(self) -> float:
            return 1e9

        def on_train_end(self) -> None:
            meters.extend(c for c in self.trainer.callbacks if isinstance(c, Meter))

    train(tmp_path, module=Watched())
    reading = meters[0].now()
    assert reading.images == 96
    assert 0 <= reading.data_wait <= 1
    assert "memory" in " ".join(meters[0].describe(reading))
