"""A classify run killed at any moment and resumed ends where an uninterrupted one ends, bit for bit."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.vit import ViT

# 27 training pictures make 6 batches of 4 on one process, 6 of 2 each on two; with accumulation 3 steps an epoch.
OPTIONS: dict[str, Any] = {"save_every_steps": 1, "trainer": {"accumulate_grad_batches": 2}}
MOMENTS = {
    "first step": ["batch", 0, 0],
    "mid epoch": ["batch end", 0, 3],
    "mid accumulation": ["batch end", 1, 2],
    "validation": ["validation", 0],
    "late": ["batch", 1, 5],
}


def checkpoint(out: Path, name: str) -> dict[str, Any]:
    return torch.load(out / "checkpoints" / name, weights_only=True)


def different(one: Any, other: Any, where: str = "") -> list[str]:
    """The places in which two checkpoints differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [f"{where}/{key}" for key in one.keys() ^ other.keys()]
        return keys + [
            at for key in one.keys() & other.keys() for at in different(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            at
            for number, pair in enumerate(zip(one, other, strict=True))
            for at in different(*pair, f"{where}/{number}")
        ]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [where]


def assert_same_end(out: Path, whole: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = checkpoint(out, name), checkpoint(whole, name)
        parts = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "regard"}
        assert parts <= theirs.keys()
        assert not (found := different(ours, theirs)), f"{name}: {found}"
    for file in ("model.safetensors", "config.json", "classes.json"):
        assert (out / "model" / file).read_bytes() == (whole / "model" / file).read_bytes()


@pytest.fixture(scope="module")
def whole(picture_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    code, report = picture_run(out, **OPTIONS)
    assert code == 0, report
    return out


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_killed_run_resumes_bit_equal(picture_run: Any, whole: Path, tmp_path: Path, moment: list[Any]) -> None:
    out = tmp_path / "run"
    code, report = picture_run(out, kill=moment, **OPTIONS)
    assert (code, report) == (-signal.SIGKILL, None)
    saved = (out / "checkpoints" / "last.ckpt").exists()
    assert saved == (moment != ["batch", 0, 0])
    code, report = picture_run(out, resume=saved, **OPTIONS)
    assert code == 0, report
    assert_same_end(out, whole)


def test_a_run_stopped_by_sigterm_exits_143_and_resumes_bit_equal(
    picture_run: Any, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    _, report = picture_run(out, kill=["batch", 1, 2], signum=signal.SIGTERM, **OPTIONS)
    assert report["exit_code"] == 143
    assert checkpoint(out, "last.ckpt")["regard"]["step"] == 5
    code, report = picture_run(out, resume=True)
    assert code == 0, report
    assert_same_end(out, whole)


def test_workers_and_muon_resume_bit_equal(picture_run: Any, tmp_path: Path) -> None:
    options = {**OPTIONS, "optimizer": "muon", "layer_decay": 0.75, "workers": 1}
    _, report = picture_run(tmp_path / "whole", **options)
    assert report["steps"] == 6  # each step counted once, though two optimizers are in it
    picture_run(tmp_path / "cut", kill=["batch end", 1, 1], **options)
    code, report = picture_run(tmp_path / "cut", resume=True)
    assert code == 0, report
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_two_processes_resume_bit_equal(picture_run: Any, tmp_path: Path, signum: int) -> None:
    options = {**OPTIONS, "world": 2, "batch": 2}
    code, report = picture_run(tmp_path / "whole", **options)
    assert code == 0, report
    picture_run(tmp_path / "cut", kill=["batch end", 1, 1], signum=signum, **options)
    code, report = picture_run(tmp_path / "cut", world=2, resume=True)
    assert code == 0, report
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_two_processes_train_what_one_trains(picture_run: Any, tmp_path: Path) -> None:
    """Drop path and mixing draw otherwise for a batch in halves; all else is a function of the picture."""
    # A bias on the keys has no gradient but rounding, which AdamW would blow up.
    plain = {"drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0, "vit": {"key_bias": False}}
    _, one = picture_run(tmp_path / "one", batch=4, **plain)
    _, two = picture_run(tmp_path / "two", world=2, batch=2, **plain)
    assert "error" not in two, two
    assert (two["steps"], two["score"]) == (one["steps"], one["score"])
    torch.testing.assert_close(torch.tensor(two["flat"]), torch.tensor(one["flat"]), rtol=1e-4, atol=1e-6)


def test_a_run_of_another_average_would_end_elsewhere(picture_run: Any, whole: Path, tmp_path: Path) -> None:
    """The comparison can fail."""
    picture_run(tmp_path / "run", **OPTIONS, ema=0.3)
    found = different(checkpoint(tmp_path / "run", "last.ckpt"), checkpoint(whole, "last.ckpt"))
    assert any(at.startswith("/state_dict/average.network") for at in found)
    assert not any(at.startswith("/state_dict/vit") for at in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "muon"}, "resume with the optimizer, layer_decay and freeze_vit it was started with"),
        ({"layer_decay": 0.5}, "resume with the optimizer, layer_decay and freeze_vit it was started with"),
        ({"ema": None}, "the checkpoint is of another model: average.network"),
    ],
)
def test_a_state_of_other_settings_is_told(picture_run: Any, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    from regard.train.classify.task import train_classify
    from regard.vit.errors import InputError

    picture_run(tmp_path / "run", kill=["batch end", 1, 1], **OPTIONS)
    with pytest.raises(InputError, match=said) as error:
        train_classify(out=tmp_path / "run", resume=True, **change)
    assert "\n" not in str(error.value)


def test_weights_in_pieces_train_what_whole_ones_train(picture_run: Any, tmp_path: Path) -> None:
    """FSDP2 on two processes: the same weights and average, and a model that opens as a plain ViT."""
    plain = {"drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0, "vit": {"key_bias": False}, "batch": 2, "world": 2}
    _, whole = picture_run(tmp_path / "whole", **plain)
    code, pieces = picture_run(tmp_path / "pieces", trainer={"strategy": "fsdp2"}, **plain)
    assert code == 0, pieces
    assert (pieces["steps"], pieces["score"]) == (whole["steps"], whole["score"])
    torch.testing.assert_close(torch.tensor(pieces["flat"]), torch.tensor(whole["flat"]), rtol=1e-4, atol=1e-6)
    opened = ViT.from_pretrained(tmp_path / "pieces")
    assert opened.config.classes == 3
