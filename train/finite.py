"""The refusal to step on a number that is not finite, and when it is found out.

On a CPU the norm of the gradients is looked at before every step. On a GPU that would keep the host waiting for the
device at every step: there the device itself skips the step, and all after it, and the host reads the norm of a step
when the next is on its way. What moved beside the weights meanwhile, an average or a centre, is not saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from regard.vit.errors import InputError

Unstepped = list[tuple[Tensor, Sequence[Any]]]
"""The loss of each accumulated batch, and the names of its samples."""


class NonFiniteError(InputError):
    """The loss or its gradient is NaN or infinite; the optimizer step was not taken.

    `late` where that was found out a step later, so that the state beside the weights is not that of the last good one.
    """

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


def can_skip(optimizer: Any, norm: Tensor) -> bool:
    """Whether the device can leave out a step by itself: a fused AdamW with whole weights."""
    groups = optimizer.param_groups
    whole = not any(hasattr(parameter, "full_tensor") for group in groups for parameter in group["params"])
    return norm.is_cuda and whole and isinstance(optimizer, torch.optim.AdamW) and all(g.get("fused") for g in groups)


class LateNorm:
    """The norm of the last step, on its way to the host."""

    def __init__(self) -> None:
        self._bad: Tensor | None = None
        self._pending: tuple[Tensor, Any, int, Unstepped] | None = None

    def take(self, optimizer: Any, norm: Tensor, step: int, unstepped: Unstepped) -> None:
        """Have `optimizer` skip this step, and every later one, if `norm ()` is not finite; nothing waits."""
        bad = (~torch.isfinite(norm)).float()
        self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
        optimizer.found_inf = self._bad
        copy = torch.empty((), dtype=norm.dtype, pin_memory=norm.is_cuda)
        copy.copy_(norm, non_blocking=True)
        event = None
        if norm.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending = (copy, event, step, unstepped)

    def settle(self, module: LightningModule) -> None:
        """Wait for the norm of the last step, if there is one, and raise NonFiniteError if it is not finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        copy, event, step, unstepped = pending
        if event is not None:
            event.synchronize()
        value = float(copy)
        if value - value != 0.0:
            raise NonFiniteError(describe(module, value, step, unstepped, late=True), late=True)


def describe(module: LightningModule, norm: float, step: int, unstepped: Unstepped, late: bool = False) -> str:
    """What is not finite, at which optimizer step, and in which samples of all ranks, which call this together."""
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
    kept = "the last checkpoint is from before it" if late else "no weight was changed"
    return (
        f"not a finite number at step {step}: {what} (samples {shown}); {kept}; look at these samples, or lower the "
        "learning rate"
    )
