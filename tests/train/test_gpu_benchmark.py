"""The benchmark for a GPU runs where there is none, on tiny networks, and claims nothing there."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def lines(*flags: str) -> list[dict[str, object]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env=environment, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def test_every_kind_of_part_runs_and_says_that_it_claims_nothing() -> None:
    device, *parts = lines("--smoke", "--parts", "small", "loader", "dino")
    assert device["smoke"] is True
    assert [part["part"] for part in parts] == ["small", "loader", "dino"]
    for part in parts:
        assert "failed" not in part, part
        assert part["claims"] == "nothing"
    for part in (parts[0], parts[2]):
        ours = part["regard"]
        assert isinstance(ours, dict)
        assert ours["images_per_s"] > 0
        assert ours["graphs_after_warm_up"] == 0, "a graph was compiled after the warm-up"
        assert part["attention"], "no fused attention ran"


def test_parts_that_no_time_is_left_for_are_named() -> None:
    _, *parts = lines("--smoke", "--seconds", "0", "--parts", "small", "dino")
    assert [set(part) for part in parts] == [{"part", "left_out"}] * 2
