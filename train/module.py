"""What the LightningModules of all tasks share: optimizer, clipping, and the refusal to step on a NaN.

Clipping happens in `configure_gradient_clipping` with torch's own function, because Lightning refuses to
clip for a fused AdamW under mixed precision (Lightning #21435). The same norm tells whether the step may be
taken.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from regard.train.compiling import compile_blocks
from regard.train.finite import LateNorm, NonFiniteError, Unstepped, can_skip, describe
from regard.train.optim import configure
from regard.train.steps import total_steps
from regard.train.strategies import ShardedStrategy, shard
from regard.vit.checkpoint import TRAINED, passport
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError


class RegardModule(LightningModule):
    """A LightningModule whose steps are clipped and checked; `training_step` ends in
    `self.check_finite(loss, ids)`.

    `warmup_steps` are optimizer steps; the cosine after them ends with the run. `clip_norm` is the largest
    norm of all gradients together, None for no limit. Logs `train/lr` and `train/grad_norm` (before
    clipping) for each step that is logged.

    A subclass with `losses(batch)`, one loss per sample, has its memory estimated before it trains.
    """

    compiled: bool = False
    """Whether the blocks of `networks()` are compiled when the run starts; `fit` sets it."""

    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        clip_norm: float | None = 1.0,
    ) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.warmup_steps, self.betas = lr, weight_decay, warmup_steps, betas
        self.clip_norm = clip_norm
        self._unstepped: Unstepped = []
        self._late = LateNorm()

    def check_finite(self, loss: Tensor, sample_ids: Sequence[Any]) -> Tensor:
        """The loss () for Lightning to differentiate; remembers the samples it came from for the error
        message.

        A loss that is not finite makes every gradient NaN, so that after their all-reduce each rank sees it
        and all stop together. A finite loss is returned unchanged, bit for bit, and nothing waits for the
        device.
        """
        self._unstepped.append((loss.detach(), sample_ids))
        return loss * (1.0 + (loss - loss).detach())

    def networks(self) -> list[nn.Module]:
        """The networks whose blocks are compiled and sharded, by default every child that has weights."""
        return [child for child in self.children() if next(child.parameters(), None) is not None]

    def picture_flops(self) -> float | None:
        """FLOPs of training on one image, for a share of the device's peak; None where nobody has counted them."""
        return None

    def card(self) -> list[tuple[str, str]]:
        """Lines of the card that is shown before a run: what is trained, each with its name."""
        return []

    def configure_model(self) -> None:
        """Compile, then shard, where the run asks for it; a strategy wraps the module after that."""
        if self.compiled:
            compile_blocks(self.networks())
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            shard(self, strategy.device_mesh["data_parallel"], self.trainer.precision)

    def configure_optimizers(self) -> Any:
        return configure(
            self,
            lr=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            total_steps=total_steps(self.trainer),
            warmup_steps=self.warmup_steps,
            factors=self.rate_factors(),
            fused=self.may_fuse(),
        )

    def may_fuse(self) -> bool | None:
        """Whether the optimizer may be a fused one: None where the device decides, False under a loss scaler.

        A fused step unscales the gradients of 16-mixed by itself, after they would have been clipped as they are.
        """
        return False if self._has_scaler() else None

    def _has_scaler(self) -> bool:
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def rate_factors(self) -> Mapping[nn.Parameter, float]:
        """Factors on the learning rate of single parameters; empty for none."""
        return {}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients to `clip_norm`, and see to it that no step is taken if their norm is not finite.

        Raises NonFiniteError: on a CPU before this step has moved a weight, on a GPU one step later.
        """
        self.settle()
        norm, step = self.clipped_norm(), self.trainer.global_step
        unstepped, self._unstepped = self._unstepped, []
        if self._has_scaler():
            pass  # a loss scaler (16-mixed) meets infinities on purpose and skips the step by itself
        elif can_skip(optimizer, norm):
            self._late.take(optimizer, norm, step, unstepped)
        elif (value := float(norm)) - value != 0.0:
            raise NonFiniteError(describe(self, value, step, unstepped))
        if self._is_logged():
            rate = max(group["lr"] for group in optimizer.param_groups)
            self.log_dict({"train/grad_norm": norm, "train/lr": rate})

    def settle(self) -> None:
        """Wait until the last step is known to be finite, else raise NonFiniteError; done before anything is saved."""
        self._late.settle(self)

    def log(self, name: str, value: Any, *given: Any, **named: Any) -> None:
        """As Lightning's, but that a value of a single training step is left alone where no logger will see it.

        Lightning keeps every value of every step for whoever may ask, which costs more than the rest of its loop.
        """
        of_a_step = not given and not named.get("on_epoch") and self._current_fx_name == "training_step"
        if of_a_step and named.get("on_step", True) and not self._is_logged():
            return
        super().log(name, value, *given, **named)

    def _is_logged(self) -> bool:
        every = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        return (self.trainer.global_step + 1) % every == 0

    def clipped_norm(self) -> Tensor:
        """Clip to `clip_norm`, and return the norm () of all gradients before."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        limit = float("inf") if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def kept(self) -> tuple[str, ViTConfig] | None:
        """The prefix of the weights that are the outcome, and their configuration, so that a checkpoint opens as a
        ViT; None where that is no ViT.
        """
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (kept := self.kept()) is not None:
            checkpoint[TRAINED] = {**passport(kept[1]), "prefix": kept[0]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare names and shapes first: Lightning's own error is a page long."""
        saved, own = checkpoint["state_dict"], self.state_dict()
        for name in sorted(saved.keys() | own.keys()):
            there = tuple(saved[name].shape) if name in saved else "missing"
            here = tuple(own[name].shape) if name in own else "missing"
            if there != here:
                raise InputError(
                    f"the checkpoint is of another model: {name} is {there} in the checkpoint and {here} in "
                    "this run; resume with the settings it was started with"
                )
