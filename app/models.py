"""Opening a model for a command: a folder, a run, a file of any library, a hub name or one of timm's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from regard.crossattn import ImageQA
from regard.crossattn.pretrained import opener
from regard.vit import ViT, checkpoint
from regard.vit.errors import InputError, reason
from regard.vit.pretrained.files import locate

DEMO = "demo"


def open_qa(source: str | Path, device: str = "auto", **settings: Any) -> ImageQA:
    """A trained `ImageQA`, or public weights of one, on a device.

    `settings` are those of public weights, as `ImageQA.from_pretrained` takes them.
    Raises InputError; for the default name it tells how to make one.
    """
    _tell_of_demo(source)
    place = locate(source)
    qa = _qa(source, place, **settings)
    if qa is None:
        ViT.from_pretrained(place)  # what is no model at all is told as such
        raise InputError(
            f"{source}: a vision transformer alone, which has no text side to answer with; train one on it:"
            f" regard train answer --pretrained {source} --data ..."
        )
    return qa.to(choose_device(device))


def open_vit(source: str | Path, device: str = "auto", **settings: Any) -> ViT:
    """Any pretrained ViT, or the image side of a trained `ImageQA`, on a device.

    `settings` say what a file does not tell of itself, as `ViT.from_pretrained` takes them.
    """
    _tell_of_demo(source)
    place = locate(source)
    qa = None if settings else _qa(source, place)
    vit = ViT.from_pretrained(place, **settings) if qa is None else qa.vit
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


def _qa(source: str | Path, place: Path, **settings: Any) -> ImageQA | None:
    """The question-answering model at `place`, ours or another library's; None for what is a ViT if anything."""
    if not checkpoint.is_ours(place):
        found = opener(place)
        return None if found is None else found(str(source), place, **settings)
    kind = json.loads((place / checkpoint.CONFIG).read_text(encoding="utf-8"))["kind"]
    return ImageQA.from_pretrained(place, **settings) if kind == "ImageQAConfig" else None
