"""A tiny ViT that learns to tell 48 pictures apart, for tests of strategies; like `toy_run`, and run in its place.

The module calls its network as tasks do: once per resolution, by methods other than `forward`, beside a frozen teacher.
"""

from pathlib import Path
from typing import Any

import torch
import toy_run
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from regard.train.module import RegardModule
from regard.train.sampling import Draw, EvalBatches, TrainBatches
from regard.vit import ViT
from regard.vit.config import ViTConfig

CONFIG = ViTConfig(
    image_size=(16, 24),
    patch_size=8,
    dim=16,
    heads=2,
    depth=2,
    registers=2,
    classes=3,
    layer_scale=0.5,
    key_bias=False,  # its gradient is rounding alone, which AdamW would turn into steps
)


class Pictures(Dataset):
    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (size,), generator=generator)
        self.pixels = torch.randn(size, 3, 16, 24, generator=generator) + self.labels[:, None, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        return self.pixels[draw.index], self.labels[draw.index], draw.index, draw.valid


class Data(LightningDataModule):
    def __init__(self, batch_size: int, *_: Any) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        ranks = {"rank": self.trainer.global_rank, "world": self.trainer.world_size}
        self.train_batches = TrainBatches(48, self.batch_size, seed=toy_run.SEED, **ranks)
        self.val_batches = EvalBatches(13, self.batch_size, **ranks)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Pictures(48, 0), batch_sampler=self.train_batches)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Pictures(13, 1), batch_sampler=self.val_batches)


class Module(RegardModule):
    def __init__(self, **optimization: Any) -> None:
        super().__init__(**{"lr": 0.01, "warmup_steps": 2, "clip_norm": 0.5, **optimization})
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = random_vit(CONFIG)
            self.teacher = random_vit(CONFIG).requires_grad_(False)
        self.teacher.eval()
        self.accuracy = MeanMetric()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index, _ = batch
        self.seen.append(index.tolist())
        with torch.no_grad():
            target = self.teacher.classify(x).softmax(-1)
        loss = nn.functional.cross_entropy(self.net.classify(x), y)
        loss = loss + 0.1 * nn.functional.cross_entropy(self.net.classify(x[..., :8]), target)
        self.log("train/loss", loss)
        return self.check_finite(loss, index.tolist())

    def optimizer_step(self, *given: Any, **named: Any) -> None:
        super().optimizer_step(*given, **named)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.net.parameters()), 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _, valid = batch
        self.accuracy.update((self.net.classify(x).argmax(-1) == y).float(), valid.float())
        self.log("val/accuracy", self.accuracy, on_step=False, on_epoch=True)


def random_vit(config: ViTConfig) -> ViT:
    """A ViT with nothing left at 0 or 1."""
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def run(out: str, **options: Any) -> dict[str, Any]:
    """`toy_run.run` with this module and these pictures; weights of the teacher are compared too."""
    toy_run.Module, toy_run.Data = Module, Data  # this process is the test's own
    return toy_run.run(out, **options)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Student and teacher as a checkpoint holds them."""
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith(("net.", "teacher."))}
