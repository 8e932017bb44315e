"""Rows with named fields out of JSON lines, JSON and CSV files, each knowing the line it came from."""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.datasets.images import shown
from regard.vit.errors import InputError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
_HEADER_NAMES = {
    *("image", "question", "answer", "answers", "id"),
    *("path", "file", "file_name", "filename", "label", "class", "category", "split"),
}


@dataclass(frozen=True)
class Row:
    """The fields of one row, and `where` it stands, for messages."""

    where: str
    fields: dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """Read every row of a file whose suffix is one of `SUFFIXES`.

    CSV has a header line; its delimiter is `;`, tab or `,`; empty cells of `id`, `answer` and `answers` are absent
    fields, those of `label` and `split` are None, `answers` is split at `|`. Text is UTF-8, with or without a byte
    order mark.
    Raises InputError naming file and line for whatever cannot be read as rows.
    """
    read = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv, ".tsv": _csv}.get(file.suffix.lower())
    if read is None:
        raise InputError(f"{shown(file)}: not a table; its name must end in one of {', '.join(SUFFIXES)}")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{shown(file)}: no such file") from error
    except OSError as error:
        raise InputError(f"{shown(file)}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{shown(file)}, line {line}: not UTF-8 text; save the table as UTF-8") from error
    return read(text, shown(file))


def _json_lines(text: str, name: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also break inside a string
        if line.strip():
            where = f"{name}, line {number}"
            rows.append(_object(_json(line, where, "one JSON object a line is expected"), where))
    return rows


def _json_list(text: str, name: str) -> list[Row]:
    values = _json(text, name, "a list of objects is expected; one object a line belongs in a .jsonl file")
    if not isinstance(values, list):
        raise InputError(f"{name}: expected a list of objects, found {type(values).__name__}")
    return [_object(value, f"{name}, row {number}") for number, value in enumerate(values, 1)]


def _json(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of too many digits
        raise InputError(f"{where}: not valid JSON ({error}); {expected}") from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object with named fields, found {type(value).__name__}")
    return Row(where, value)


def _csv(text: str, name: str) -> list[Row]:
    header_line = next((line for line in text.splitlines() if line.strip()), "")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(header_line), strict=True)
    header: list[str] | None = None
    rows = []
    line = 1
    try:
        for cells in reader:
            where, line = f"{name}, line {line}", reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = _header(cells, where)
            elif len(cells) != len(header):
                raise InputError(
                    f"{where}: {len(cells)} cells under a header of {len(header)}; "
                    "quote a cell that holds the delimiter"
                )
            else:
                rows.append(Row(where, _fields(header, cells)))
    except csv.Error as error:
        raise InputError(f"{name}, line {line}: not valid CSV ({error})") from error
    return rows


def _delimiter(header_line: str) -> str:
    def recognised(delimiter: str) -> int:
        names = {name.strip().strip('"') for name in header_line.split(delimiter)}
        return len(names & _HEADER_NAMES)

    return max(",;\t", key=recognised)


def _header(cells: list[str], where: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    for column, field in enumerate(header, 1):
        if not field:
            raise InputError(f"{where}: column {column} has no name; name it or remove it")
        if header.count(field) > 1:
            raise InputError(f"{where}: two columns are called {field!r}")
    return header


def _fields(header: list[str], cells: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(zip(header, cells, strict=True))
    for field, other in (("id", None), ("answers", "answer"), ("answer", "answers")):
        if (other is None or other in fields) and not fields.get(field, "").strip():
            fields.pop(field, None)  # an empty cell is an absent field where the row can do without it
    for field in ("label", "split"):
        if field in fields and not fields[field].strip():
            fields[field] = None  # not absent: that the column is there tells a forgotten cell from a missing column
    if "answers" in fields:
        fields["answers"] = fields["answers"].split("|")
    return fields
