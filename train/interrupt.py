"""Ctrl-C and SIGTERM: finish the step, save, say how to go on, leave with the exit code a scheduler
understands.

Lightning turns a Ctrl-C into `sys.exit(1)` in the middle of a step, ends with success after a SIGTERM
(Lightning #21623), and broadcasts a flag with a device synchronisation on every batch (Lightning #21487).
Here the ranks agree once in `AGREE_EVERY` optimizer steps, and not at all when there is one.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

AGREE_EVERY = 10
"""With several ranks, the optimizer steps from one agreement on a stop to the next."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 0.3


class Interrupted(BaseException):
    """A signal ended the training; `str()` is one line that says how to resume.

    Like KeyboardInterrupt it is no Exception, so that no `except Exception` on its way swallows it.
    `exit_code` is 130 after Ctrl-C and 143 after SIGTERM; on ranks other than 0 it is 0, because
    Lightning's launcher kills the whole run when a child process ends with anything else.
    """

    def __init__(self, signum: int, checkpoint: Path | None, *, at_once: bool, rank: int) -> None:
        self.signum, self.checkpoint, self.at_once = signum, checkpoint, at_once
        self.exit_code = 128 + signum if rank == 0 else 0
        cause = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        if checkpoint is None:
            how = "nothing was saved yet"
        elif at_once:
            how = f"pass --resume to go on from the last save, {checkpoint}"
        else:
            how = f"saved {checkpoint}; pass --resume to go on from here"
        super().__init__(f"stopped by {cause}: {how}")


class Interrupts:
    """While entered, notes the first SIGINT or SIGTERM and leaves it to the loop to stop at a good place.

    Before training starts, and at a second Ctrl-C, it raises `Interrupted` at once. Outside the main
    thread, where Python allows no handler, it does nothing. The handlers found on entry are back on exit.
    """

    def __init__(self) -> None:
        self.training, self.rank = False, 0
        self.checkpoint: Path | None = None
        self._received, self._received_at = 0, 0.0
        self._previous: dict[int, Any] = {}
        self._process = 0

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
            self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def install(self) -> None:
        """Take the signals (again: Lightning puts a handler of its own over ours before the first epoch)."""
        for number in self._previous:
            signal.signal(number, self._receive)

    def agreed(self, trainer: Any, *, now: bool) -> int:
        """The signal that some rank received, 0 if none: the same on all ranks.

        With several ranks this is a reduction, made where `now` or the number of optimizer steps says so.
        """
        if trainer.world_size == 1:
            return self._received
        if not now and trainer.global_step % AGREE_EVERY != 0:
            return 0
        flag = torch.tensor(self._received, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return int(flag.item())

    def interruption(self, signum: int, *, at_once: bool) -> Interrupted:
        """What to raise: after a save, or at once."""
        return Interrupted(signum, self.checkpoint, at_once=at_once, rank=self.rank)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _in_worker(signum)
        elif not self.training:
            raise self.interruption(signum, at_once=True)
        elif not self._received:
            self._received, self._received_at = signum, time.monotonic()
            if self.rank == 0:
                # print() is not safe in a handler that may interrupt another print().
                os.write(2, b"\nstopping after this step, or after the validation that follows it\n")
        elif signum == signal.SIGINT and time.monotonic() - self._received_at > _ECHO_S:
            # A wrapper may pass on a Ctrl-C that the terminal has delivered already; a second one comes later.
            raise self.interruption(signum, at_once=True)


def _in_worker(signum: int) -> None:
    # A data worker forked from us has our handler. A Ctrl-C goes to it too, but its batches are still wanted.
    if signum != signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def ignore_ctrl_c(worker: int) -> None:
    """`worker_init_fn` for a DataLoader: a worker outlives the Ctrl-C that lets its trainer finish the
    step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
