"""The card that is shown before a run: what is trained on what, and what that will take.

Its last line, the time, comes when the first steps have been timed. A task's result is the closing card: it says where
the model is, and the next command.
"""

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from regard.train.memory import MemoryEstimate, available
from regard.train.meter import GIB
from regard.train.progress import clock, say
from regard.train.steps import batches_per_epoch, epochs, steps_per_epoch, total_steps, train_batches

TIMED_BATCHES = 20
_WARM = 3  # batches that also fill caches, start workers and compile


class StartCard(Callback):
    """Prints `module.card()` and what follows from trainer and data, where the module has a card."""

    def __init__(self, memory: MemoryEstimate | None = None) -> None:
        self.memory = memory
        self._seen = 0
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = 0
        if trainer.is_global_zero and (lines := _card(pl_module)):
            print(laid_out([*lines, *self._lines(trainer, pl_module)]), file=sys.stderr, flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._seen == _WARM:
            self._began = time.monotonic()
        if self._seen == TIMED_BATCHES and trainer.is_global_zero and _card(pl_module):
            each = (time.monotonic() - self._began) / (TIMED_BATCHES - _WARM)
            left = (epochs(trainer) - trainer.current_epoch) * batches_per_epoch(trainer) - batch_idx - 1
            say(trainer, laid_out([("time", f"about {clock(each * left)} of training to go, validation apart")]))

    def _lines(self, trainer: Trainer, module: LightningModule) -> list[tuple[str, str]]:
        data, each = train_batches(trainer), trainer.accumulate_grad_batches
        sizes = [parameter.numel() for parameter in module.parameters()]
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        rest = sum(sizes) - trained
        flops = getattr(module, "picture_flops", lambda: None)()
        factors = f"{data.batch_size} x {data.world} device{'s' * (data.world > 1)}"
        factors += f" x {each} accumulated" if each > 1 else ""
        lines: list[tuple[str, str | None]] = [
            (
                "parameters",
                f"{trained:,} trained" + (f", {rest:,} kept or averaged" if rest else ""),
            ),
            ("cost", None if flops is None else f"{flops / 1e9:.3g} GFLOPs an image, forward and backward"),
            ("batch", f"{factors} = {data.batch_size * data.world * each} images a step"),
            ("precision", f"{trainer.precision} on {trainer.strategy.root_device.type}"),
            ("steps", f"{steps_per_epoch(trainer)} an epoch, {total_steps(trainer)} in {epochs(trainer)} epochs"),
            ("memory", None if self.memory is None else told(self.memory, trainer.strategy.root_device.type)),
        ]
        return [(name, text) for name, text in lines if text is not None]


def _card(module: Any) -> list[tuple[str, str]]:
    return module.card() if hasattr(module, "card") else []


def told(need: MemoryEstimate, accelerator: str) -> str:
    """The estimate, with a warning where that is more than there is."""
    there = available(accelerator)
    if there is None or need.total <= there[0]:
        return str(need)
    return f"{need}; warning: that is more than the {there[0] / GIB:.1f} GiB of {there[1]}"


def laid_out(lines: list[tuple[str, str]]) -> str:
    """Names in a column, texts beside them."""
    return "\n".join(f"{name:<12}{text}" for name, text in lines)
