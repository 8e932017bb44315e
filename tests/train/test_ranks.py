"""Two processes train the model that one would train, and score it as one would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

TOY = Path(__file__).with_name("toy_run.py")
# Dropout draws other masks for a batch in two halves, so the comparison is made without it.
PLAIN: dict[str, Any] = {"module": {"dropout": 0.0}, "epochs": 2, "trainer": {"log_every_n_steps": 1}}


def column(out: Path, name: str) -> list[float]:
    header, *lines = [line.split(",") for line in (out / "logs" / "metrics.csv").read_text().splitlines()]
    return [float(line[header.index(name)]) for line in lines if line[header.index(name)]]


def test_two_ranks_with_half_the_batch_train_and_score_as_one(toy: Any, tmp_path: Path) -> None:
    _, one = toy(tmp_path / "one", batch_size=8, **PLAIN)
    _, two = toy(tmp_path / "two", world=2, batch_size=4, **PLAIN)
    assert "error" not in two, two
    assert (two["steps"], two["score"]) == (one["steps"], one["score"])
    torch.testing.assert_close(torch.tensor(two["flat"]), torch.tensor(one["flat"]), rtol=1e-5, atol=1e-6)
    # 13 held-out samples, each counted once.
    assert column(tmp_path / "two", "val/count") == column(tmp_path / "one", "val/count") == [13.0, 13.0]
    assert column(tmp_path / "two", "val/accuracy") == column(tmp_path / "one", "val/accuracy")


def test_two_ranks_resume_bit_equal(toy: Any, tmp_path: Path) -> None:
    options = {"world": 2, "save_every_steps": 2, "epochs": 2}
    _, whole = toy(tmp_path / "whole", **options)
    code, _ = toy(tmp_path / "cut", kill=["batch", 1, 3], **options)
    assert code == -signal.SIGKILL
    code, resumed = toy(tmp_path / "cut", resume=True, **options)
    assert len(resumed["seen"]) == 2
    assert resumed["weights"] == whole["weights"]


def test_a_bad_sample_on_one_rank_stops_both_and_is_named(toy: Any, tmp_path: Path) -> None:
    _, clean = toy(tmp_path / "clean", world=2, epochs=1)
    seen = {index for batch in clean["seen"] for index in batch}
    other = next(index for index in range(40) if index not in seen)
    _, report = toy(tmp_path / "run", world=2, epochs=1, poison=other)
    assert report["error"].startswith("NonFiniteError")
    assert f"sample-{other}" in report["error"]


@pytest.mark.slow
def test_a_signal_to_the_first_process_stops_all_that_lightning_launched(tmp_path: Path) -> None:
    """Lightning starts the second process; SIGTERM reaches the first alone."""
    options = {"out": str(tmp_path), "epochs": 4000, "trainer": {"devices": 2, "strategy": "ddp"}}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(conftest.free_port())}
    process = subprocess.Popen(
        [sys.executable, TOY, json.dumps(options)], stderr=subprocess.PIPE, text=True, env=environment
    )
    last = tmp_path / "checkpoints" / "last.ckpt"
    end = time.monotonic() + 90
    while not last.exists():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    saved = torch.load(last, weights_only=True)["regard"]
    assert saved["step"] > 0
