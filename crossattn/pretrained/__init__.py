"""Public weights of question-answering models and text encoders, opened as `ImageQA`.

May import: `regard.vit`, the rest of `regard.crossattn`. Never the libraries that own the weights.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from torch import nn

from regard.crossattn.model import ImageQA
from regard.crossattn.pretrained import blip_names
from regard.crossattn.pretrained.blip import open_blip, read
from regard.crossattn.pretrained.compose import new_parts
from regard.vit.checkpoint import CONFIG
from regard.vit.errors import InputError


def opener(place: Path | nn.Module) -> Callable[..., ImageQA] | None:
    """What opens the file, folder or live module at `place`, told by its tensors; None where these are not BLIP's.

    It takes the name that the user gave, `place`, and the settings of `open_blip`.
    Raises InputError for a file, or a folder of a BLIP, that cannot be read, and for a module of another kind.
    """
    try:
        source = read(str(place) if isinstance(place, Path) else type(place).__name__, place)
    except InputError:
        if isinstance(place, Path) and place.is_dir() and not _says_blip(place / CONFIG):
            return None
        raise
    if blip_names.recognises(source):
        return functools.partial(open_blip, source=source)
    if isinstance(place, nn.Module):
        raise InputError(
            f"{source.where}: not a BlipForQuestionAnswering; Regard reads no other live module as ImageQA"
        )
    return None


def _says_blip(config: Path) -> bool:
    return config.is_file() and '"blip"' in config.read_text(encoding="utf-8", errors="replace")


__all__ = ["new_parts", "open_blip", "opener"]
