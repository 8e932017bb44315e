"""Batches of pictures for Lightning: what a view makes of a set's pictures, bad ones by policy, told once.

B pictures, C channels.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from regard.datasets.augment.dice import Dice
from regard.datasets.decode import decode
from regard.datasets.pictures import PictureSet
from regard.datasets.raws import ArrayRaws, FileRaws, Raws
from regard.train.sampling import Draw, EvalBatches, TrainBatches, digest, mix
from regard.train.workers import TellingData, loader_of
from regard.vit import ViT
from regard.vit.errors import InputError

BadImages = Literal["error", "skip", "replace"]

KEPT_BYTES = 1 << 30
"""How much of its decoded pictures a set keeps in memory, in each process."""

REPLACEMENTS = 16
"""How often another picture is drawn for a bad one before it is an error."""

_AT_ONCE = 16  # files decoded at a time: a batch of large photographs would not fit


@dataclass
class PictureBatch:
    """B pictures.

    Attributes:
        pixels: uint8 `(B, C, height, width)`, or a list of them, one per crop.
        labels: int64 `(B,)`; -1 where a picture has none.
        counts: bool `(B,)`: False on the padding of an evaluation shard and on a bad picture that was skipped, whose
            pixels are 0.
        ids: names of the pictures, for messages.
        indices, epochs: int64 `(B,)`: which picture of the set, drawn when; they make the dice of whatever is drawn
            on the device.
        bad: (id, reason) of each picture that could not be read.
    """

    pixels: Tensor | list[Tensor]
    labels: Tensor
    counts: Tensor
    ids: list[str]
    indices: Tensor
    epochs: Tensor
    bad: list[tuple[str, str]]

    def pin_memory(self) -> "PictureBatch":
        """The same in memory that a GPU copies from while it computes; the data loader calls it."""
        pixels = [crop.pin_memory() for crop in _listed(self.pixels)]
        return replace(
            self,
            pixels=pixels if isinstance(self.pixels, list) else pixels[0],
            labels=self.labels.pin_memory(),
            counts=self.counts.pin_memory(),
        )


class PictureBatches(Dataset[PictureBatch]):
    """Makes a `PictureBatch` from a list of draws; random choices are functions of (seed, epoch, picture) alone.

    Args:
        pictures: the set.
        view: what is seen of a batch: `view(raws, dice)` -> uint8 pixels or a list of them, each row a function of
            its own picture and dice alone (`regard.datasets.augment.views`).
        seed: of the augmentation.
        bad_images: what becomes of a picture that cannot be read: `error` ends the training, `skip` leaves its place
            in the batch blank and uncounted, `replace` draws another one.
        keep: hold decoded pictures in memory, up to `KEPT_BYTES` in every worker.
        reduced: decode JPEGs at a reduced scale where the crop allows it.
        channels: 1 or 3; by default those of the set, files having 3.
        background: what transparent pixels are composited on.
    """

    def __init__(
        self,
        pictures: PictureSet,
        view: Callable[[Raws, Dice], Tensor | list[Tensor]],
        *,
        seed: int,
        bad_images: BadImages = "error",
        keep: bool = False,
        reduced: bool = False,
        channels: int | None = None,
        background: tuple[int, int, int] = (255, 255, 255),
    ) -> None:
        if bad_images not in get_args(BadImages):
            raise InputError(f"bad_images is {bad_images!r}; choose one of {', '.join(get_args(BadImages))}")
        self.pictures, self.view, self.seed = pictures, view, seed
        self.bad_images, self.reduced = bad_images, reduced
        self.channels, self.background = channels, background
        self.kept: dict[int, np.ndarray] | None = {} if keep and pictures.pixels is None else None
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitems__(self, draws: list[Draw]) -> PictureBatch:
        """The whole batch at once (the data loader's batched fetch).

        Raises InputError for a bad picture under `error`, and under `replace` after `REPLACEMENTS` bad ones in a row.
        """
        seen = list(draws)
        pixels, reasons = self._seen(seen)
        bad = self._told(seen, reasons)
        if self.bad_images == "replace":
            for attempt in range(REPLACEMENTS):
                rows = list(reasons)
                if not rows:
                    break
                for row in rows:
                    seen[row] = self._another(draws[row], attempt)
                others, failed = self._seen([seen[row] for row in rows])
                for whole, part in zip(_listed(pixels), _listed(others), strict=True):
                    whole[rows] = part
                reasons = {rows[row]: reason for row, reason in failed.items()}
                bad += self._told(seen, reasons)
            if reasons:
                raise InputError(
                    f"{self.pictures.name}: {REPLACEMENTS + 1} pictures drawn in a row cannot be read, the last one "
                    f"{next(iter(reasons.values()))}; see what is broken with: regard check"
                )
        for row in reasons:
            for whole in _listed(pixels):
                whole[row] = 0
        indices = torch.tensor([draw.index for draw in seen])
        return PictureBatch(
            pixels=pixels,
            labels=self.pictures.labels[indices],
            counts=torch.tensor([draw.valid and row not in reasons for row, draw in enumerate(seen)]),
            ids=[self.pictures.id(draw.index) for draw in seen],
            indices=indices,
            epochs=torch.tensor([draw.epoch for draw in seen]),
            bad=list(dict.fromkeys(bad)),
        )

    def _told(self, draws: list[Draw], reasons: dict[int, str]) -> list[tuple[str, str]]:
        return [(self.pictures.id(draws[row].index), reason) for row, reason in reasons.items()]

    def _another(self, draw: Draw, attempt: int) -> Draw:
        place = mix(self.seed, draw.epoch, draw.index, attempt) % len(self)
        return Draw(place, draw.epoch, draw.valid)

    def _seen(self, draws: list[Draw]) -> tuple[Tensor | list[Tensor], dict[int, str]]:
        """Pixels, and the reason of each row that could not be read: its pixels mean nothing."""
        if self.pictures.pixels is not None:
            pixels = self.pictures.pixels[[draw.index for draw in draws]]
            return self._viewed(ArrayRaws(pixels, self.channels), draws), {}
        parts: list[Tensor | list[Tensor]] = []
        reasons: dict[int, str] = {}
        for first in range(0, len(draws), _AT_ONCE):
            some = draws[first : first + _AT_ONCE]
            raws = self._raws(some)
            parts.append(self._viewed(raws, some))
            reasons.update({first + row: reason for row, reason in raws.bad.items()})
        if len(parts) == 1:
            return parts[0], reasons
        if isinstance(parts[0], Tensor):
            return torch.cat(parts), reasons  # type: ignore[arg-type]
        return [torch.cat(crops) for crops in zip(*parts, strict=True)], reasons

    def _viewed(self, raws: Raws, draws: list[Draw]) -> Tensor | list[Tensor]:
        return self.view(raws, Dice(self.seed, [draw.epoch for draw in draws], [draw.index for draw in draws]))

    def _raws(self, draws: list[Draw]) -> FileRaws:
        return FileRaws(
            [self._picture(draw.index) for draw in draws],
            [self.pictures.id(draw.index) for draw in draws],
            channels=self.channels or 3,
            background=self.background,
            reduced=self.reduced,
            lenient=self.bad_images != "error",
        )

    def _picture(self, index: int) -> np.ndarray | bytes | InputError:
        if self.kept is not None and index in self.kept:
            return self.kept[index]
        try:
            data = self.pictures.read(index)
            if self.kept is None or self._kept_bytes > KEPT_BYTES:
                return data
            pixels = decode(data, self.pictures.id(index), background=self.background)
        except InputError as error:
            return error
        self.kept[index] = pixels
        self._kept_bytes += pixels.nbytes
        return pixels


class PictureData(TellingData):
    """Training and held-out batches of pictures; each bad picture is told once, on stderr.

    Args:
        training, held_out: the two sets; without the second nothing is scored while training.
        batch: pictures in a training batch on each device.
        eval_batch: the same for scoring; by default twice as many.
        seed: of the order of the pictures.
        workers: processes that make batches; with 0 the training itself makes them. They move no number.
        drop_last: leave out what does not fill a batch on every device.

    Attributes:
        bad: the reason of every picture that could not be read so far, by id.
    """

    def __init__(
        self,
        training: PictureBatches,
        held_out: PictureBatches | None,
        *,
        batch: int,
        eval_batch: int | None = None,
        seed: int,
        workers: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        self.training, self.held_out = training, held_out
        self.batch, self.eval_batch = batch, eval_batch or 2 * batch
        self.seed, self.workers, self.drop_last = seed, workers, drop_last
        self.bad: dict[str, str] = {}
        self._unusable: set[str] = set()  # of the training set

    def setup(self, stage: str) -> None:
        """Deal the pictures to the ranks. Raises InputError for a set too small to fill a batch on each device."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        needed = self.batch * world if self.drop_last else world
        if self.batch >= 1 and len(self.training) < needed:
            raise InputError(
                f"{self.training.pictures.name}: {len(self.training)} pictures are too few for a batch of {self.batch} "
                f"on {world} device(s), which takes {needed}; lower the batch or the number of devices, or add pictures"
            )
        self.train_batches = TrainBatches(
            len(self.training), self.batch, seed=self.seed, rank=rank, world=world, drop_last=self.drop_last
        )
        if self.held_out is not None:
            self.eval_batches = EvalBatches(len(self.held_out), self.eval_batch, rank=rank, world=world)

    def identity(self) -> str:
        """A digest of the training pictures' names, order, labels and classes."""
        pictures = self.training.pictures
        return digest([*pictures.classes, *pictures.labels.tolist(), *map(pictures.id, range(len(pictures)))])

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(self.training, self.train_batches, self.workers)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return [] if self.held_out is None else loader_of(self.held_out, self.eval_batches, self.workers)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        if isinstance(batch, PictureBatch):
            self._tell(batch.bad)
            if self.trainer is not None and self.trainer.training:
                self._require_some(batch.bad)
        return batch

    def _tell(self, bad: list[tuple[str, str]]) -> None:
        for name, reason in bad:
            if name not in self.bad:
                self.bad[name] = reason
                print(f"bad picture {len(self.bad)}: {reason}", file=sys.stderr, flush=True)

    def _require_some(self, bad: list[tuple[str, str]]) -> None:
        self._unusable.update(name for name, _ in bad)
        if bad and len(self._unusable) >= len(self.training):
            name = self.training.pictures.name
            raise InputError(f"{name}: none of its pictures can be read, the last one {bad[-1][1]}")


def require_channels(vit: ViT) -> None:
    """Raise InputError where pictures cannot be made with as many channels as the model takes."""
    channels, preprocess = vit.config.channels, vit.preprocess
    if channels not in (1, 3):
        raise InputError(f"vit.channels is {channels}; pictures have 1 (grey) or 3 (RGB)")
    if channels != len(preprocess.mean):
        some = "[0.5]" if channels == 1 else "[0.5, 0.5, 0.5]"
        raise InputError(
            f"vit.channels is {channels}, and vit.preprocess.mean and std have {len(preprocess.mean)} values; give "
            f'{channels}, such as --vit.preprocess.mean "{some}" --vit.preprocess.std "{some}"'
        )


def _listed(pixels: Tensor | list[Tensor]) -> list[Tensor]:
    return [pixels] if isinstance(pixels, Tensor) else pixels
