"""What the LightningModules of all tasks share: optimizer, clipping, and the refusal to step on a NaN.

Clipping happens in `configure_gradient_clipping` with torch's own function, because Lightning refuses to
clip for a fused AdamW under mixed precision (Lightning #21435). The same norm tells whether the step may be
taken, so one read-back per optimizer step is all that the check costs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from regard.train.optim import configure
from regard.train.steps import total_steps
from regard.vit.errors import InputError


class NonFiniteError(InputError):
    """The loss or its gradient is NaN or infinite; the optimizer step was not taken."""


class RegardModule(LightningModule):
    """A LightningModule whose steps are clipped and checked; `training_step` ends in
    `self.check_finite(loss, ids)`.

    `warmup_steps` are optimizer steps; the cosine after them ends with the run. `clip_norm` is the largest
    norm of all gradients together, None for no limit. Logs `train/lr` and `train/grad_norm` (before
    clipping) for each step that is logged.
    """

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
        self._unstepped: list[tuple[Tensor, Sequence[Any]]] = []

    def check_finite(self, loss: Tensor, sample_ids: Sequence[Any]) -> Tensor:
        """The loss () for Lightning to differentiate; remembers the samples it came from for the error
        message.

        A loss that is not finite makes every gradient NaN, so that after their all-reduce each rank sees it
        and all stop together. A finite loss is returned unchanged, bit for bit, and nothing waits for the
        device.
        """
        self._unstepped.append((loss.detach(), sample_ids))
        return loss * (1.0 + (loss - loss).detach())

    def configure_optimizers(self) -> Any:
        return configure(
            self,
            lr=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            total_steps=total_steps(self.trainer),
            warmup_steps=self.warmup_steps,
            factors=self.rate_factors(),
        )

    def rate_factors(self) -> Mapping[nn.Parameter, float]:
        """Factors on the learning rate of single parameters; empty for none."""
        return {}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients to `clip_norm`, or raise NonFiniteError before the optimizer has moved a
        weight.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        limit = float("inf") if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        value = float(norm)
        unstepped, self._unstepped = self._unstepped, []
        # A loss scaler (16-mixed) meets infinities on purpose and skips the step by itself.
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if has_scaler or value - value == 0.0:
            every = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
            if (self.trainer.global_step + 1) % every == 0:
                self.log_dict(
                    {"train/grad_norm": value, "train/lr": max(group["lr"] for group in optimizer.param_groups)}
                )
            return
        raise NonFiniteError(_describe(self, value, unstepped))

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


def _describe(module: LightningModule, norm: float, unstepped: list[tuple[Tensor, Sequence[Any]]]) -> str:
    bad = [(float(loss), ids) for loss, ids in unstepped if not bool(torch.isfinite(loss))]
    what = f"the loss is {bad[0][0]}" if bad else f"the loss is finite, the norm of its gradient is {norm}"
    ids = [str(sample) for _, some in (bad or [(0.0, ids) for _, ids in unstepped]) for sample in some]
    world = module.trainer.world_size
    if world > 1:
        reports: list[Any] = [None] * world
        torch.distributed.all_gather_object(reports, (bool(bad), what, ids))
        # Every rank is here, since all share the norm; the ranks whose own loss is bad name the samples.
        guilty = [report for report in reports if report[0]] or reports
        what, ids = guilty[0][1], [sample for report in guilty for sample in report[2]]
    shown = ", ".join(ids[:16]) + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")
    return (
        f"not a finite number at step {module.trainer.global_step}: {what} (samples {shown}); no weight was "
        "changed; look at these samples, or lower the learning rate"
    )
