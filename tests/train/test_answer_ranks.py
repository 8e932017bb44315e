"""The task `answer` on two processes, killed at a random step: it resumes to the bits of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from safetensors.torch import load_file

RUN = """
import json, sys
from regard.train.answer import train_answer
from regard.train.interrupt import Interrupted
try:
    train_answer(**json.loads(sys.argv[1]))
except Interrupted as stop:  # as the command does
    sys.exit(stop.exit_code)
"""


def start(settings: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Both ranks, as a launcher starts them."""
    shared = {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(conftest.free_port())}
    arguments = [sys.executable, "-c", RUN, json.dumps(settings, default=str)]
    return [
        subprocess.Popen(
            arguments,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_two_processes_resume_bit_equal(small: dict[str, Any], tmp_path: Path, signum: int) -> None:
    trainer = {**small.get("trainer", {}), "accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    settings = {**small, "epochs": 12, "save_every_steps": 1, "batch_images": 4, "trainer": trainer}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for process in start({**settings, "out": whole}):
        assert process.wait(timeout=120) == 0, process.stderr.read()
    run = start({**settings, "out": cut})
    last = cut / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    for process in run:
        process.send_signal(signum)
    codes = [process.wait(timeout=60) for process in run]
    assert codes[0] == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    assert torch.load(last, weights_only=True)["regard"]["step"] > 0
    assert not (cut / "model").exists(), "killed before it ended"
    for process in start({"out": cut, "resume": True}):
        assert process.wait(timeout=120) == 0, process.stderr.read()
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
