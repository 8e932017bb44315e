"""Runs that are misused: one line that says what is wrong, before the hours are spent, and no dead end."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.crossattn import ImageQA
from regard.datasets import load_questions
from regard.train.answer import train_answer
from regard.train.checkpoints import load
from regard.train.evaluate import evaluate_answer
from regard.train.folder import claim
from regard.train.recipe import load_recipe
from regard.train.sampling import EvalBatches, TrainBatches
from regard.vit.errors import InputError


def told(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_named_in_one_line_by_workers_too(
    small: dict[str, Any], squares: Path, tmp_path: Path, workers: int
) -> None:
    for file in squares.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"\x89PNG no more")
    said = told(train_answer, out=tmp_path / "run", **{**small, "data": str(tmp_path), "workers": workers})
    assert said.startswith(str(tmp_path))
    assert "replace or remove it" in said


def test_a_run_in_half_precision_ends_in_a_model_that_can_be_scored(
    small: dict[str, Any], squares: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train_answer(out=out, **{**small, "epochs": 1, "trainer": {"accelerator": "cpu", "precision": "bf16-true"}})
    model = ImageQA.from_pretrained(out)
    assert model.head.weight.dtype == torch.bfloat16
    assert evaluate_answer(model, load_questions(squares, "train")).n_questions == 72


@pytest.mark.parametrize("limit", [0, 0.01])
def test_an_epoch_of_no_batches_is_refused(small: dict[str, Any], tmp_path: Path, limit: float) -> None:
    trainer = {"accelerator": "cpu", "limit_train_batches": limit}
    assert "leaves none of the 6 batches" in told(train_answer, out=tmp_path, **{**small, "trainer": trainer})


def test_a_batch_of_nothing_is_refused() -> None:
    for batches in (TrainBatches, EvalBatches):
        given: dict[str, Any] = {"seed": 0} if batches is TrainBatches else {}
        assert "batch size is 0" in told(batches, 8, 0, **given)


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second process is refused; the lock of the first goes with it."""
    import subprocess
    import sys

    second = (
        "import sys\nfrom pathlib import Path\nfrom regard.train.folder import claim\n"
        "from regard.vit.errors import InputError\n"
        "try:\n  claim(Path(sys.argv[1]), False).__enter__()\nexcept InputError as error:\n  sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", second, str(tmp_path)]
    with claim(tmp_path, resume=False):
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 1
        assert "another process is training" in ran.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_what_is_in_the_way_of_the_model_is_told_before_the_training(small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("all of it")
    assert "thesis.txt" in told(train_answer, out=tmp_path, **small)
    assert not list((tmp_path / "checkpoints").glob("*.ckpt"))


@pytest.fixture
def finished(small: dict[str, Any], tmp_path: Path) -> Path:
    out = tmp_path / "run"
    train_answer(out=out, **{**small, "epochs": 1})
    return out


def test_a_deleted_best_checkpoint_costs_no_run(finished: Path) -> None:
    best = finished / "checkpoints" / "best.ckpt"
    best.unlink()
    assert train_answer(out=finished, resume=True).fit.best is None
    went_on = train_answer(out=finished, resume=True, epochs=2)
    assert went_on.fit.best == best
    assert best.exists()


def test_a_run_that_only_holds_its_best_is_no_dead_end(finished: Path, small: dict[str, Any]) -> None:
    (finished / "checkpoints" / "last.ckpt").unlink()
    assert "nothing to resume" in told(train_answer, out=finished, resume=True)
    assert "remove it, or choose another --out" in told(train_answer, out=finished, **small)


@pytest.mark.parametrize("table", [b"\xff\x00", b"a,b\n1,2\n", b"step\nmany\n"])
def test_a_foreign_table_of_metrics_is_named(finished: Path, table: bytes) -> None:
    (finished / "logs" / "metrics.csv").write_bytes(table)
    assert "metrics.csv: not the table" in told(train_answer, out=finished, resume=True, epochs=2)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"vit: " + b"[" * 5000, b"1: 2", b"- a", b"lr: .nan"])
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "odd.yaml").write_bytes(text)
    assert "odd.yaml" in told(load_recipe, tmp_path / "odd.yaml")


def test_a_flag_changes_one_field_of_a_recipes_nested_setting(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("vit: {preprocess: {fit: crop, crop_ratio: 0.9}, dim: 48}\n")
    recipe = load_recipe(tmp_path / "mine.yaml", vit={"preprocess": {"crop_ratio": 0.5}})
    assert recipe.vit == {"preprocess": {"fit": "crop", "crop_ratio": 0.5}, "dim": 48}


def test_a_file_that_is_no_checkpoint_is_refused_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_bytes(pickle.dumps({"state_dict": print}, protocol=4))
        assert "could run code: refused" in told(load, path)
        for value in (torch.zeros(3), {"weights": 1}):
            torch.save(value, path)
            assert "holds no state_dict" in told(load, path)
