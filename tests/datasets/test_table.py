import json
from pathlib import Path

import pytest
from PIL import Image

from regard.datasets import load_questions, load_table
from regard.vit.errors import InputError

GOOD = [
    {"image": "a.png", "question": "What animal?", "answer": "dog", "id": "q1"},
    {"image": "sub/b.png", "question": "How many?", "answers": ["2", "two", "2"]},
    {"image": "./a.png", "question": "Is it asleep?", "answer": "no"},
]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b.png"):
        Image.new("RGB", (9, 5)).save(tmp_path / name)
    return tmp_path


def json_lines(folder: Path, rows: list, name: str = "train.jsonl") -> Path:
    (folder / name).write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return folder / name


def csv_file(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    (folder / "train.csv").write_bytes(text.encode(encoding))
    return folder / "train.csv"


def content(question_set) -> list:
    return [(str(image.path), [(q.text, q.answers) for q in image.questions]) for image in question_set.images]


def test_every_format_reads_to_the_same_questions(folder):
    expected = [
        (str(folder / "a.png"), [("What animal?", ("dog",)), ("Is it asleep?", ("no",))]),
        (str(folder / "sub/b.png"), [("How many?", ("2", "two", "2"))]),
    ]
    (folder / "train.json").write_text(json.dumps(GOOD))
    tuples = [(r["image"], r["question"], r.get("answer") or r["answers"]) for r in GOOD]
    assert content(load_table(json_lines(folder, GOOD))) == expected
    assert content(load_table(folder / "train.json")) == expected
    assert content(load_table(GOOD, root=folder)) == expected
    assert content(load_table(tuples, root=folder)) == expected
    for delimiter in ",;\t":
        lines = [
            ["image", "question", "answer", "answers", "id"],
            ["a.png", "What animal?", "dog", "", "q1"],
            ["sub/b.png", "How many?", "", "2|two|2", ""],
            ["./a.png", "Is it asleep?", "no", "", ""],
        ]
        text = "\r\n".join(delimiter.join(cells) for cells in lines)
        for encoding in ("utf-8", "utf-8-sig"):
            assert content(load_table(csv_file(folder, text, encoding))) == expected


def test_ids_are_the_given_ones_or_name_file_and_row(folder):
    questions = load_table(json_lines(folder, GOOD))
    assert [q.id for image in questions.images for q in image.questions] == ["q1", "train/2", "train/1"]
    assert [image.id for image in questions.images] == ["a.png", "sub/b.png"]


def test_quoted_cells_hold_delimiters_and_line_breaks_and_lines_are_counted_right(folder):
    text = 'image,question,answer\na.png,"Red, or\nblue?",red\n\na.png,Which?,\n'
    with pytest.raises(InputError, match=r"train\.csv, line 5: 'answer' is empty"):
        load_table(csv_file(folder, text))
    text = text.replace("Which?,", "Which?,a|b")
    assert content(load_table(csv_file(folder, text)))[0][1] == [
        ("Red, or\nblue?", ("red",)),
        ("Which?", ("a|b",)),
    ]


def test_an_unusual_line_separator_inside_json_text_does_not_split_the_row(folder):
    path = folder / "train.jsonl"
    path.write_text('{"image": "a.png", "question": "one\u2028two?", "answer": "x"}\r\n', encoding="utf-8")
    assert load_table(path).question_texts() == ["one\u2028two?"]


def test_numbers_as_answers_become_text_and_truth_values_are_refused(folder):
    rows = [
        {"image": "a.png", "question": "?", "answer": 3},
        {"image": "a.png", "question": "?", "answers": [1.5, 2]},
    ]
    answers = [q.answers for q in load_table(rows, root=folder).images[0].questions]
    assert answers == [("3",), ("1.5", "2")]
    with pytest.raises(InputError, match=r"rows\[0\]: 'answer' is true; write it as text"):
        load_table([("a.png", "?", True)], root=folder)
    with pytest.raises(InputError, match="must be text, got float"):
        load_table([("a.png", "?", float("nan"))], root=folder)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "?", "answer": "x"}, "field 'image' is missing"),
        ({"image": "a.png", "answer": "x"}, "field 'question' is missing"),
        ({"image": "a.png", "question": "?"}, "field 'answer' is missing"),
        ({"image": "a.png", "question": " ", "answer": "x"}, "'question' is empty"),
        ({"image": "", "question": "?", "answer": "x"}, "'image' is empty"),
        ({"image": 3, "question": "?", "answer": "x"}, "'image' must be text, got int"),
        ({"image": "a.png", "question": "?", "answer": ""}, "'answer' is empty"),
        ({"image": "a.png", "question": "?", "answer": ["x"]}, "'answer' must be text, got list"),
        ({"image": "a.png", "question": "?", "answers": []}, "'answers' is empty"),
        ({"image": "a.png", "question": "?", "answers": ["x", ""]}, "'answers' is empty"),
        ({"image": "a.png", "question": "?", "answers": "x"}, "'answers' must be a list"),
        ({"image": "a.png", "question": "?", "answer": "x", "answers": ["x"]}, "both 'answer' and 'answers'"),
        (
            {"image": "a.png", "qestion": "?", "answer": "x"},
            "unknown field 'qestion'; did you mean 'question'",
        ),
        (
            {"image": "a.png", "question": "?", "answer": "x", "weight": 1},
            "unknown field 'weight'; known are image",
        ),
        ({"image": "a.png", "question": "?", "answer": "x", "id": "q1"}, "'q1' was already used in .*line 1"),
        ({"image": "a.png", "question": "?", "answer": "x", "id": True}, "'id' is true"),
        ("{not json", "not valid JSON"),
        ("[1, 2]", "expected an object with named fields, found list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(row, expected, folder):
    with pytest.raises(InputError, match=rf"train\.jsonl, line 2: .*{expected}") as caught:
        load_table(json_lines(folder, [GOOD[0], row, GOOD[1]]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image,question,answer\na.png,What, now?,x\n", r"line 2: 4 cells under a header of 3"),
        ("image,question,anser\na.png,?,x\n", r"line 2: unknown field 'anser'; did you mean 'answer'"),
        ("image,question,answer,\na.png,?,x,\n", r"line 1: column 4 has no name"),
        ("image,question,image\n", r"line 1: two columns are called 'image'"),
        ('image,question,answer\na.png,"open,x\n', r"line 2: not valid CSV"),
        ("image,question,answer,answers\na.png,?,,\n", r"line 2: 'answer' is empty"),
        ("image,question,answer\n", "holds no questions"),
        ("", "holds no questions"),
    ],
)
def test_a_bad_csv_is_named_by_file_and_line(text, expected, folder):
    with pytest.raises(InputError, match=rf"train\.csv.*{expected}"):
        load_table(csv_file(folder, text))


def test_text_that_is_not_utf_8_is_named_by_line(folder):
    with pytest.raises(InputError, match=r"train\.csv, line 2: not UTF-8"):
        load_table(csv_file(folder, "image,question,answer\na.png,où?,x\n", "latin-1"))
    with pytest.raises(InputError, match=r"train\.csv, line 1: not UTF-8"):
        load_table(csv_file(folder, "image,question,answer\n", "utf-16"))


def test_json_and_json_lines_mixed_up_say_so(folder):
    with pytest.raises(InputError, match=r"belongs in a \.jsonl file"):
        load_table(json_lines(folder, GOOD, "train.json"))
    with pytest.raises(InputError, match="expected a list of objects, found dict"):
        load_table(json_lines(folder, [{"questions": GOOD}], "train.json"))
    with pytest.raises(InputError, match=r"train\.json, row 2: field 'image' is missing"):
        load_table(json_lines(folder, [json.dumps([GOOD[0], {}])], "train.json"))


def test_missing_images_give_one_error_with_the_first_row_and_the_number(folder):
    rows = [GOOD[0], *({"image": f"{i}.png", "question": "?", "answer": "x"} for i in range(3))]
    with pytest.raises(InputError, match=r"line 2: no image file .*0\.png \(3 of 4 images are missing\)"):
        load_table(json_lines(folder, rows))
    assert load_table(json_lines(folder, rows[:1]), root=folder).n_questions == 1


@pytest.mark.parametrize("row", [("a.png", "?"), "a.png", 3, None, ("a.png", "?", "x", "y")])
def test_a_row_of_another_shape_is_refused(row, folder):
    with pytest.raises(InputError, match=r"rows\[1\]: expected \(image, question, answer or answers\)"):
        load_table([GOOD[0], row], root=folder)


def test_load_questions_finds_the_split_or_lists_what_it_looked_for(folder):
    json_lines(folder, GOOD)
    assert load_questions(str(folder), "train").name == "train.jsonl"
    assert load_questions(folder / "train.jsonl", "whatever").n_questions == 3
    with pytest.raises(InputError, match=r"looked for test\.jsonl, test\.json, test\.csv, test\.tsv, answers\.txt"):
        load_questions(folder, "test")
    (folder / "train.json").write_text(json.dumps(GOOD))
    with pytest.raises(InputError, match=r"holds train\.jsonl and train\.json"):
        load_questions(folder, "train")
    with pytest.raises(InputError, match="no such file or folder"):
        load_questions(folder / "nowhere", "train")
    with pytest.raises(InputError, match=r"not a table; its name must end in one of \.jsonl"):
        load_questions(folder / "a.png", "train")


def test_empty_label_and_split_cells_of_a_table_that_serves_for_pictures_too_are_passed_over(folder: Path) -> None:
    told = csv_file(folder, "image,question,answer,label,split\na.png,What?,red,,\n")
    assert len(load_table(told).images) == 1
    with pytest.raises(InputError, match="unknown field 'label'"):
        load_table(csv_file(folder, "image,question,answer,label\na.png,What?,red,x\n"))
