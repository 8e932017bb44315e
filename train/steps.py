"""How many batches and optimizer steps a run has, from the data and the trainer's limits alone."""

import torch
from lightning.pytorch import Trainer

from regard.train.sampling import TrainBatches
from regard.vit.errors import InputError


def train_batches(trainer: Trainer) -> TrainBatches:
    """The sampler of the data module that is being trained on."""
    return trainer.datamodule.train_batches  # type: ignore[attr-defined]


def batches_per_epoch(trainer: Trainer) -> int:
    """Training batches of one epoch on each rank, `limit_train_batches` applied as Lightning applies it.

    Raises InputError where that leaves none.
    """
    batches, limit = len(train_batches(trainer)), trainer.limit_train_batches
    left = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if left < 1:
        raise InputError(f"trainer.limit_train_batches {limit} leaves none of the {batches} batches of an epoch")
    return left


def steps_per_epoch(trainer: Trainer) -> int:
    """Optimizer steps of one epoch; the last batch ends one even if fewer batches are accumulated then."""
    return -(-batches_per_epoch(trainer) // trainer.accumulate_grad_batches)


def total_steps(trainer: Trainer) -> int:
    """Optimizer steps of the whole run."""
    return steps_per_epoch(trainer) * epochs(trainer)


def epochs(trainer: Trainer) -> int:
    """Epochs of the whole run; `fit` always sets them."""
    assert trainer.max_epochs is not None
    return trainer.max_epochs


def is_first_rank() -> bool:
    """Whether this process speaks and writes for the run, also when its trainer is gone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0
