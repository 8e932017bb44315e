import numpy as np
import pytest
import torch
from PIL import Image

from regard.crossattn import Answer
from regard.vit import InputError


@pytest.fixture(scope="module")
def qa(make_qa):
    return make_qa()


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def said(answers):
    return [a.question for a in answers]


def test_one_text_gives_one_answer(qa, picture):
    answer = qa.ask(qa.look(picture(0)), "Is it asleep?")
    assert isinstance(answer, Answer)
    assert answer.question == "Is it asleep?"


@pytest.mark.parametrize("kind", [list, tuple])
def test_many_questions_of_the_only_image(qa, picture, kind):
    memory = qa.look(picture(0))
    assert said(qa.ask(memory, kind(["Who?", "Is it?", "Who?"]))) == ["Who?", "Is it?", "Who?"]
    assert said(qa.ask(memory, kind(["Who?"]))) == ["Who?"]
    assert [said(g) for g in qa.ask(memory, kind([kind(["Who?", "Is it?"])]))] == [["Who?", "Is it?"]]


@pytest.mark.parametrize("kind", [list, tuple])
def test_questions_for_several_images(qa, picture, scores, kind):
    memory = qa.look([picture(0), picture(1)])
    flat = qa.ask(memory, kind(["Who?", "Is it?"]))
    nested = qa.ask(memory, kind([kind(["Who?"]), kind(["Is it?", "Who?"])]))
    assert said(flat) == ["Who?", "Is it?"]
    assert [said(group) for group in nested] == [["Who?"], ["Is it?", "Who?"]]
    torch.testing.assert_close(scores(flat[1]), scores(nested[1][0]), atol=1e-5, rtol=0)


def test_no_questions_give_no_answers_in_the_same_arrangement(qa, picture):
    assert qa.ask(qa.look(picture(0)), []) == []
    assert qa.ask(qa.look(picture(0)), ()) == []
    assert qa.ask(qa.look([picture(0), picture(1)]), [[], []]) == [[], []]
    assert [len(g) for g in qa.ask(qa.look([picture(0), picture(1)]), [[], ["Who?"]])] == [0, 1]


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ("Who?", "1 questions for 2 images"),
        ([], "0 questions for 2 images"),
        (["Who?"], "1 questions for 2 images"),
        (["Who?", "Is it?", "What?"], "3 questions for 2 images"),
        ([["Who?"]], "1 lists of questions for 2 images"),
        ([["Who?"], [], []], "3 lists of questions for 2 images"),
        (["Who?", ["Is it?"]], "mix strings and lists"),
        ([["Who?"], "Is it?"], "mix strings and lists"),
        (["Who?", None], "mix strings and lists"),
        ([["Who?"], None], "mix strings and lists"),
        ([["Who?"], [3]], "question 2 is no text"),
        ([["Who?"], [["Is it?"]]], "question 2 is no text"),
        (["Who?", ""], "question 2 is empty"),
        (None, "must be a text or a list, not NoneType"),
        (7, "must be a text or a list, not int"),
        ((q for q in ["Who?", "Is it?"]), "must be a text or a list, not generator"),
        (np.array(["Who?", "Is it?"]), "must be a text or a list, not ndarray"),
    ],
)
def test_questions_that_do_not_fit_the_images_are_refused(qa, picture, questions, message):
    with pytest.raises(InputError, match=message) as caught:
        qa.ask(qa.look([picture(0), picture(1)]), questions)
    assert "\n" not in str(caught.value)


def test_every_kind_of_picture_is_seen_alike(qa, pixels, scores):
    kinds = {
        "PIL": Image.fromarray(pixels),
        "array": pixels,
        "uint8 tensor": torch.from_numpy(pixels).permute(2, 0, 1),
        "float tensor": qa.preprocess(pixels)[0],
        "float batch": qa.preprocess(pixels),
        "uint8 batch": torch.from_numpy(pixels).permute(2, 0, 1)[None],
    }
    expected = scores(qa.ask(qa.look(Image.fromarray(pixels)), "Who?"))
    for kind, picture in kinds.items():
        memory = qa.look(picture)
        assert memory.grids == (((3, 5),),), kind
        assert torch.equal(scores(qa.ask(memory, "Who?")), expected), kind


def test_lists_batches_and_mixtures_of_pictures(qa, pixels, scores):
    other = np.ascontiguousarray(pixels[::-1])
    expected = [scores(qa.ask(qa.look(p), "Who?")) for p in (pixels, other)]
    assert not torch.allclose(*expected)
    for pictures in (
        [Image.fromarray(pixels), Image.fromarray(other)],
        (pixels, other),
        [Image.fromarray(pixels), qa.preprocess(other)[0]],
        qa.preprocess([pixels, other]),
    ):
        got = [scores(a) for a in qa.ask(qa.look(pictures), ["Who?", "Who?"])]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_double_precision_pictures_take_the_dtype_of_the_model(qa, picture, scores):
    double = scores(qa.ask(qa.look(picture(0).double()), "Who?"))
    assert torch.equal(double, scores(qa.ask(qa.look(picture(0)), "Who?")))


@pytest.mark.parametrize(
    "pictures",
    [
        [],
        torch.empty(0, 3, 24, 40),
        "photo.jpg",
        ["photo.jpg"],
        np.zeros((24, 40, 3), np.float32),
        np.zeros((2, 24, 40, 3), np.uint8),
        np.zeros((24, 40), np.uint8),
        torch.zeros(3, 24, 40, dtype=torch.long),
        torch.zeros(24, 40),
        torch.zeros(1, 24, 40),
        [torch.zeros(2, 3, 24, 40)],
        [[[np.zeros((24, 40, 3), np.uint8)]]],
        [[np.zeros((24, 40, 3), np.uint8), "photo.jpg"]],
    ],
    ids=str,
)
def test_what_is_no_picture_is_refused(qa, pictures):
    with pytest.raises(InputError) as caught:
        qa.look(pictures)
    assert "\n" not in str(caught.value)


def test_top_ranks_the_answers(qa, picture):
    memory = qa.look(picture(0))
    whole = qa.ask(memory, "Who?", top=99).top
    assert {text for text, _ in whole} == set(qa.config.answers)
    assert [p for _, p in whole] == sorted((p for _, p in whole), reverse=True)
    for top in (1, 2, 5):
        assert qa.ask(memory, "Who?", top=top).top == whole[:top]
    for top in (0, -1):
        with pytest.raises(InputError, match=f"top is {top}"):
            qa.ask(memory, "Who?", top=top)


def test_answers_can_be_compared(qa, picture):
    memory = qa.look([picture(0), picture(1)])
    assert qa.ask(memory[0], "Who?") == qa.ask(memory[0], "Who?")
    assert qa.ask(memory[0], "Who?") != qa.ask(memory[1], "Who?")
