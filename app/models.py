"""Opening a model for a command: a folder, a run, a file of any library, a hub name or one of timm's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from regard.crossattn import ImageQA
from regard.vit import ViT, checkpoint
from regard.vit.errors import InputError, reason
from regard.vit.pretrained.files import locate

DEMO = "demo"


def open_qa(source: str | Path, device: str = "auto") -> ImageQA:
    """A trained `ImageQA` on a device. Raises InputError; for the default name it tells how to make one."""
    _tell_of_demo(source)
    place = locate(source)
    if _kind(place) != "ImageQAConfig":
        ViT.from_pretrained(place)  # what is no model at all is told as such
        raise InputError(
            f"{source}: a vision transformer alone, which has no text side to answer with; train one on it:"
            f" regard train answer --pretrained {source} --data ..."
        )
    return ImageQA.from_pretrained(place).to(choose_device(device))


def open_vit(source: str | Path, device: str = "auto", **settings: Any) -> ViT:
    """Any pretrained ViT, or the image side of a trained `ImageQA`, on a device.

    `settings` say what a file does not tell of itself, as `ViT.from_pretrained` takes them.
    """
    _tell_of_demo(source)
    place = locate(source)
    if _kind(place) == "ImageQAConfig" and not settings:
        vit = ImageQA.from_pretrained(place).vit
    else:
        vit = ViT.from_pretrained(place, **settings)
    if vit.report is not None and str(place) != str(source):
        vit.report = dataclasses.replace(vit.report, source=str(source))
    return vit.to(choose_device(device))


def choose_device(device: str) -> torch.device:
    """`auto` is a GPU where there is one. Raises InputError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # some devices exist by name only, and "meta" computes nothing
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used ({reason(error)}); choose auto, cpu or cuda") from error
    return chosen


def _tell_of_demo(source: str | Path) -> None:
    if str(source) == DEMO and not Path(source).exists():
        raise InputError("no model here yet: run `regard demo` first (it makes the folder 'demo'), or pass --model")


def _kind(place: Path) -> str | None:
    """The kind that a passport states; None for what another library wrote, which is a ViT if anything."""
    if not checkpoint.is_ours(place):
        return None
    return str(json.loads((place / checkpoint.CONFIG).read_text(encoding="utf-8"))["kind"])
