"""The libraries that the benchmarks compare with, from where `make` puts them."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

OWNERS = Path(sys.prefix) / "owners"

_KEPT: list[Any] = []


def peer(name: str) -> Any:
    """Import timm, torchvision or transformers; None where it is not installed.

    Beside a CPU build of torch, torchvision's compiled operators may not load; nothing that is compared needs them.
    """
    if str(OWNERS) not in sys.path:
        sys.path.append(str(OWNERS))
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for module in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # operators end with it
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
