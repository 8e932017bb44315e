"""Where the bytes of a set's pictures lie: names of files, or spans of archives, packed in a few tensors.

A million Python strings would be copied into every worker process, because counting references writes to them;
one block of text and its offsets are shared.
"""

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.datasets.images import file_bytes, shown
from regard.vit.errors import InputError


class Names(Sequence[str]):
    """A read-only list of names, kept as one block of UTF-8 text."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._text = b"".join(encoded)
        lengths = torch.tensor([len(name) for name in encoded], dtype=torch.long)
        ends = lengths.cumsum(0)
        self._spans = torch.stack((ends - lengths, ends), 1)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # a slice is `take`
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self._spans[index].tolist()
        return self._text[start:end].decode("utf-8", "surrogateescape")

    def take(self, indices: Tensor) -> "Names":
        """The names at these places, in this order; they share the text."""
        taken = copy.copy(self)
        taken._spans = self._spans[indices]
        return taken


class Span(NamedTuple):
    """A picture inside an archive: `size` bytes from `offset` on of the file `archive`."""

    archive: str
    offset: int
    size: int


class Files(Protocol):
    """The pictures of a set as files, whatever holds them."""

    def __len__(self) -> int: ...

    def id(self, index: int) -> str:
        """A name for messages, the same on every machine."""

    def source(self, index: int) -> str | Span:
        """Where the bytes are: a path, or a span of an archive."""

    def read(self, index: int) -> bytes:
        """All bytes of one picture; InputError where they cannot be read."""

    def take(self, indices: Tensor) -> "Files":
        """The files at these places, in this order."""


@dataclass(frozen=True)
class FolderFiles:
    """Files by their paths relative to `root` (an absolute one stands for itself)."""

    root: str
    names: Names

    def __len__(self) -> int:
        return len(self.names)

    def id(self, index: int) -> str:
        return self.names[index]

    def source(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        return file_bytes(self.source(index))

    def take(self, indices: Tensor) -> "FolderFiles":
        return FolderFiles(self.root, self.names.take(indices))


@dataclass(frozen=True)
class ArchiveFiles:
    """Members of archives that are not compressed, read where they lie.

    Attributes:
        archives: paths of the archives.
        names: for messages, such as `train-000.tar/0017.jpg`.
        spans: int64 `(N, 3)`: which archive, the first byte, how many bytes.
    """

    archives: tuple[str, ...]
    names: Names
    spans: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def id(self, index: int) -> str:
        return self.names[index]

    def source(self, index: int) -> Span:
        archive, offset, size = self.spans[index].tolist()
        return Span(self.archives[archive], offset, size)

    def read(self, index: int) -> bytes:
        archive, offset, size = self.source(index)
        try:
            with open(archive, "rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise InputError(f"{shown(self.id(index))}: cannot be read ({error.strerror})") from error
        if len(data) < size:
            raise InputError(f"{shown(self.id(index))}: the archive ends before it; fetch {shown(archive)} again")
        return data

    def take(self, indices: Tensor) -> "ArchiveFiles":
        return ArchiveFiles(self.archives, self.names.take(indices), self.spans[indices])
