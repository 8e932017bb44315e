"""Where an export is written: a folder or a file, whole or not at all, never over something else."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import save as to_safetensors
from torch import Tensor

from regard.vit import checkpoint
from regard.vit.errors import InputError
from regard.vit.files import write_atomically, write_folder


def folder(place: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], **more: Mapping[str, Any]) -> None:
    """A folder of `config.json`, `model.safetensors` and further `NAME.json`, whole or not at all.

    Raises InputError where the place holds something else, or a model that Regard saved.
    """
    place = place.resolve()
    contents = {f"{name}.json": content for name, content in {"config": config, **more}.items()}
    checkpoint.require_place(place, *contents)
    if checkpoint.is_ours(place):
        raise InputError(f"{place}: a model that Regard saved is there; choose another folder to export to")

    def as_json(content: Mapping[str, Any]) -> Callable[[Path], object]:
        text = json.dumps(content, indent=2) + "\n"
        return lambda file: write_atomically(file, lambda opened: opened.write(text.encode()))

    weights = to_safetensors(dict(tensors), metadata={"format": "pt"})
    write_folder(
        place,
        {
            **{name: as_json(content) for name, content in contents.items()},
            checkpoint.WEIGHTS: lambda file: write_atomically(file, lambda opened: opened.write(weights)),
        },
    )


def file(path: Path, layout: str, suffixes: tuple[str, ...], write: Callable[[BinaryIO], object]) -> None:
    """A file, whole or not at all. Raises InputError for a folder, or a name that does not end as it should."""
    check_file(path, layout, suffixes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


def check_file(path: Path, layout: str, suffixes: tuple[str, ...]) -> None:
    if path.is_dir() or path.suffix not in suffixes:
        raise InputError(f"{path}: {layout} writes one file; give it a name that ends in {' or '.join(suffixes)}")
