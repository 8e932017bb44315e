from collections import Counter
from pathlib import Path

import pytest

from regard.datasets import (
    Question,
    QuestionedImage,
    QuestionSet,
    coverage,
    require_coverage,
    vocabulary,
)
from regard.vit.errors import InputError


def made(answers_per_image: list[list[tuple[str, ...]]], closed: tuple[str, ...] | None = None) -> QuestionSet:
    images = tuple(
        QuestionedImage(
            f"image-{i}",
            Path(f"{i}.png"),
            tuple(Question(f"{i}/{j}", f"question {i}.{j}?", answers) for j, answers in enumerate(asked)),
        )
        for i, asked in enumerate(answers_per_image)
    )
    return QuestionSet(images, "made", closed)


def ids(question_set: QuestionSet) -> list[str]:
    return [image.id for image in question_set.images]


def test_texts_counts_and_majorities():
    questions = made([[("a",), ("b", "c", "c")], [()], [("b", "a")]])
    assert questions.n_questions == 4
    assert questions.question_texts() == ["question 0.0?", "question 0.1?", "question 1.0?", "question 2.0?"]
    assert questions.answer_counts() == Counter({"a": 1, "c": 1, "b": 1})
    assert questions.images[1].questions[0].majority is None


def test_split_is_by_image_complete_and_repeatable():
    questions = made([[("a",), ("b",)] for _ in range(50)])
    rest, held_out = questions.split(0.2, seed=3)
    assert len(held_out.images) == 10
    assert held_out.n_questions == 20
    assert sorted(ids(rest) + ids(held_out)) == sorted(ids(questions))
    assert not set(ids(rest)) & set(ids(held_out))
    assert questions.split(0.2, seed=3) == (rest, held_out)
    assert ids(questions.split(0.2, seed=4)[1]) != ids(held_out)
    positions = [ids(questions).index(identity) for identity in ids(held_out)]
    assert positions == sorted(positions), "file order is kept"
    assert positions != list(range(10)), "the first images are no random part"


def test_split_does_not_depend_on_file_order():
    questions = made([[("a",)] for _ in range(50)])
    backwards = QuestionSet(questions.images[::-1], "made")
    assert set(ids(questions.split(0.3, seed=0)[1])) == set(ids(backwards.split(0.3, seed=0)[1]))


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2, 0.1, 0.9, float("nan")])
def test_a_split_with_an_empty_part_is_refused(fraction):
    with pytest.raises(InputError, match="holding out"):
        made([[("a",)], [("b",)]]).split(fraction, seed=0)


def test_subset_keeps_the_first_images_and_the_closed_list():
    questions = made([[("a",)], [("b",)], [("c",)]], closed=("c", "a"))
    assert ids(questions.subset(2)) == ["image-0", "image-1"]
    assert questions.subset(2).answers == ("c", "a")
    assert questions.subset(9) == questions
    with pytest.raises(InputError, match="at least 1"):
        questions.subset(0)


def test_repeated_ids_are_refused():
    image = made([[("a",)]]).images[0]
    with pytest.raises(InputError, match="image id 'image-0' occurs twice"):
        QuestionSet((image, image), "made")
    other = QuestionedImage("other", Path("o.png"), image.questions)
    with pytest.raises(InputError, match="question id '0/0' occurs twice"):
        QuestionSet((image, other), "made")


def test_vocabulary_is_the_closed_list_or_by_frequency_then_first_seen():
    asked = [[("rare",), ("b",), ("a",), ("a",), ("b",)]]
    assert vocabulary(made(asked)) == ("b", "a", "rare")
    assert vocabulary(made(asked), min_count=2) == ("b", "a")
    assert vocabulary(made(asked, closed=("z", "a"))) == ("z", "a")
    with pytest.raises(InputError, match="3 times or more"):
        vocabulary(made(asked), min_count=3)
    with pytest.raises(InputError, match="no answer is known"):
        vocabulary(made([[()]]))


def test_coverage_counts_what_the_list_can_reach():
    questions = made([[("a",), ("b", "x", "x"), ("y",), ("y",), ("z",), ()]])
    found = coverage(questions, ["a", "b"])
    assert (found.n_questions, found.n_covered) == (5, 2)
    assert found.fraction == 0.4
    assert found.missing == Counter({"y": 2, "z": 1})
    assert found.n_covered + found.missing.total() == found.n_questions, "nothing is dropped"


def test_too_little_coverage_names_the_commonest_missing_answers():
    questions = made([[("a",), ("y",), ("y",), ("z",)]])
    with pytest.raises(InputError, match=r"only 1 of 4 .* 'y' \(2\), 'z' \(1\)"):
        require_coverage(questions, ["a"])
    assert require_coverage(questions, ["a"], at_least=0.25).n_covered == 1
    with pytest.raises(InputError, match="no question has a known answer"):
        require_coverage(made([[()]]), ["a"], at_least=0)
