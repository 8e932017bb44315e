"""The precision that a run computes in."""

from typing import Any

import torch


def precision_of(arguments: dict[str, Any]) -> str:
    """The precision of a run with these arguments of the Trainer: as asked for, else what suits the device."""
    if arguments.get("precision") is not None:
        return str(arguments["precision"])
    accelerator = arguments.get("accelerator", "auto")
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
