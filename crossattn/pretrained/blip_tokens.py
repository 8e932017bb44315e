"""The tokenizer of BLIP: BERT's pieces, and two more that begin questions and answers."""

from collections.abc import Mapping
from pathlib import Path

from regard.crossattn.pretrained import vocabularies
from regard.crossattn.tokenizer import ANSWER, FIRST, QUESTION, TextTokenizer
from regard.vit.errors import InputError
from regard.vit.files import typed_path

_ENDS = [ANSWER, QUESTION]  # in the order of their ids, the last two; no file of the hub holds them


def blip_tokenizer(
    where: str, place: Path | None, given: str | Path | Mapping[str, int] | None, rows: int, *, original: bool
) -> TextTokenizer:
    """The tokenizer for a table of `rows` words.

    Args:
        where: the weights, for messages.
        place: the folder in which the tokenizer lies; None for a live module.
        given: a `tokenizer.json`, a `vocab.txt`, a folder that holds one, or a mapping of pieces to ids, which win.
        original: begin questions with [ENC] and clean them up, as the authors do; transformers does neither.

    Raises InputError where there is none, and where it has not as many pieces as the table has rows.
    """
    if isinstance(given, Mapping):
        pieces, called = _in_order(where, given), "tokenizer="
    else:
        file = _file(where, place if given is None else typed_path(given))
        pieces, called = _pieces(file), str(file)
    if len(pieces) + len(_ENDS) == rows and not set(_ENDS) & set(pieces):
        pieces += _ENDS
    if len(pieces) != rows or not set(_ENDS) <= set(pieces):
        raise InputError(
            f"{where}: the table of words has {rows} rows; {called} has {len(pieces)} pieces where"
            f" {rows - len(_ENDS)} and {' and '.join(_ENDS)} are needed; pass the tokenizer= of these weights"
        )
    try:
        return TextTokenizer.from_pieces(pieces, first=QUESTION if original else FIRST, clean_up=original)
    except InputError as error:
        raise InputError(f"{called}: {error}") from error


def _file(where: str, place: Path | None) -> Path:
    if place is None:
        raise InputError(f"{where}: a module holds no tokenizer; pass tokenizer= with a BERT vocab.txt or its pieces")
    if not place.is_dir():
        return place
    found = vocabularies.beside(str(place), place)
    if found is None:
        raise InputError(
            f"{where}: neither {' nor '.join(vocabularies.FILES)} lies in {place}; put the vocab.txt of"
            " bert-base-uncased there, or pass tokenizer= with its path"
        )
    return found


def _pieces(file: Path) -> list[str]:
    opened = vocabularies.opened(file)
    if opened.answers(["A"]) != opened.answers(["a"]):
        raise InputError(f"{file}: of a model that tells capitals apart; BLIP reads the words of bert-base-uncased")
    return opened.pieces(range(len(opened)))


def _in_order(where: str, pieces: Mapping[str, int]) -> list[str]:
    if sorted(pieces.values()) != list(range(len(pieces))):
        raise InputError(f"{where}: tokenizer= must map pieces to the ids 0 to {len(pieces) - 1}")
    return sorted(pieces, key=lambda piece: pieces[piece])
