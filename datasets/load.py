"""From what a person types after `--data` to a question set."""

from pathlib import Path

from regard.datasets.easy_vqa import is_easy_vqa, load_easy_vqa
from regard.datasets.images import shown
from regard.datasets.questions import QuestionSet
from regard.datasets.rows import SUFFIXES
from regard.datasets.table import load_table
from regard.vit.errors import InputError
from regard.vit.files import typed_path


def load_questions(source: str | Path, split: str) -> QuestionSet:
    """Load one split of a question set.

    `source` is "easy-vqa" (the installed package), a folder in easy-VQA's format, a folder holding the table
    `{split}.jsonl`, `.json`, `.csv` or `.tsv`, or a table file, which is the whole set whatever the split.
    Raises InputError that lists what was looked for.
    """
    if source == "easy-vqa":
        return load_easy_vqa(split)
    path = typed_path(source)
    if path.is_file():
        return load_table(path)
    if not path.is_dir():
        raise InputError(f'{shown(path)}: no such file or folder; give a table, a folder of tables, or "easy-vqa"')
    if is_easy_vqa(path):
        return load_easy_vqa(split, path)
    names = [f"{split}{suffix}" for suffix in SUFFIXES]
    found = [name for name in names if (path / name).is_file()]
    if len(found) > 1:
        raise InputError(f"{shown(path)}: holds {' and '.join(found)}; give the one that is meant as a file")
    if not found:
        looked_for = ", ".join([*names, "answers.txt with train/questions.json or test/questions.json"])
        raise InputError(f"{shown(path)}: no questions for split {split!r} here; looked for {looked_for}")
    return load_table(path / found[0])
