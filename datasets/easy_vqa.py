"""easy-VQA: 64 x 64 pictures of one coloured shape, short questions, 13 answers.

Files: `answers.txt`, and for each split `questions.json` (a list of [question, answer, image id]) with
`images/{id}.png`. Image ids restart at 0 in each split. The `easy-vqa` package ships them.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from regard.datasets.questions import Question, QuestionedImage, QuestionSet
from regard.vit.errors import InputError

SPLITS = ("train", "test")


def load_easy_vqa(split: str, root: Path | None = None) -> QuestionSet:
    """Load split "train" or "test" from `root`, or from the installed `easy-vqa` package (never imported).

    `root` is a folder in the package's format, or one whose `data` folder is.
    Raises InputError naming the file or row when something is missing or malformed.
    """
    if split not in SPLITS:
        raise InputError(f"easy-VQA has no split {split!r}; choose one of {', '.join(SPLITS)}")
    root = _package_data() if root is None else _data_folder(Path(root))
    file = root / split / "questions.json"
    folder = root / split / "images"
    questions: dict[int, list[Question]] = {}
    for index, row in enumerate(_rows(file)):
        text, answer, image_id = _checked(row, f"{file}, row {index} (counted from 0)")
        questions.setdefault(image_id, []).append(Question(f"{split}/{index}", text, (answer,)))
    _require_images(folder, questions)
    images = tuple(
        QuestionedImage(f"{split}/{image_id}", folder / f"{image_id}.png", tuple(asked))
        for image_id, asked in questions.items()
    )
    return QuestionSet(images, f"easy-vqa/{split}", _closed_list(root / "answers.txt"))


def is_easy_vqa(folder: Path) -> bool:
    """Tell whether `folder`, or its `data` folder, holds answers.txt beside a split's questions.json."""
    return any(
        (root / "answers.txt").is_file() and any((root / split / "questions.json").is_file() for split in SPLITS)
        for root in (folder, folder / "data")
    )


def _package_data() -> Path:
    try:
        spec = importlib.util.find_spec("easy_vqa")
    except ValueError:  # a module of that name without a spec
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        if (Path(place) / "data" / "answers.txt").is_file():
            return Path(place) / "data"
    problem = "holds no data" if places else "is not installed"
    raise InputError(f'the easy-vqa package {problem}: pip install "regard[demo]", or pass --data FOLDER')


def _data_folder(root: Path) -> Path:
    root = Path(os.path.abspath(root))
    for folder in (root, root / "data"):
        if (folder / "answers.txt").is_file():
            return folder
    raise InputError(f"{root}: no easy-VQA data here; looked for answers.txt and data/answers.txt")


def _closed_list(file: Path) -> tuple[str, ...]:
    answers = tuple(line.strip() for line in _text(file).splitlines() if line.strip())
    if not answers:
        raise InputError(f"{file} lists no answers; one a line is expected")
    repeated = next((answer for answer in answers if answers.count(answer) > 1), None)
    if repeated is not None:
        raise InputError(f"{file} lists the answer {repeated!r} twice")
    return answers


def _rows(file: Path) -> list[Any]:
    try:
        rows = json.loads(_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{file}: expected a list of [question, answer, image id], one or more")
    return rows


def _checked(row: Any, where: str) -> tuple[str, str, int]:
    match row:
        case [str(text), str(answer), int(image_id)] if not isinstance(image_id, bool):
            if text.strip() and answer.strip():
                return text, answer, image_id
    raise InputError(f"{where}: expected [question, answer, image id], got {json.dumps(row)[:80]}")


def _require_images(folder: Path, image_ids: dict[int, list[Question]]) -> None:
    try:
        present = set(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder}: the images folder cannot be read ({error.strerror})") from error
    missing = [image_id for image_id in image_ids if f"{image_id}.png" not in present]
    if missing:
        raise InputError(f"{folder / f'{missing[0]}.png'} is missing ({len(missing)} of {len(image_ids)} images are)")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
