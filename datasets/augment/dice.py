"""Random numbers without a state: each sample has its own, a function of (seed, epoch, sample) and of their name.

A sample is augmented alike whatever batch, rank, worker or resumed run draws it, and a new augmentation moves no other
one's choices. The numbers of a whole batch come from one pass of a counter-based generator (SplitMix64; Steele, Lea and
Flood, 2014, doi:10.1145/2660193.2660195): a generator per sample would cost more than the augmentation.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Dice:
    """The random numbers of a batch: one row a sample.

    Args:
        seed: of the run.
        epochs: in which epoch each sample is drawn, `(B,)`.
        indices: which sample of the data set each one is, `(B,)`.
    """

    def __init__(self, seed: int, epochs: Sequence[int], indices: Sequence[int]) -> None:
        if len(epochs) != len(indices):
            raise ValueError(f"{len(epochs)} epochs for {len(indices)} samples")
        start = _hash(np.full(len(indices), seed & (2**64 - 1), np.uint64))
        start = _hash(start ^ np.asarray(epochs, np.int64).astype(np.uint64))
        self._samples = _hash(start ^ np.asarray(indices, np.int64).astype(np.uint64))

    def __len__(self) -> int:
        return len(self._samples)

    def rows(self, which: Tensor) -> "Dice":
        """The dice of some of the samples: a bool mask `(B,)`, or their places in the batch."""
        some = Dice(0, [], [])
        some._samples = self._samples[which.numpy()]
        return some

    def each(self, names: Sequence[str]) -> "Dice":
        """Dice of their own for each of several crops of every sample: a row a crop, all samples of the first first."""
        several = Dice(0, [], [])
        several._samples = np.concatenate([_hash(self._samples ^ _salt(name)) for name in names])
        return several

    def levels(self, name: str, count: int) -> Tensor:
        """`count` whole numbers per sample, uniform in 0 … 255, uint8 `(B, count)`: noise, eight to a hash."""
        return torch.from_numpy(self._bits(name, -(-count // 8)).view(np.uint8)[:, :count])

    def uniform(self, name: str, count: int = 1) -> Tensor:
        """`count` numbers per sample, uniform in [0, 1), float64 `(B, count)`; another `name` gives others."""
        return torch.from_numpy((self._bits(name, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def happens(self, name: str, probability: float) -> Tensor:
        """Whether something of this probability happens to each sample, bool `(B,)`."""
        return self.uniform(name)[:, 0] < probability

    def between(self, name: str, low: float, high: float, count: int = 1) -> Tensor:
        """`count` numbers per sample, uniform in [low, high), float64 `(B, count)`."""
        return low + (high - low) * self.uniform(name, count)

    def integers(self, name: str, below: int, count: int = 1) -> Tensor:
        """`count` whole numbers per sample, uniform in 0 … `below` - 1, int64 `(B, count)`."""
        return (self.uniform(name, count) * below).long()

    def _bits(self, name: str, count: int) -> np.ndarray:
        """`count` words of 64 random bits per sample, uint64 `(B, count)`."""
        start = _hash(self._samples ^ _salt(name))[:, None]
        with np.errstate(over="ignore"):
            return _hash(start + np.arange(1, count + 1, dtype=np.uint64)[None] * _STEP)


def _salt(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _hash(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + _STEP
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))
