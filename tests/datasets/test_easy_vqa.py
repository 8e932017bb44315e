import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from regard.datasets import load_easy_vqa, load_questions, open_image
from regard.vit.errors import InputError

INSTALLED = importlib.util.find_spec("easy_vqa") is not None
ROWS = [["what shape?", "circle", 5], ["is it red?", "yes", 0], ["is it a circle?", "yes", 5]]


def write(
    root: Path, rows: object = ROWS, answers: str = "yes\ncircle\nno\n", images: tuple[int, ...] = (0, 5)
) -> Path:
    for split in ("train", "test"):
        (root / split / "images").mkdir(parents=True)
        text = rows if isinstance(rows, str) else json.dumps(rows)
        (root / split / "questions.json").write_text(text, encoding="utf-8")
        for image in images:
            Image.new("RGB", (9, 5)).save(root / split / "images" / f"{image}.png")
    (root / "answers.txt").write_text(answers, encoding="utf-8")
    return root


def test_questions_are_grouped_by_image_and_ids_name_split_and_row(tmp_path):
    questions = load_easy_vqa("test", write(tmp_path))
    assert questions.answers == ("yes", "circle", "no"), "the file's order"
    assert [image.id for image in questions.images] == ["test/5", "test/0"]
    assert [q.id for q in questions.images[0].questions] == ["test/0", "test/2"]
    assert questions.images[0].questions[1].answers == ("yes",)
    assert open_image(questions.images[0].path).size == (9, 5)


def test_a_parent_of_the_data_folder_is_found_too(tmp_path):
    write(tmp_path / "data")
    assert load_easy_vqa("train", tmp_path).images == load_easy_vqa("train", tmp_path / "data").images
    assert load_questions(tmp_path, "train").n_questions == 3


@pytest.mark.parametrize(
    "row",
    [
        ["q", "a"],
        ["q", "a", "0"],
        ["q", "a", True],
        ["", "a", 0],
        ["q", " ", 0],
        {"question": "q"},
        None,
        "q a 0",
    ],
)
def test_a_malformed_row_is_named(row, tmp_path):
    with pytest.raises(InputError, match=r"questions\.json, row 1 \(counted from 0\): expected"):
        load_easy_vqa("train", write(tmp_path, rows=[ROWS[0], row]))


@pytest.mark.parametrize(("rows", "expected"), [("[[", "not valid JSON"), ("[]", "one or more"), ("{}", "one or more")])
def test_a_malformed_file_is_named(rows, expected, tmp_path):
    with pytest.raises(InputError, match=rf"train/questions\.json.*{expected}"):
        load_easy_vqa("train", write(tmp_path, rows=rows))


def test_missing_images_files_and_splits_are_named(tmp_path):
    write(tmp_path / "a", images=(5,))
    with pytest.raises(InputError, match=r"images/0\.png is missing \(1 of 2"):
        load_easy_vqa("train", tmp_path / "a")
    write(tmp_path / "b")
    (tmp_path / "b" / "test" / "questions.json").unlink()
    with pytest.raises(InputError, match=r"test/questions\.json cannot be read"):
        load_easy_vqa("test", tmp_path / "b")
    with pytest.raises(InputError, match="no split 'val'"):
        load_easy_vqa("val", tmp_path / "b")
    with pytest.raises(InputError, match=r"looked for answers\.txt"):
        load_easy_vqa("train", tmp_path / "nowhere")


@pytest.mark.parametrize(("answers", "expected"), [("", "lists no answers"), ("a\nb\na\n", "'a' twice")])
def test_a_bad_answer_list_is_named(answers, expected, tmp_path):
    with pytest.raises(InputError, match=expected):
        load_easy_vqa("train", write(tmp_path, answers=answers))


def test_without_the_package_the_message_says_how_to_get_the_data(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r'pip install "regard\[demo\]", or pass --data FOLDER'):
        load_easy_vqa("train")


@pytest.mark.skipif(not INSTALLED, reason="needs the easy-vqa package")
def test_the_packaged_set_is_whole_and_its_code_is_never_imported():
    code = (
        "import sys; from regard.datasets import load_questions\n"
        "train, test = load_questions('easy-vqa', 'train'), load_questions('easy-vqa', 'test')\n"
        "print(train.n_questions, len(train.images), test.n_questions, len(test.images), len(test.answers),"
        " test.answer_counts()['yes'] + test.answer_counts()['no'], 'easy_vqa' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["38575", "4000", "9673", "1000", "13", "7136", "False"]
