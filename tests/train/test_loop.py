"""What `fit` promises beside an exact resume: the best checkpoint, clear refusals, no NaN step, a quiet screen."""

import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import rich
import torch
import toy_run
from torch import nn

from regard.train.finite import NonFiniteError
from regard.train.loop import fit
from regard.train.module import RegardModule


def rows(out: Path, column: str) -> list[float]:
    header, *lines = [line.split(",") for line in (out / "logs" / "metrics.csv").read_text().splitlines()]
    return [float(line[header.index(column)]) for line in lines if line[header.index(column)]]


class Scripted(toy_run.Module):
    """Reports scores given in advance."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores
        self.weights: list[str] = []

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.weights.append(toy_run.digest(self.net.state_dict()))
        self.log("val/score", self.scores[self.current_epoch])


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", [0.1, 0.7, 0.3, 0.7], 3),
        ("min", [0.9, 0.4, 0.4, 0.6], 2),
        ("max", [math.nan, -3.0, math.nan, -4.0], 1),
    ],
)
def test_best_is_the_latest_epoch_of_the_best_score_and_last_is_the_last(
    tmp_path: Path, mode: str, scores: list[float], best: int
) -> None:
    module = Scripted(scores)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    result = fit(
        module,
        toy_run.Data(8),
        out=tmp_path,
        epochs=4,
        seed=1,
        monitor="val/score",
        mode=mode,
        trainer=quiet,
        save_every_steps=2,
    )
    assert result.best is not None
    assert result.best_score == pytest.approx(scores[best])
    for path, epoch in ((result.best, best), (result.last, 3)):
        saved = torch.load(path, weights_only=True)
        net = {name.removeprefix("net."): value for name, value in saved["state_dict"].items() if "net" in name}
        assert toy_run.digest(net) == module.weights[epoch]
        assert saved["regard"]["epoch"] == epoch + 1
    assert (result.epochs_done, result.steps) == (4, 20)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


def test_a_monitor_that_is_never_logged_is_an_error_that_lists_what_is(tmp_path: Path) -> None:
    report = toy_run.run(str(tmp_path), epochs=1, monitor="val/acuracy")
    assert "no 'val/acuracy'" in report["error"]
    assert "val/accuracy" in report["error"]


def test_without_validation_there_is_a_last_checkpoint_and_no_best(tmp_path: Path) -> None:
    report = toy_run.run(str(tmp_path), epochs=1, trainer={"limit_val_batches": 0})
    assert report["score"] is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("acumulate_grad_batches", "did you mean trainer.accumulate_grad_batches"),
        ("max_epochs", "set the number of epochs with --epochs"),
        ("gradient_clip_val", "set clip_norm"),
        ("zzz", "has no argument 'zzz'"),
    ],
)
def test_trainer_arguments_are_checked_by_name(tmp_path: Path, argument: str, message: str) -> None:
    report = toy_run.run(str(tmp_path), trainer={argument: 1})
    assert message in report["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"precision": "bf8"}, "bf8"), ({"accelerator": "abacus"}, "abacus"), ({"devices": -3}, "devices")],
)
def test_trainer_settings_that_lightning_refuses_are_one_line(
    tmp_path: Path, setting: dict[str, Any], named: str
) -> None:
    error = toy_run.run(str(tmp_path), trainer=setting)["error"]
    assert error.startswith("InputError: Lightning refuses these trainer settings")
    assert named in error
    assert "\n" not in error


@pytest.mark.parametrize("setting", [{"epochs": 0}, {"save_every_steps": 0}])
def test_a_run_of_nothing_is_refused(tmp_path: Path, setting: dict[str, int]) -> None:
    assert "must be at least 1" in toy_run.run(str(tmp_path), **setting)["error"]


def test_an_impossible_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    report = toy_run.run(str(tmp_path / "file" / "run"))
    assert report["error"].startswith(f"InputError: cannot write in {tmp_path}/file/run")
    assert report["seen"] == []


def test_too_few_samples_for_a_batch_are_refused(tmp_path: Path) -> None:
    report = toy_run.run(str(tmp_path), batch_size=41)
    assert "40 training samples are too few for a batch of 41" in report["error"]


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_bad_sample_stops_the_run_before_it_can_spoil_a_weight(tmp_path: Path, save_every: int | None) -> None:
    clean = toy_run.run(str(tmp_path / "clean"), epochs=1)
    victim = clean["seen"][4][1]
    report = toy_run.run(str(tmp_path / "run"), epochs=1, poison=victim, save_every_steps=save_every)
    assert report["error"].startswith("NonFiniteError: not a finite number at step 4: the loss is nan")
    assert all(f"sample-{index}" in report["error"] for index in clean["seen"][4])
    assert f"sample-{clean['seen'][3][0]}" not in report["error"]
    # The last good weights are saved, and going on from them meets the same sample again.
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert (saved["regard"]["batch"], saved["global_step"]) == (4, 4)
    net = {name.removeprefix("net."): value for name, value in saved["state_dict"].items() if "net" in name}
    assert toy_run.digest(net) == report["weights"]
    again = toy_run.run(str(tmp_path / "run"), epochs=1, poison=victim, resume=True)
    assert again["error"] == report["error"]


class Steep(RegardModule):
    """A finite loss whose gradient is not."""

    def __init__(self, clip_norm: float | None) -> None:
        super().__init__(lr=0.1, clip_norm=clip_norm)
        self.net = nn.Linear(toy_run.FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]).sum() * 0.0).sqrt()
        return self.check_finite(loss, batch[2].tolist())


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path, clip_norm: float | None) -> None:
    module = Steep(clip_norm)
    before = toy_run.digest(module.net.state_dict())
    with pytest.raises(NonFiniteError, match="loss is finite, the norm of its gradient is nan"):
        fit(module, toy_run.Data(4), out=tmp_path, epochs=1, seed=0, trainer={"accelerator": "cpu"})
    assert toy_run.digest(module.net.state_dict()) == before


def test_the_finite_check_changes_no_bit_of_loss_or_gradient() -> None:
    module = RegardModule(lr=0.1)
    weight = torch.randn(50, requires_grad=True)
    for value in (1.0, 1e-30, 1e36, -2.5):
        loss = (weight * value).sum()
        plain = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        checked = module.check_finite(loss, [])
        assert torch.equal(checked, loss)
        assert torch.equal(torch.autograd.grad(checked, weight)[0], plain)


def test_gradients_are_clipped_to_their_norm(tmp_path: Path) -> None:
    norms: list[float] = []

    class Watch(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                norms.append(float(torch.nn.utils.get_total_norm(grads)))

    toy_run.run(str(tmp_path), epochs=1, module={"clip_norm": 0.25}, trainer={"callbacks": [Watch()]})
    assert norms
    assert max(norms) <= 0.25 * (1 + 1e-5)
    # The logged norm is the one before clipping.
    assert max(rows(tmp_path, "train/grad_norm")) > 0.25


def test_without_a_terminal_there_is_one_line_an_epoch_and_no_noise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = toy_run.Module()
    quiet = {"accelerator": "cpu", "devices": 1}
    fit(module, toy_run.Data(4), out=tmp_path, epochs=2, seed=1, trainer=quiet)
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("epoch 2/2  train loss 0.")
    assert all(part in lines[1] for part in ("val/accuracy", "images/s", "elapsed", "0:00 left"))
    logged = rows(tmp_path, "train/loss")[10:]
    assert f"train loss {sum(logged) / len(logged):.4f}" in lines[1]


def test_on_a_terminal_the_lines_stay_above_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    report = {"accelerator": "cpu", "devices": 1}
    fit(toy_run.Module(), toy_run.Data(4), out=tmp_path, epochs=2, seed=1, trainer=report)
    said = capsys.readouterr().err
    assert "epoch 1/2  train loss" in said
    assert "epoch 1/2  batch 1/10  train loss" in said


def test_nothing_global_is_left_changed(tmp_path: Path) -> None:
    def state() -> list[Any]:
        names = ("lightning", "lightning.pytorch", "lightning.fabric")
        levels = [logging.getLogger(name).level for name in names]
        return [levels, list(warnings.filters), dict(rich.get_console().__dict__), torch.get_rng_state().tolist()]

    before = state()
    quiet = {"accelerator": "cpu"}
    fit(toy_run.Module(), toy_run.Data(4), out=tmp_path, epochs=1, seed=1, trainer=quiet)
    assert state() == before


def test_a_short_run_is_logged_at_every_step(tmp_path: Path) -> None:
    toy_run.run(str(tmp_path), epochs=1)
    assert len(rows(tmp_path, "train/loss")) == 10


def test_a_result_says_how_far_the_run_went(tmp_path: Path) -> None:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    result = fit(toy_run.Module(), toy_run.Data(8), out=tmp_path, epochs=1, seed=1, trainer=quiet)
    assert (result.epochs_done, result.steps) == (1, 5)
    assert result.best == tmp_path / "checkpoints" / "best.ckpt"
    assert result.last.is_file()
    assert result.seconds > 0
