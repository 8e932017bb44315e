"""A user's mistake met in a data worker reaches the trainer as it is.

The DataLoader raises a worker's exception anew with the worker's whole traceback as its message, so a broken
picture would be told in twenty lines. Here the worker hands over what it has to say in place of the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, get_worker_info

from regard.train.interrupt import ignore_ctrl_c
from regard.vit.errors import InputError


@dataclass(frozen=True)
class Refused:
    """Stands for a batch that could not be made, and says why."""

    message: str


class Telling(Dataset[Any]):
    """A dataset of whole batches whose InputErrors come out of a worker as `Refused`."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitems__(self, draws: list[Any]) -> Any:
        try:
            return self.batches.__getitems__(draws)
        except InputError as error:
            if get_worker_info() is None:
                raise
            return Refused(str(error))


def loader_of(batches: Any, sampler: Any, workers: int, *, keep_workers: bool = True) -> DataLoader[Any]:
    """A loader of whole batches, which `batches` makes out of what `sampler` draws, in so many processes."""
    return DataLoader(
        Telling(batches),
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=workers,
        persistent_workers=keep_workers and workers > 0,
        worker_init_fn=ignore_ctrl_c,
        pin_memory=torch.cuda.is_available(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


class TellingData(LightningDataModule):
    """A data module whose loaders read `Telling` datasets: what a worker refused is raised where the batch is due."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, Refused):
            raise InputError(batch.message)
        return batch
