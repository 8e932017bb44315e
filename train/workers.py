"""A user's mistake met in a data worker reaches the trainer as it is.

The DataLoader raises a worker's exception anew with the worker's whole traceback as its message, so a broken
picture would be told in twenty lines. Here the worker hands over what it has to say in place of the batch.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset, get_worker_info

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


class TellingData(LightningDataModule):
    """A data module whose loaders read `Telling` datasets: what a worker refused is raised where the batch is due."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, Refused):
            raise InputError(batch.message)
        return batch
