"""What became of a run that ended against its will, as one line that says how to go on."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from regard.vit.errors import InputError, reason

_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process")


def explained(error: BaseException, launched: list[Any], last: Path) -> InputError | None:
    """The InputError that stands for an error of Lightning or torch; None where the error speaks for itself.

    `launched` are the processes of other ranks that this one started, `last` the checkpoint of the run.
    """
    if isinstance(error, MisconfigurationException):
        return InputError(f"Lightning refuses these trainer settings: {reason(error)}")
    if not isinstance(error, RuntimeError):
        return None
    if refused(launched):
        return InputError("another process of this run stopped the training; its message stands above")
    how = f"{last} is whole: pass --resume to go on from it" if last.exists() else "nothing was saved yet: start again"
    if "DataLoader worker" in str(error):
        return InputError(
            f"a data worker ended by itself ({_signal(error)}), most often because the memory was full; {how}, with "
            "fewer --workers if it was"
        )
    if isinstance(error, torch.distributed.DistError) or any(sign in str(error).lower() for sign in _LOST):
        return InputError(f"another process of this run is gone, and the rest cannot go on without it; {how}")
    return None


def refused(processes: list[Any]) -> bool:
    """Whether one of the launched ranks ended with a user's mistake: then a collective broke here, not we."""
    until = time.monotonic() + 2
    while time.monotonic() < until and processes and all(process.poll() is None for process in processes):
        time.sleep(0.05)
    return any(process.poll() == 2 for process in processes)


def _signal(error: BaseException) -> str:
    text = reason(error)
    return text[text.find("killed by signal") :].rstrip(". ") if "killed by signal" in text else "exited unexpectedly"
