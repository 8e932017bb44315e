"""Signals end a run between two steps, with everything saved, and leave Python's handlers as they were."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.train.interrupt import Interrupted, Interrupts, ignore_ctrl_c

TOY = Path(__file__).with_name("toy_run.py")


def weights_of(toy: Any, out: Path, **options: Any) -> str:
    return toy(out, **options)[1]["weights"]


@pytest.mark.parametrize(
    ("signum", "exit_code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(
    toy: Any, tmp_path: Path, signum: int, exit_code: int, name: str
) -> None:
    _, report = toy(tmp_path / "cut", kill=["batch", 1, 3], signum=signum)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert report["exit_code"] == exit_code
    assert report["error"] == f"stopped by {name}: saved {last}; pass --resume to go on from here"
    assert torch.load(last, weights_only=True)["regard"]["batch"] == 4
    assert weights_of(toy, tmp_path / "cut", resume=True) == weights_of(toy, tmp_path / "whole")


def test_a_signal_in_mid_accumulation_waits_for_the_optimizer_step(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path / "cut", kill=["batch end", 0, 4], signum=signal.SIGTERM, accumulate=4)
    saved = torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=True)["regard"]
    assert (saved["batch"], saved["step"]) == (8, 2)
    cut = weights_of(toy, tmp_path / "cut", resume=True, accumulate=4)
    assert cut == weights_of(toy, tmp_path / "whole", accumulate=4)


@pytest.mark.parametrize("moment", [["batch", 0, 9], ["validation", 0]])
def test_a_signal_at_the_end_of_an_epoch_keeps_its_validation(toy: Any, tmp_path: Path, moment: list[Any]) -> None:
    _, report = toy(tmp_path / "cut", kill=moment, signum=signal.SIGTERM)
    assert report["exit_code"] == 143
    saved = torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=True)["regard"]
    assert (saved["epoch"], saved["batch"]) == (1, 0)
    assert saved["best_score"] is not None
    assert weights_of(toy, tmp_path / "cut", resume=True) == weights_of(toy, tmp_path / "whole")


def test_a_signal_in_the_last_validation_lets_the_run_finish(toy: Any, tmp_path: Path) -> None:
    _, report = toy(tmp_path, kill=["validation", 2], signum=signal.SIGTERM)
    assert "error" not in report
    assert report["epochs"] == 3


def test_before_training_a_signal_stops_at_once() -> None:
    with pytest.raises(Interrupted, match="nothing was saved yet") as stopped, Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_a_second_ctrl_c_stops_at_once_and_an_echo_of_the_first_does_not() -> None:
    with Interrupts() as interrupts:
        interrupts.training, interrupts.checkpoint = True, Path("last.ckpt")
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.35)
        with pytest.raises(Interrupted, match=r"go on from the last save, last\.ckpt"):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_ours_only_inside_and_only_in_the_main_thread() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def elsewhere() -> None:
        with Interrupts():
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before[1]]


def test_other_ranks_leave_with_zero_so_that_the_launcher_does_not_kill_the_first() -> None:
    assert Interrupted(signal.SIGTERM, None, at_once=False, rank=1).exit_code == 0


def test_a_worker_can_ignore_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        ignore_ctrl_c(0)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_workers_too_and_loses_nothing(toy: Any, tmp_path: Path) -> None:
    """The terminal signals the whole process group; the workers must serve the step that is to be finished."""
    options = {"accumulate": 4, "epochs": 400, "workers": 2}
    process = subprocess.Popen(
        [sys.executable, TOY, json.dumps({"out": str(tmp_path / "cut"), **options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for(tmp_path / "cut" / "checkpoints" / "last.ckpt")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)
