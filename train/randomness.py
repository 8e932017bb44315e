"""The random state of a step is a function of its number, so a resumed run needs none from the checkpoint.

Lightning saves no generator: after a resume, dropout draws other masks than in an uninterrupted run.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from regard.train.sampling import mix

_TRAINING, _VALIDATION = 1, 2


class StepRandomness(Callback):
    """Seeds torch's generators (the CPU's and the used device's) from (seed, epoch, batch, rank) before each batch.

    Code that draws from `random` or `numpy` inside a step is not covered; augmentation has `sample_seed`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seed(_TRAINING, trainer, batch_idx, 0)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._seed(_VALIDATION, trainer, batch_idx, dataloader_idx)

    def _seed(self, stage: int, trainer: Trainer, batch: int, loader: int) -> None:
        seed = mix(self.seed, stage, trainer.current_epoch, batch, loader, trainer.global_rank)
        # Not torch.manual_seed: on a machine without a GPU it queues a call, with its stack, for each kind of one.
        torch.default_generator.manual_seed(seed)
        device = trainer.strategy.root_device
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
