"""The recipes reach what they claim. Minutes each: `make test-all`."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.train.answer import train_answer
from regard.verbs.evaluate import evaluate_answer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    out = tmp_path_factory.mktemp("runs") / "demo"
    start = time.perf_counter()
    train_answer("easy_vqa_demo", out=out)
    return out, time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_answers_97_percent_of_the_official_test_split(demo: tuple[Path, float]) -> None:
    assert evaluate_answer(model=str(demo[0])).accuracy >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_maps_of_named_words_peak_on_the_shape_and_controls_do_not(demo: tuple[Path, float]) -> None:
    """The strict reading: the centre of the peak patch lies on the drawn shape."""
    arguments = [sys.executable, BENCHMARKS / "maps_on_shapes.py", "--model", demo[0], "--json"]
    told = json.loads(subprocess.run(arguments, capture_output=True, check=True, text=True).stdout)
    assert told["trained"]["maps"] > 5000
    assert told["trained"]["centre_on_shape"] >= 0.9
    assert told["random patch"]["centre_on_shape"] < 0.2
    # An untrained map prefers the few patches that differ from the background, so it is the stricter control.
    assert told["untrained model"]["centre_on_shape"] < told["trained"]["centre_on_shape"] - 0.1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_full_recipe_answers_99_and_a_half_percent(tmp_path: Path) -> None:
    train_answer("easy_vqa", out=tmp_path / "run")
    assert evaluate_answer(model=str(tmp_path / "run")).accuracy >= 0.995
