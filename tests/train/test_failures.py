"""What dies beside the training process: a data worker, another rank, the disk. One clear line, and an exact resume."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.train.failures import explained
from regard.vit.errors import InputError


def end(toy: Any, out: Path, **options: Any) -> str:
    _, report = toy(out, **options)
    assert "error" not in report, report["error"]
    return report["weights"]


def last(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["regard"]


def test_a_worker_that_is_killed_ends_the_run_with_one_line_and_resumes_bit_equal(toy: Any, tmp_path: Path) -> None:
    options = {"workers": 2, "save_every_steps": 2}
    _, whole = toy(tmp_path / "whole", **options)
    victim = whole["seen"][10 + 6][1]  # a sample of the seventh batch of the second epoch
    _, report = toy(tmp_path / "cut", fatal=[1, victim], **options)
    # torch tells the signal, or only that the worker is gone, by which of the two it notices first.
    assert report["error"].startswith("InputError: a data worker ended by itself (")
    assert f"{tmp_path / 'cut' / 'checkpoints' / 'last.ckpt'} is whole: pass --resume" in report["error"]
    assert "\n" not in report["error"]
    assert last(tmp_path / "cut")["epoch"] == 1
    assert end(toy, tmp_path / "cut", resume=True, **options) == whole["weights"]


def test_a_worker_killed_before_any_save_says_that_nothing_was_saved(toy: Any, tmp_path: Path) -> None:
    _, report = toy(tmp_path, workers=1, fatal=[0, toy_first_sample(toy, tmp_path)])
    assert "nothing was saved yet" in report["error"]


def toy_first_sample(toy: Any, tmp_path: Path) -> int:
    return toy(tmp_path / "probe", epochs=1)[1]["seen"][3][0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("moment", [["batch", 1, 3], ["batch end", 1, 2]])
def test_when_one_rank_dies_the_other_ends_too_and_both_resume_bit_equal(
    toy: Any, tmp_path: Path, strategy: str, moment: list[Any]
) -> None:
    options = {"world": 2, "save_every_steps": 2, "epochs": 2, "trainer": {"strategy": strategy}}
    began = time.monotonic()
    code, report = toy(tmp_path / "cut", kill=moment, kill_rank=1, **options)
    assert time.monotonic() - began < 60, "the survivor waited for the dead"
    assert code == 0
    assert report["error"].startswith("InputError: another process of this run is gone")
    assert "pass --resume" in report["error"]
    assert last(tmp_path / "cut")["step"] >= 5
    whole = end(toy, tmp_path / "whole", **options)
    assert end(toy, tmp_path / "cut", resume=True, **options) == whole


def test_an_error_of_the_code_itself_is_not_explained_away() -> None:
    assert explained(RuntimeError("shapes (2, 3) and (4, 5) do not fit"), [], Path("last.ckpt")) is None
    assert explained(ValueError("DataLoader worker"), [], Path("last.ckpt")) is None


def test_a_refusal_of_another_rank_comes_first() -> None:
    class Ended:
        def poll(self) -> int:
            return 2

    told = explained(RuntimeError("Connection closed by peer"), [Ended()], Path(os.devnull))
    assert isinstance(told, InputError)
    assert "its message stands above" in str(told)
