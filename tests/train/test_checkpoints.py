"""A checkpoint file is whole or absent, whatever stops the process that writes it."""

import errno
import multiprocessing
import os
import pickle
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.train.checkpoints import AtomicFiles, load
from regard.vit.errors import InputError

OLD = {"state_dict": {"weight": torch.arange(6.0)}, "epoch": 1}
BIG = {"state_dict": {"weight": torch.randn(300_000)}}


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_returns_as_it_was_written(tmp_path: Path) -> None:
    AtomicFiles().save_checkpoint(OLD, tmp_path / "new folder" / "last.ckpt")
    again = AtomicFiles().load_checkpoint(tmp_path / "new folder" / "last.ckpt")
    assert torch.equal(again["state_dict"]["weight"], OLD["state_dict"]["weight"])
    assert again["epoch"] == 1
    assert not hidden(tmp_path / "new folder")


def write_slowly(path: str) -> None:
    import regard.train.checkpoints as checkpoints

    def save(checkpoint: Any, file: Any) -> None:
        file.write(b"the first half of a checkpoint")
        file.flush()
        time.sleep(60)

    checkpoints._save = save
    AtomicFiles().save_checkpoint(BIG, path)


def test_a_kill_in_the_middle_of_a_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicFiles().save_checkpoint(OLD, path)
    before = path.read_bytes()
    process = multiprocessing.get_context("fork").Process(target=write_slowly, args=(str(path),))
    process.start()
    end = time.monotonic() + 20
    while not any(part.stat().st_size for part in hidden(tmp_path)):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert path.read_bytes() == before
    assert load(path)["epoch"] == 1


def fill_up(path: str, report: str) -> None:
    # A file larger than this fails with EFBIG, as a full disk fails with ENOSPC.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        AtomicFiles().save_checkpoint(BIG, path)
    except InputError as error:
        Path(report).write_text(str(error))


def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path, report = tmp_path / "run" / "last.ckpt", tmp_path / "report"
    AtomicFiles().save_checkpoint(OLD, path)
    process = multiprocessing.get_context("fork").Process(target=fill_up, args=(str(path), str(report)))
    process.start()
    process.join()
    message = report.read_text()
    assert str(path) in message
    assert os.strerror(errno.EFBIG) in message
    assert "\n" not in message
    assert load(path)["epoch"] == 1
    assert not hidden(path.parent)


def test_a_disk_that_fills_during_training_stops_it_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import toy_run

    from regard.train import checkpoints

    toy_run.run(str(tmp_path), epochs=1)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "_save", full)
    report = toy_run.run(str(tmp_path), epochs=2, resume=True, save_every_steps=3)
    assert "No space left on device" in report["error"]
    assert "then pass --resume" in report["error"]
    # Steps 11 and 12: the run stopped where it could not save.
    assert len(report["seen"]) == 2
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before
    assert not hidden(tmp_path / "checkpoints")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def test_loading_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Bomb()}, "zip.ckpt")
    Path("plain.ckpt").write_bytes(pickle.dumps(Bomb()))
    for name in ("zip.ckpt", "plain.ckpt"):
        with pytest.raises(InputError, match=name):
            load(Path(name))
    assert not Path("exploded").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "last.ckpt"
    AtomicFiles().save_checkpoint(BIG, path)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"hello\n" * 99}[damage])
    with pytest.raises(InputError, match=str(path)) as found:
        load(path)
    assert "\n" not in str(found.value)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no checkpoint .*gone\.ckpt"):
        load(tmp_path / "gone.ckpt")


def test_what_a_killed_run_left_half_written_is_swept_up(toy: Any, tmp_path: Path) -> None:
    toy(tmp_path, epochs=1)
    (tmp_path / "checkpoints" / ".last.ckpt.xyz.part").write_bytes(b"half")
    toy(tmp_path, epochs=2, resume=True)
    assert not hidden(tmp_path / "checkpoints")
