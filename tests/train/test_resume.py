"""A run killed at any moment and resumed ends where an uninterrupted one ends, bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

# Accumulation and the optimizer steps between saves. 10 batches an epoch; 4 does not divide them.
PLANS = [(1, 3), (2, 2), (4, 1), (2, None)]
MOMENTS = [
    ("first step", ["batch", 0, 0]),
    ("mid epoch", ["batch", 0, 5]),
    ("mid accumulation", ["batch end", 1, 6]),
    ("last batch", ["batch end", 0, 9]),
    ("validation", ["validation", 1]),
    ("right after validation", ["validated", 1]),
    ("epoch start", ["epoch", 1]),
    ("late epoch", ["batch", 2, 7]),
    ("last validation", ["validation", 2]),
]


@pytest.fixture(scope="session")
def uninterrupted(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[Any, tuple[Path, dict[str, Any]]] = {}

    def run(accumulate: int, every: int | None, **options: Any) -> tuple[Path, dict[str, Any]]:
        key = (accumulate, every, *options.items())
        if key not in runs:
            out = tmp_path_factory.mktemp("uninterrupted")
            runs[key] = out, toy(out, accumulate=accumulate, save_every_steps=every, **options)[1]
        return runs[key]

    return run


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def checkpoint(out: Path, name: str) -> dict[str, Any]:
    return torch.load(out / "checkpoints" / name, weights_only=True)


def assert_same_end(out: Path, report: dict[str, Any], reference: tuple[Path, dict[str, Any]]) -> None:
    whole, expected = reference
    assert report["weights"] == expected["weights"]
    assert (report["score"], report["steps"]) == (expected["score"], expected["steps"])
    assert report["seen"] == expected["seen"][len(expected["seen"]) - len(report["seen"]) :]
    # Optimizer, schedule, callbacks and loop counters too, not the weights alone.
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = checkpoint(out, name), checkpoint(whole, name)
        different = [key for key in theirs if not same(ours.get(key), theirs[key])]
        assert not different, f"{name}: {different}"


def kill_and_resume(toy: Any, out: Path, moment: list[Any], **options: Any) -> dict[str, Any]:
    code, report = toy(out, kill=moment, **options)
    assert code == -signal.SIGKILL
    assert report is None
    saved = (out / "checkpoints" / "last.ckpt").exists()
    code, report = toy(out, resume=saved, **options)
    assert code == 0
    assert "error" not in report, report
    return report


@pytest.mark.parametrize(("name", "moment"), MOMENTS, ids=[name for name, _ in MOMENTS])
def test_a_killed_and_resumed_run_ends_bit_equal(
    toy: Any, uninterrupted: Any, tmp_path: Path, name: str, moment: list[Any]
) -> None:
    report = kill_and_resume(toy, tmp_path, moment, accumulate=2, save_every_steps=2)
    assert_same_end(tmp_path, report, uninterrupted(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "every"), PLANS)
@pytest.mark.parametrize(("name", "moment"), MOMENTS, ids=[name for name, _ in MOMENTS])
def test_it_does_so_under_every_plan_of_saving(
    toy: Any, uninterrupted: Any, tmp_path: Path, name: str, moment: list[Any], accumulate: int, every: int
) -> None:
    report = kill_and_resume(toy, tmp_path, moment, accumulate=accumulate, save_every_steps=every)
    assert_same_end(tmp_path, report, uninterrupted(accumulate, every))


def test_a_run_killed_twice_ends_bit_equal(toy: Any, uninterrupted: Any, tmp_path: Path) -> None:
    options = {"accumulate": 1, "save_every_steps": 3}
    toy(tmp_path, kill=["batch", 0, 7], **options)
    assert checkpoint(tmp_path, "last.ckpt")["regard"]["batch"] == 6
    toy(tmp_path, kill=["batch", 1, 8], resume=True, **options)
    assert checkpoint(tmp_path, "last.ckpt")["regard"]["step"] == 18
    _, report = toy(tmp_path, resume=True, **options)
    assert_same_end(tmp_path, report, uninterrupted(1, 3))


def test_worker_processes_resume_with_the_same_augmentation(toy: Any, uninterrupted: Any, tmp_path: Path) -> None:
    options = {"accumulate": 2, "save_every_steps": 2, "workers": 2}
    _, report = toy(tmp_path, kill=["batch", 1, 5], signum=signal.SIGTERM, **options)
    assert report["exit_code"] == 143
    _, report = toy(tmp_path, resume=True, **options)
    assert report["weights"] == uninterrupted(2, 2)[1]["weights"]


def test_a_run_of_other_batches_would_end_elsewhere(toy: Any, uninterrupted: Any, tmp_path: Path) -> None:
    """The comparison above can fail: without dropout the weights differ."""
    _, report = toy(tmp_path, accumulate=2, module={"dropout": 0.0})
    assert report["weights"] != uninterrupted(2, 2)[1]["weights"]


def test_resuming_a_finished_run_trains_nothing_and_says_so(toy: Any, tmp_path: Path) -> None:
    _, first = toy(tmp_path, epochs=2)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()
    _, again = toy(tmp_path, epochs=2, resume=True)
    assert "is finished: 2 of 2 epochs" in again["stderr"]
    assert again["seen"] == []
    assert {key: again[key] for key in ("weights", "score", "epochs", "steps")} == {
        key: first[key] for key in ("weights", "score", "epochs", "steps")
    }
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_finished_run_goes_on_to_more_epochs(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path, epochs=1)
    _, report = toy(tmp_path, epochs=2, resume=True)
    assert (report["epochs"], report["steps"], len(report["seen"])) == (2, 20, 10)


def test_the_metrics_table_of_a_resumed_run_holds_every_step_once(toy: Any, tmp_path: Path) -> None:
    kill_and_resume(toy, tmp_path, ["batch", 1, 4], trainer={"log_every_n_steps": 1})
    rows = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[1:]
    steps = [int(row.split(",")[0]) for row in rows]
    # One row per step, one more per validation (at the last step of an epoch).
    assert steps == sorted([*range(30), 9, 19, 29])


def test_the_best_score_survives_a_move_of_the_folder(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path / "here", epochs=2)
    best = checkpoint(tmp_path / "here", "last.ckpt")["regard"]["best_score"]
    os.rename(tmp_path / "here", tmp_path / "there")
    _, report = toy(tmp_path / "there", epochs=3, resume=True)
    assert report["score"] >= best


def test_a_new_run_does_not_overwrite_an_old_one(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path, epochs=1)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()
    _, report = toy(tmp_path, epochs=1)
    assert "already holds a run; pass --resume" in report["error"]
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before


def test_resuming_nothing_is_an_error(toy: Any, tmp_path: Path) -> None:
    _, report = toy(tmp_path, resume=True)
    assert report["error"].startswith("InputError: nothing to resume")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [({"batch_size": 5}, "batch size 4"), ({"accumulate": 2}, "accumulate_grad_batches 1")],
)
def test_resuming_with_other_batches_is_an_error(toy: Any, tmp_path: Path, change: dict[str, int], named: str) -> None:
    toy(tmp_path, epochs=1)
    _, report = toy(tmp_path, resume=True, **change)
    assert named in report["error"]
    assert report["error"].count("\n") == 0


def test_resuming_another_model_names_the_first_tensor_that_differs(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path, epochs=1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["state_dict"]["net.0.bias"] = torch.zeros(9)
    torch.save(saved, path)
    _, report = toy(tmp_path, resume=True)
    assert "net.0.bias is (9,) in the checkpoint and (8,) in this run" in report["error"]
