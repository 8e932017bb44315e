"""A step that is not finite is skipped by the optimizer itself, and found out one step later, before any save."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run

from regard.train import module as module_of_all
from regard.train.finite import NonFiniteError, can_skip
from regard.train.loop import fit


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU as on a GPU: a fused AdamW that can skip."""
    monkeypatch.setattr(module_of_all.RegardModule, "may_fuse", lambda module: True)
    monkeypatch.setattr(module_of_all, "can_skip", lambda optimizer, norm: True)


def run(out: Path, poison: int | None = None, **options: Any) -> toy_run.Module:
    module = toy_run.Module()
    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    fit(module, toy_run.Data(4, poison), out=out, epochs=2, seed=toy_run.SEED, trainer=quiet, **options)
    return module


def test_a_run_whose_norms_are_read_late_ends_with_the_same_weights(tmp_path: Path, late: None) -> None:
    module = run(tmp_path / "late")
    plain = toy_run.run(str(tmp_path / "plain"), epochs=2)
    flat = torch.cat([value.flatten() for value in module.net.state_dict().values()])
    torch.testing.assert_close(flat, torch.tensor(plain["flat"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("save_every", [None, 1])
def test_no_weight_moves_after_a_bad_step_and_none_is_saved(tmp_path: Path, late: None, save_every: int | None) -> None:
    clean = run(tmp_path / "clean")
    victim = clean.seen[13][2]  # a sample of the fourth batch of the second epoch; it is in the first one too
    first = next(number for number, batch in enumerate(clean.seen) if victim in batch)
    module = toy_run.Module()
    before: list[str] = []

    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    kept = module.optimizer_step

    def watched(*given: Any, **named: Any) -> None:
        before.append(toy_run.digest(module.net.state_dict()))
        kept(*given, **named)

    module.optimizer_step = watched  # type: ignore[method-assign]
    data = toy_run.Data(4, victim)
    with pytest.raises(NonFiniteError, match=f"not a finite number at step {first}: the loss is nan") as found:
        fit(module, data, out=tmp_path / "run", epochs=2, seed=toy_run.SEED, trainer=quiet, save_every_steps=save_every)
    assert found.value.late
    assert f"sample-{victim}" in str(found.value)
    assert toy_run.digest(module.net.state_dict()) == before[first], "the bad step or one after it was taken"
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert last.exists() == (save_every is not None and first > 0)
    if last.exists():
        assert torch.load(last, weights_only=True)["regard"]["step"] == first


def test_only_a_gpu_with_a_fused_optimizer_and_whole_weights_reads_late() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not can_skip(torch.optim.AdamW([weight], fused=True), torch.tensor(1.0))


def test_a_value_of_a_step_that_is_not_logged_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    plain = module_of_all.LightningModule.log

    def counted(self: Any, name: str, *given: Any, **named: Any) -> None:
        logged.append(name)
        plain(self, name, *given, **named)

    monkeypatch.setattr(module_of_all.LightningModule, "log", counted)
    report = toy_run.run(str(tmp_path), epochs=1, trainer={"log_every_n_steps": 5})
    assert "error" not in report
    assert logged.count("train/loss") == 2
    assert logged.count("val/accuracy") == 1


def test_a_value_of_an_epoch_is_kept_whatever_the_step(tmp_path: Path) -> None:
    class Told(toy_run.Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("train/mean", float(batch_idx), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("train/end", 5.0)

    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 7}
    fit(Told(), toy_run.Data(4), out=tmp_path, epochs=1, seed=1, trainer=quiet)
    header, *lines = [line.split(",") for line in (tmp_path / "logs" / "metrics.csv").read_text().splitlines()]
    for name, value in {"train/mean": "4.5", "train/end": "5.0"}.items():
        assert [line[header.index(name)] for line in lines if line[header.index(name)]] == [value]
