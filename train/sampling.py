"""Which samples form which batch on which rank: pure functions of (seed, epoch, rank, world).

Lightning's `DistributedSampler` pads the last batch with samples that are then counted twice, so an
accuracy depends on the number of GPUs (Lightning #7929), and a mid-epoch resume replays the epoch from its
first batch (Lightning #18780). Here a training sampler can start at any batch, and an evaluation sampler
marks its padding.

Both are batch samplers: `DataLoader(dataset, batch_sampler=TrainBatches(...))` hands the dataset a `Draw`,
which tells it the sample and, for a random augmentation, the epoch: a worker process that outlives an epoch
learns it no other way.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from regard.vit.errors import InputError


@dataclass(frozen=True)
class Draw:
    """One place in a batch: the sample, the epoch it is drawn in, and whether it counts (False: padding)."""

    index: int
    epoch: int = 0
    valid: bool = True


def mix(*numbers: int) -> int:
    """A 63-bit seed from whole numbers: stateless, the same on every machine, unrelated for neighbours."""
    digest = hashlib.blake2b(b",".join(str(number).encode() for number in numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def digest(parts: Iterable[object]) -> str:
    """A short name for what the parts say, in their order: the same on every machine, another for other parts."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(str(part).encode("utf-8", "surrogateescape") + b"\0")
    return whole.hexdigest()


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed of one sample's augmentation in one epoch, whatever rank, worker, batch or resume draws it."""
    return mix(seed, epoch, index)


def _check_batch(size: int) -> None:
    if size < 1:
        raise InputError(f"the batch size is {size}; it must be at least 1")


class TrainBatches(Sampler[list[Draw]]):
    """Shuffled training batches: one permutation per epoch, dealt to all ranks in disjoint pieces.

    A batch of every rank together is one run of the permutation, so `world` ranks with `batch_size` see
    exactly what one rank sees with `world * batch_size`. All ranks have `len(self)` batches. Of the samples
    that do not fill a batch on every rank, `drop_last=True` leaves all out of this epoch, `drop_last=False`
    makes one shorter batch of equal length on all ranks and leaves out less than `world`.

    Raises InputError when the set cannot fill one batch on each rank.
    """

    def __init__(
        self, size: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, drop_last: bool = True
    ) -> None:
        _check_batch(batch_size)
        needed = batch_size * world if drop_last else world
        if size < needed:
            raise InputError(
                f"{size} training samples are too few for a batch of {batch_size} on {world} device(s): "
                f"at least {needed} are needed; lower the batch (--batch_images) or the number of devices"
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world, self.drop_last = rank, world, drop_last
        self.epoch, self.start = 0, 0
        rest = (size % (batch_size * world)) // world
        self._lengths = [batch_size] * (size // (batch_size * world)) + ([rest] if rest and not drop_last else [])

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration start at `batch` of `epoch`; it holds until the next call."""
        if not 0 <= batch <= len(self):
            raise ValueError(f"batch {batch} lies outside an epoch of {len(self)} batches")
        self.epoch, self.start = epoch, batch

    def __len__(self) -> int:
        """Batches in a whole epoch, whatever the position."""
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[Draw]]:
        # The position is an argument: a generator would read it only when its first batch is asked for.
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[Draw]]:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(self.size, generator=generator)
        for batch in range(start, len(self)):
            length = self._lengths[batch]
            first = batch * self.batch_size * self.world + self.rank * length
            yield [Draw(index, epoch) for index in order[first : first + length].tolist()]


class EvalBatches(Sampler[list[Draw]]):
    """Evaluation batches in file order: every sample counts exactly once over all ranks.

    All ranks have `len(self)` batches of equal lengths, so no collective waits for a rank that is done. Where
    samples run out, the last one is repeated with `valid=False`; with one rank there is no padding.

    Raises InputError when the set is empty.
    """

    def __init__(self, size: int, batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        _check_batch(batch_size)
        if size < 1:
            raise InputError("the evaluation set is empty: there is nothing to score")
        self.size, self.batch_size, self.rank, self.world = size, batch_size, rank, world

    def __len__(self) -> int:
        return -(-self.size // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[Draw]]:
        for batch in range(len(self)):
            begin = batch * self.batch_size * self.world
            length = min(self.batch_size, -(-(self.size - begin) // self.world))
            first = begin + self.rank * length
            yield [Draw(min(index, self.size - 1), valid=index < self.size) for index in range(first, first + length)]
