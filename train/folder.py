"""The folder of a run: held by one process alone, found writable before anything is trained, swept after a kill."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.vit.errors import InputError
from regard.vit.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def claim(out: Path, resume: bool) -> Iterator[None]:
    """Hold `out` for this process alone; a killed one holds nothing."""
    checkpoints = out / "checkpoints"
    if not resume and (checkpoints / "last.ckpt").exists():
        raise InputError(f"{out} already holds a run; pass --resume to go on with it, or another --out")
    if not resume and (found := sorted(checkpoints.glob("*.ckpt"))):
        raise InputError(f"{found[0]} is of a run without last.ckpt to resume from; remove it, or choose another --out")
    lock = checkpoints / ".lock"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise InputError(f"cannot write in {out}: {error.strerror}; choose another --out") from error
    with file:
        try:
            # Not flock: forked data workers would inherit that, and outlive a killed trainer for seconds.
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is training in {out}; wait for it, or choose another --out") from error
        try:
            _tidy(checkpoints)
            yield
        finally:
            lock.unlink(missing_ok=True)


def _tidy(checkpoints: Path) -> None:
    """Make sure that files can be written, and remove what a killed run was writing when it died."""
    probe = checkpoints / ".probe"
    try:
        write_atomically(probe, lambda file: file.write(b"probe"))
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write in {checkpoints}: {error.strerror}; choose another --out") from error
    for leftover in checkpoints.glob(".*.part"):
        leftover.unlink(missing_ok=True)
