"""`ClassifyModule`: what a step of training a ViT with labels computes, and what is counted when it is scored.

B pictures, C classes.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.datasets.augment.dice import Dice
from regard.datasets.augment.mix import mix, soft_targets
from regard.train.classify.score import Share, rightly
from regard.train.ema import WeightAverage
from regard.train.module import RegardModule
from regard.train.muon import MuonWithAdamW, hidden_matrices
from regard.train.optim import configure, depth_factors
from regard.train.pictures import PictureBatch
from regard.train.steps import steps_per_epoch, total_steps
from regard.vit import ViT, ViTConfig
from regard.vit.errors import InputError
from regard.vit.flops import forward_macs

_TOP5_FROM = 6  # classes; of five, the first five always hold the right one


class ClassifyModule(RegardModule):
    """Trains a ViT with a head by the cross-entropy of the classes, or by a binary one for each class (`bce`).

    Pixels are normalised, and mixed with each other, on the device. `ema` is the decay of the running average of the
    weights, None for none. `lr_scale` and `lr_batch` are as in `ClassifyRecipe`, and so is `warmup_epochs`, which is
    used where `warmup_steps` is 0. `seed` is that of the mixing.
    """

    def __init__(
        self,
        vit: ViT,
        *,
        seed: int,
        loss: Literal["ce", "bce"] = "ce",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        ema: float | None = None,
        layer_decay: float = 1.0,
        optimizer: Literal["adamw", "muon"] = "adamw",
        muon_lr: float = 0.02,
        lr_scale: Literal["none", "linear", "sqrt"] = "none",
        lr_batch: int = 1024,
        warmup_epochs: float = 0.0,
        **optimization: Any,
    ):
        super().__init__(**optimization)
        if vit.head is None:
            raise InputError("this ViT has no classifier to train; build it with ViTConfig.classes")
        self.vit, self.classes = vit, vit.head.out_features
        self.average = None if ema is None else WeightAverage(vit, ema)
        self.seed, self.loss_kind, self.label_smoothing = seed, loss, label_smoothing
        self.mixup, self.cutmix = mixup, cutmix
        self.layer_decay, self.optimizer, self.muon_lr = layer_decay, optimizer, muon_lr
        self.lr_scale, self.lr_batch, self.warmup_epochs = lr_scale, lr_batch, warmup_epochs
        self.frozen = [part for part in vit.children() if not any(p.requires_grad for p in part.parameters())]
        self._saved_groups: list[str] | None = None
        self._scale = 1.0
        kinds = ["accuracy", "loss"] + (["top5_accuracy"] if self.classes >= _TOP5_FROM else [])
        kinds += [] if ema is None else [f"ema_{kind}" for kind in kinds]
        self.scores = nn.ModuleDict({kind: Share() for kind in kinds})

    @property
    def monitor(self) -> str:
        """The score that the best epoch is chosen by: of the averaged weights, where there are any."""
        return "val/accuracy" if self.average is None else "val/ema_accuracy"

    @property
    def best(self) -> ViT:
        """The network to keep: the averaged one, where there is one."""
        if self.average is None:
            return self.vit
        assert isinstance(self.average.network, ViT)
        return self.average.network

    def kept(self) -> tuple[str, ViTConfig]:
        return "vit." if self.average is None else "average.network.", self.vit.config

    # What is trained, and how fast

    def configure_optimizers(self) -> Any:
        scale = self._scale = self.rate_scale()
        # A recipe's warm-up suits its own data; a small set would end before the learning rate has risen.
        wanted = self.warmup_steps or round(self.warmup_epochs * steps_per_epoch(self.trainer))
        make: Any = torch.optim.AdamW
        if self.optimizer == "muon":
            make = functools.partial(
                MuonWithAdamW, hidden=hidden_matrices(self.vit.blocks), muon_lr=self.muon_lr * scale
            )
        made = configure(
            self,
            lr=self.lr * scale,
            weight_decay=self.weight_decay,
            betas=self.betas,
            total_steps=total_steps(self.trainer),
            warmup_steps=min(wanted, max(1, total_steps(self.trainer) // 10)),
            factors=self.rate_factors(),
            fused=self.may_fuse(),
            make=make,
        )
        self._compare_groups(made["optimizer"])
        return made

    def rate_scale(self) -> float:
        """The factor on the learning rate for the pictures that an optimizer step sees on all devices together."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        pictures = data.train_batches.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
        exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scale]
        return float((pictures / self.lr_batch) ** exponent)

    def rate_factors(self) -> Mapping[nn.Parameter, float]:
        return {} if self.layer_decay == 1 else depth_factors(self.vit, self.layer_decay)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The step, and after it the average of the weights: once per step, however many batches it gathered."""
        super().optimizer_step(*args, **kwargs)
        if self.average is not None:
            self.average.update(self.vit, self.trainer.global_step + 1)

    def train(self, mode: bool = True) -> "ClassifyModule":
        """Training mode for the parts that are trained; what is frozen as a whole stays in inference mode."""
        super().train(mode)
        for part in self.frozen:
            part.eval()
        return self

    def networks(self) -> list[nn.Module]:
        return [self.vit] if self.average is None else [self.vit, self.average.network]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        states = checkpoint.get("optimizer_states") or [{"param_groups": []}]
        self._saved_groups = [str(group.get("name")) for group in states[0]["param_groups"]]

    def _compare_groups(self, optimizer: torch.optim.Optimizer) -> None:
        own, saved = [str(group.get("name")) for group in optimizer.param_groups], self._saved_groups
        if saved is not None and saved != own:
            raise InputError(
                f"the checkpoint's optimizer has the groups {', '.join(saved) or 'of none'}, this run has "
                f"{', '.join(own)}; resume with the optimizer, layer_decay and freeze_vit it was started with"
            )

    # A batch

    def losses(self, batch: PictureBatch) -> Tensor:
        """The loss of each picture `(B,)`, mixed and smoothed as in training."""
        assert isinstance(batch.pixels, Tensor)
        # A picture that could not be read must not be mixed into another: one that counts stands in its place.
        rows = torch.arange(len(batch.labels), device=batch.labels.device)
        rows = torch.where(batch.counts, rows, batch.counts.byte().argmax())
        images = self.vit.preprocess.normalize(batch.pixels[rows])
        labels = batch.labels[rows].clamp(min=0)
        if not self.mixup and not self.cutmix:
            return self.loss(self.vit.classify(images), self.targets(labels))
        images, targets = mix(
            images,
            labels,
            Dice(self.seed, batch.epochs.tolist(), batch.indices.tolist()),
            classes=self.classes,
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            smoothing=self.label_smoothing,
        )
        return self.loss(self.vit.classify(images), targets)

    def targets(self, labels: Tensor) -> Tensor:
        """The share of each class `(B, C)` that the labels `(B,)` stand for, smoothed."""
        return soft_targets(labels, self.classes, self.label_smoothing)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss `(B,)` of logits `(B, C)` for the share of each class in the target `(B, C)`."""
        if self.loss_kind == "bce":
            return functional.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(1)
        return -(targets * logits.float().log_softmax(dim=1)).sum(1)

    def training_step(self, batch: PictureBatch, batch_idx: int) -> Tensor:
        counts = batch.counts.float()
        loss = (self.losses(batch) * counts).sum() / counts.sum().clamp(min=1)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.ids))
        return self.check_finite(loss, batch.ids)

    def validation_step(self, batch: PictureBatch, batch_idx: int) -> None:
        assert isinstance(batch.pixels, Tensor)
        images, labels = self.vit.preprocess.normalize(batch.pixels), batch.labels.clamp(min=0)
        self._count("", self.vit.classify(images), labels, batch.counts)
        if self.average is not None:
            self._count("ema_", self.best.classify(images), labels, batch.counts)

    def on_validation_epoch_end(self) -> None:
        """Raises InputError where not one held-out picture could be read: there is nothing to choose an epoch by."""
        score = self.scores["accuracy"]
        assert isinstance(score, Share)
        if math.isnan(float(score.compute())):
            raise InputError("none of the held-out pictures can be read; see what is broken with: regard check")

    def _count(self, of: str, logits: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Add a batch to the scores; with the others' over all ranks, each picture counts exactly once."""
        right = rightly(logits, labels)
        values = {"accuracy": right[:, 0], "loss": self.loss(logits, self.targets(labels))}
        if self.classes >= _TOP5_FROM:
            values["top5_accuracy"] = right[:, :5].any(dim=1)
        for kind, value in values.items():
            score = self.scores[of + kind]
            assert isinstance(score, Share)
            score.update(value, counts)
            self.log(f"val/{of}{kind}", score, prog_bar=kind == "accuracy", on_step=False, on_epoch=True)

    # What a person is told

    def picture_flops(self) -> float | None:
        macs = forward_macs(self.vit.config, self.vit.preprocess.size)
        return 2.0 * macs * (3 if any(p.requires_grad for p in self.vit.blocks.parameters()) else 1)

    def card(self) -> list[tuple[str, str]]:
        config = self.vit.config
        height, width = self.vit.preprocess.size or config.image_size
        size = f"width {config.dim}, {config.depth} blocks, patches of {config.patch_size} px of {height} x {width}"
        average = [] if self.average is None else [("average", f"of the weights, decay {self.average.decay:g}")]
        scale = self._scale
        rate = [] if scale == 1 else [("lr", f"{self.lr * scale:.4g}, {scale:.4g} times {self.lr:g} ({self.lr_scale})")]
        return [("model", f"ViT of {size}, {self.classes} classes"), *average, *rate]
