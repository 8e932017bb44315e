"""The tokenizer that lies beside the weights of a BERT or of what was made from one."""

import json
from pathlib import Path

from regard.crossattn.tokenizer import TextTokenizer
from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path
from regard.vit.pretrained import hub

FILES = ("tokenizer.json", "vocab.txt")
_CONFIG = "tokenizer_config.json"


def beside(name: str, place: Path) -> Path | None:
    """The tokenizer's file beside the weights at `place`, fetched where `name` is a hub's; None where there is none."""
    folder = place if place.is_dir() else place.parent
    if not any((folder / file).is_file() for file in FILES) and not typed_path(name).exists():
        hub.snapshot(name, hub.repository_of(name), [*FILES, _CONFIG])
    return next((folder / file for file in FILES if (folder / file).is_file()), None)


def opened(file: Path) -> TextTokenizer:
    """A tokenizer from its file.

    Raises InputError for a file that cannot be read, and for a bare list of a model that tells capitals apart.
    """
    told = file.parent / _CONFIG
    if file.name == "vocab.txt" and told.is_file():
        try:
            cased = json.loads(told.read_text(encoding="utf-8")).get("do_lower_case") is False
        except (ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"{told}: not a JSON object ({reason(error)})") from error
        if cased:
            raise InputError(
                f"{file}: of a model that tells capitals apart, and a bare list does not; add tokenizer.json"
            )
    return TextTokenizer.from_file(file)
