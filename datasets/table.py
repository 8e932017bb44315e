"""The plain custom format: one row a question, as JSON lines, a JSON list, CSV, or Python rows.

Fields: `image` (a path), `question`, and `answer` (one) or `answers` (one per annotator: a list, or in CSV
text separated by `|`); `id` is optional. Paths are relative to the table's own folder.
"""

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.datasets.images import shown
from regard.datasets.questions import Question, QuestionedImage, QuestionSet
from regard.datasets.rows import Row, read_rows
from regard.vit.errors import InputError

FIELDS = ("image", "question", "answer", "answers", "id")


def load_table(source: str | Path | Sequence[Any], root: Path | None = None) -> QuestionSet:
    """Load a .jsonl, .json, .csv or .tsv file, or a list of (image, question, answer or answers) or of dicts.

    Image paths are relative to `root`: by default the table's folder, or the working folder for a list.
    Rows that share an image are grouped, in the order of its first row. Questions without an `id` are called
    `{file stem}/{row}`, counted from 0. Numbers as answers become text.
    Raises InputError naming file and line for a missing, empty, unknown or ill-typed field or a repeated id,
    and once for all image files that do not exist.
    """
    if isinstance(source, str | Path):
        file = Path(source)
        name, prefix = file.name, file.stem
        folder = file.parent if root is None else Path(root)
        rows = read_rows(file)
    else:
        name = prefix = "table"
        folder = Path(root or ".")
        rows = [_named_fields(row, f"rows[{index}]") for index, row in enumerate(source)]
    if not rows:
        raise InputError(f"{name} holds no questions")

    images: dict[str, tuple[str, str, list[Question]]] = {}  # by path: id, first row, questions
    first_with_id: dict[str, str] = {}
    for index, row in enumerate(rows):
        image, question = _question(row, f"{prefix}/{index}")
        if question.id in first_with_id:
            raise InputError(f"{row.where}: id {question.id!r} was already used in {first_with_id[question.id]}")
        first_with_id[question.id] = row.where
        path = os.path.abspath(folder / image)
        images.setdefault(path, (image, row.where, []))[2].append(question)
    _require_files(images)
    return QuestionSet(
        tuple(QuestionedImage(image, Path(path), tuple(asked)) for path, (image, _, asked) in images.items()),
        name,
    )


def _named_fields(row: Any, where: str) -> Row:
    if isinstance(row, Mapping):
        return Row(where, dict(row))
    if isinstance(row, Sequence) and not isinstance(row, str | bytes) and len(row) == 3:
        image, question, answer = row
        several = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
        return Row(where, {"image": image, "question": question, "answers" if several else "answer": answer})
    raise InputError(f"{where}: expected (image, question, answer or answers) or a dict of {', '.join(FIELDS)}")


def _question(row: Row, default_id: str) -> tuple[str, Question]:
    fields, where = row.fields, row.where
    for field in fields:
        if field in ("label", "split") and fields[field] is None:
            continue  # an empty cell of a table that serves for pictures too
        if field not in FIELDS:
            near = difflib.get_close_matches(str(field).strip().lower(), FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(FIELDS)}"
            raise InputError(f"{where}: unknown field {field!r}; {hint}")
    image = fields.get("image")
    if isinstance(image, os.PathLike):
        image = os.fspath(image)
    image = _text(image, "image", where)
    text = _text(fields.get("question"), "question", where).strip()
    identity = fields.get("id")
    if identity is None:
        identity = default_id
    return image, Question(_label(identity, "id", where), text, _answers(fields, where))


def _answers(fields: dict[str, Any], where: str) -> tuple[str, ...]:
    one, several = fields.get("answer"), fields.get("answers")
    if one is not None and several is not None:
        raise InputError(f"{where}: has both 'answer' and 'answers'; keep one")
    if several is None:
        return (_label(one, "answer", where),)
    if not isinstance(several, Iterable) or isinstance(several, str | bytes | Mapping):
        raise InputError(f"{where}: 'answers' must be a list, got {several!r}; a single one goes into 'answer'")
    answers = tuple(_label(answer, "answers", where) for answer in several)
    if not answers:
        raise InputError(f"{where}: 'answers' is empty")
    return answers


def _text(value: Any, field: str, where: str) -> str:
    if value is None:
        raise InputError(f"{where}: field {field!r} is missing")
    if not isinstance(value, str):
        raise InputError(f"{where}: {field!r} must be text, got {type(value).__name__}")
    if not value.strip():
        raise InputError(f"{where}: {field!r} is empty")
    return value


def _label(value: Any, field: str, where: str) -> str:
    if isinstance(value, bool):
        raise InputError(f'{where}: {field!r} is {str(value).lower()}; write it as text, such as "yes" or "no"')
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _text(value, field, where).strip()


def _require_files(images: dict[str, tuple[str, str, list[Question]]]) -> None:
    missing = [(path, where) for path, (_, where, _) in images.items() if not os.path.isfile(path)]
    if missing:
        path, where = missing[0]
        raise InputError(
            f"{where}: no image file {shown(path)} ({len(missing)} of {len(images)} images are missing); "
            "image paths are relative to the table's folder"
        )
