"""Paths as people type them, and files that no crash, full disk or kill leaves half of."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from regard.vit.errors import InputError


def typed_path(text: str | os.PathLike[str]) -> Path:
    """A path from a command line or a call; `~` is the home folder even where no shell has expanded it.

    Raises InputError for an empty one, which would mean the working folder, and for one that no file system takes.
    """
    text = os.fspath(text)
    try:
        os.fsencode(text)
        bad = not text or "\0" in text
    except UnicodeEncodeError:
        bad = True
    if bad:
        raise InputError(f"{text!r} is no path; give the name of a file or folder")
    return Path(os.path.expanduser(text))


def require_another(out: Path, source: Path) -> None:
    """Raise InputError where a result would be written over the file it is made from."""
    if out.exists() and source.exists() and os.path.samefile(out, source):
        raise InputError(f"{out}: the result would replace the picture it is made from; choose another --out")


def write_atomically(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace `path` with what `write(file)` puts into it: all of it or nothing.

    The bytes go to a hidden neighbour, reach the disk, and only then take the name. A symbolic link stays one: what
    it points to is replaced.
    Raises OSError as the file system gives it (read-only, full); the old file is then untouched.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:  # /dev/null is written to, not replaced
            write(device)
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_folder(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Create or replace a folder with these files, each written by its function at a given path: all or nothing.

    An older folder in its place is replaced only at the end. Raises OSError as the file system gives it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        fresh.chmod(folder.stat().st_mode if folder.exists() else 0o777 & ~_umask())
        for name, write in files.items():
            write(fresh / name)
        if folder.exists():
            old = fresh.with_suffix(".old")
            folder.rename(old)
            try:
                fresh.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
