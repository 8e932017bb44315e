"""Writing files all or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from regard.vit.errors import InputError
from regard.vit.files import typed_path, write_atomically


def test_a_file_is_created_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    for content in (b"one", b"two"):
        write_atomically(path, lambda file, content=content: file.write(content))
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_gets_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", lambda file: file.write(b"x"))
        assert os.umask(0o027) == 0o027, "the umask of the process must stay"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error, old, step):
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_bytes(old)

    def failing(*arguments):
        raise error

    def write(file):
        file.write(b"half of the ne")
        if step == "write":
            raise error

    with monkeypatch.context() as patch:
        if step != "write":
            patch.setattr(os, step, failing)
        with pytest.raises(type(error)):
            write_atomically(path, write)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_the_new_name_appears_only_when_the_bytes_are_complete(tmp_path):
    path = tmp_path / "a.txt"

    def write(file):
        file.write(b"half")
        assert not path.exists()
        (hidden,) = tmp_path.iterdir()
        assert hidden.name.startswith(".a.txt.")

    write_atomically(path, write)
    assert path.read_bytes() == b"half"


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "a.txt", lambda file: file.write(b"x"))


def test_a_symbolic_link_stays_one_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a.txt").write_bytes(b"old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "disk" / "a.txt")
    write_atomically(tmp_path / "link.txt", lambda file: file.write(b"new"))
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "disk" / "a.txt").read_bytes() == b"new"
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800"])
def test_what_no_file_system_takes_is_no_path(text):
    with pytest.raises(InputError, match="no path"):
        typed_path(text)


def test_the_home_folder_is_put_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed_path("~/a") == tmp_path / "a"
    assert typed_path("a/~") == Path("a/~")
