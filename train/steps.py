"""How many batches and optimizer steps a run has, from the data and the trainer's limits alone."""

from lightning.pytorch import Trainer


def batches_per_epoch(trainer: Trainer) -> int:
    """Training batches of one epoch on each rank, `limit_train_batches` applied as Lightning applies it."""
    batches, limit = len(trainer.datamodule.train_batches), trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def steps_per_epoch(trainer: Trainer) -> int:
    """Optimizer steps of one epoch; the last may accumulate fewer batches, for Lightning steps on the final
    one.
    """
    return -(-batches_per_epoch(trainer) // trainer.accumulate_grad_batches)


def total_steps(trainer: Trainer) -> int:
    """Optimizer steps of the whole run."""
    return steps_per_epoch(trainer) * trainer.max_epochs
