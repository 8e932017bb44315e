"""Opening a trained model for a command: a folder, a run, or a hub name."""

import json
from pathlib import Path

import torch

from regard.crossattn import ImageQA
from regard.vit import ViT, checkpoint
from regard.vit.errors import InputError, reason

DEMO = "demo"


def open_qa(source: str | Path, device: str = "auto") -> ImageQA:
    """A trained `ImageQA` on a device. Raises InputError; for the default name it tells how to make one."""
    _tell_of_demo(source)
    return ImageQA.from_pretrained(source).to(choose_device(device))


def open_vit(source: str | Path, device: str = "auto") -> ViT:
    """A trained `ViT`, or the image side of a trained `ImageQA`, on a device."""
    _tell_of_demo(source)
    folder = checkpoint.find(source)
    passport = folder / checkpoint.CONFIG
    is_qa = passport.is_file() and _kind(passport) == "ImageQAConfig"
    model = ImageQA.from_pretrained(folder).vit if is_qa else ViT.from_pretrained(folder)
    return model.to(choose_device(device))


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


def _kind(passport: Path) -> str:
    try:
        return str(json.loads(passport.read_text(encoding="utf-8")).get("kind"))
    except (ValueError, AttributeError, RecursionError):
        return "unreadable"  # the loader tells what is wrong with it
