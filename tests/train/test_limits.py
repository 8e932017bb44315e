"""Short runs: a limit in images, a trial that leaves nothing, a profile."""

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import toy_run

from regard.train.loop import FitResult, fit
from regard.vit.errors import InputError


def run(out: Path, batch: int = 4, **options: Any) -> tuple[FitResult, toy_run.Module]:
    module = toy_run.Module()
    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    settings = {"epochs": 2, "seed": toy_run.SEED, "trainer": quiet, **options}
    return fit(module, toy_run.Data(batch), out=out, **settings), module


def test_a_limit_is_in_images_and_each_epoch_draws_others(tmp_path: Path) -> None:
    result, module = run(tmp_path, limit=13)
    assert result.steps == 6  # 13 images are 3 batches of 4, twice
    first, second = (list(itertools.chain(*batches)) for batches in (module.seen[:3], module.seen[3:]))
    assert len(set(first)) == len(set(second)) == 12
    assert set(first) != set(second)


def test_the_schedule_is_as_long_as_the_limited_run(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watched(toy_run.Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    fit(Watched(warmup_steps=1), toy_run.Data(4), out=tmp_path, epochs=2, seed=1, trainer=quiet, limit=16)
    assert len(rates) == 8
    assert rates[-1] < 0.1 * rates[0]


@pytest.mark.parametrize("limit", [3, 0])
def test_a_limit_below_one_batch_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(InputError, match="limit is"):
        run(tmp_path, limit=limit)


def test_a_limited_run_resumes_bit_equal(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole", limit=16, epochs=2)
    run(tmp_path / "cut", limit=16, epochs=1)
    _, resumed = run(tmp_path / "cut", limit=16, epochs=2, resume=True)
    assert len(resumed.seen) == 4
    # The schedule of one epoch is another one: the batches are the same, the weights are not.
    assert resumed.seen == whole.seen[4:]


def test_resuming_with_another_limit_is_refused(tmp_path: Path) -> None:
    run(tmp_path, limit=16, epochs=1)
    with pytest.raises(InputError, match="batches per epoch 4, this run has 5"):
        run(tmp_path, limit=20, resume=True)


def test_a_trial_trains_validates_saves_and_leaves_nothing(tmp_path: Path) -> None:
    result, module = run(tmp_path / "run", fast_dev_run=True, epochs=50)
    assert not (tmp_path / "run").exists()
    assert len(module.seen) == result.steps == 4
    assert result.epochs_done == 1
    assert result.best_score is not None
    assert result.last.exists()
    folder = result.last.parent.parent
    del result
    gc.collect()
    assert not folder.exists()


def test_a_trial_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fast_dev_run leaves nothing"):
        run(tmp_path, fast_dev_run=True, resume=True)


@pytest.mark.parametrize(("name", "flag"), [("fast_dev_run", "--fast_dev_run"), ("overfit_batches", "--limit")])
def test_lightnings_own_flags_point_to_ours(tmp_path: Path, name: str, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        run(tmp_path, trainer={name: 1})


def test_a_profile_says_where_the_time_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, _ = run(tmp_path / "plain")
    result, _ = run(tmp_path / "run", profile=True)
    said = capfd.readouterr().err
    assert "aten::" in said
    assert "Self CPU %" in said
    trace = json.loads((tmp_path / "run" / "logs" / "trace.json").read_text())
    assert len(trace["traceEvents"]) > 100
    assert result.steps == plain.steps
