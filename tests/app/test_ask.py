"""`regard ask`: candidates, decoders, and questions taken one by one."""

import json
from pathlib import Path

import pytest
import torch

import regard
from regard.crossattn import ImageQA

QUESTIONS = ["is it red?", "what color is it?", "what shape is in the image?"]
ANSWERS = ["yes", "no", "red", "dark blue"]


def small(head: str) -> ImageQA:
    torch.manual_seed(0)
    qa = ImageQA.preset(
        questions=QUESTIONS,
        answers=ANSWERS,
        head=head,
        vit=dict(image_size=(24, 40), patch_size=8, dim=32, depth=2, heads=4),
        text=dict(dim=32, depth=2, heads=4),
        decoder=None if head == "vocabulary" else dict(text=dict(dim=32, heads=4), beams=3, max_tokens=5),
    )
    with torch.no_grad():
        for parameter in qa.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return qa.eval()


@pytest.fixture(params=["vocabulary", "generate", "rank"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    small(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    small("generate").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_candidates_are_the_only_answers(regard_command, model, photo, tmp_path):
    given = ("--model", model, "--out", tmp_path / "a.png", "--candidates", "no, dark blue", "--json")
    told = json.loads(regard_command("ask", photo, *QUESTIONS, *given).out)
    for answer in told["answers"]:
        assert {entry["answer"] for entry in answer["top"]} == {"no", "dark blue"}
        assert sum(entry["probability"] for entry in answer["top"]) == pytest.approx(1, abs=1e-6)
        assert answer["meaning"] == "share among 2 candidates"


@pytest.mark.parametrize("candidates", ["", "yes,,no", "yes,yes", "yes, "])
def test_candidates_that_are_no_list_to_choose_from_are_one_line(regard_command, model, photo, candidates):
    ran = regard_command("ask", photo, "is it red?", "--model", model, "--candidates", candidates)
    assert ran.code == 2
    assert ran.err.startswith("regard: error: candidate")
    assert ran.err.count("\n") == 1


def test_a_written_answer_comes_with_maps_of_its_tokens(regard_command, writer, photo, tmp_path):
    out = tmp_path / "maps.png"
    told = json.loads(regard_command("ask", photo, "is it red?", "--model", writer, "--out", out, "--json").out)
    (answer,) = told["answers"]
    ended = answer["answer_tokens"][-1]["token"] == "[end]"
    assert answer["meaning"] == f"the decoder {'writes' if ended else 'begins with'} exactly this"
    for token in answer["answer_tokens"]:
        assert 0 < sum(token["words"].values()) <= 1
        assert len(token["map"]) == 3
        assert len(token["map"][0]) == 5
    assert out.stat().st_size > 1000


def test_without_questions_they_are_taken_until_an_empty_line(regard_command, model, photo, tmp_path):
    lines = "is it red?\nwhat color is it?\n\nis it asleep?\n"
    ran = regard_command("ask", photo, "--model", model, "--json", stdin=lines)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0
    assert [answer["question"] for answer in told] == ["is it red?", "what color is it?"]
    together = regard.ask(photo, [answer["question"] for answer in told], model=model, out=tmp_path / "a.png")
    for one, other in zip(told, together.answers, strict=True):
        assert one["answer"] == other.text
        assert one["probability"] == pytest.approx(other.probability, abs=1e-5)


def test_a_question_that_cannot_be_asked_ends_no_conversation(regard_command, writer, photo):
    ran = regard_command("ask", photo, "--model", writer, stdin="is " * 100 + "\nis it red?\n")
    assert ran.code == 0
    assert "reads at most" in ran.err
    assert ran.out.startswith("is it red?\n")
    assert "%" in ran.out


def test_a_conversation_without_a_question_is_told(regard_command, writer, photo):
    ran = regard_command("ask", photo, "--model", writer, stdin="")
    assert ran.code == 2
    assert "no question was given" in ran.err


def test_settings_of_a_decoder_are_refused_for_a_list(regard_command, photo, tmp_path):
    small("vocabulary").save_pretrained(tmp_path / "list")
    ran = regard_command("ask", photo, "is it red?", "--model", tmp_path / "list", "--beams", 4)
    assert ran.code == 2
    assert "settings of a decoder" in ran.err


@pytest.mark.parametrize("verb", ["ask", "look"])
def test_a_result_never_replaces_its_picture(regard_command, writer, photo, verb):
    before = photo.read_bytes()
    question = ["is it red?"] if verb == "ask" else []
    ran = regard_command(verb, photo, *question, "--model", writer, "--out", photo)
    assert ran.code == 2
    assert "would replace the picture" in ran.err
    assert photo.read_bytes() == before


def test_candidates_are_taken_as_typed(regard_command, model, photo, tmp_path):
    for typed in ("null", "# no", "[yes, no]"):
        ran = regard_command("ask", photo, "is it red?", "--model", model, "--candidates", typed)
        assert ran.code == 2, typed
        assert "answer" in ran.err or "vocabulary" in ran.err or "same tokens" in ran.err


def test_a_candidate_that_cannot_be_written_is_no_candidate(regard_command, writer, photo):
    ran = regard_command("ask", photo, "is it red?", "--model", writer, "--candidates", "yes,giraffe")
    assert ran.code == 2
    assert "giraffe" in ran.err


@pytest.mark.parametrize("lines", ["\n", "\nis it red?\n"])
def test_an_empty_first_line_ends_a_conversation(regard_command, writer, photo, lines):
    ran = regard_command("ask", photo, "--model", writer, stdin=lines)
    assert ran.code == 2
    assert "no question was given" in ran.err


def test_a_closed_standard_input_asks_nothing(regard_command, writer, photo):
    ran = regard_command("ask", photo, "--model", writer, stdin=None)
    assert ran.code == 2
    assert "no question was given" in ran.err


def test_a_program_is_told_which_question_failed(regard_command, writer, photo):
    ran = regard_command("ask", photo, "--model", writer, "--json", stdin="is " * 100 + "\n")
    assert ran.code == 2
    told = json.loads(ran.out)
    assert told["question"].startswith("is is")
    assert "reads at most" in told["error"]


def test_devices_are_written_to_and_not_replaced(regard_command, writer, photo):
    ImageQA.from_pretrained(writer).look(torch.rand(3, 24, 40)).save("/dev/null")
    assert Path("/dev/null").is_char_device()


def test_beams_have_a_limit(regard_command, writer, photo):
    ran = regard_command("ask", photo, "is it red?", "--model", writer, "--beams", 3_000_000)
    assert ran.code == 2
    assert "at most 1000" in ran.err


def test_a_second_picture_is_no_question(regard_command, writer, photo):
    ran = regard_command("ask", photo, photo, "is it red?", "--model", writer)
    assert ran.code == 2
    assert "is a file, not a question" in ran.err


def test_json_stays_json_where_a_candidate_was_not_ranked(regard_command, writer, photo, tmp_path):
    given = ("--candidates", "yes,no", "--shortlist", 1, "--out", tmp_path / "a.png", "--json")
    ran = regard_command("ask", photo, "is it red?", "--model", writer, *given)
    told = json.loads(ran.out, parse_constant=lambda name: pytest.fail(name))
    assert [entry["log_probability"] is None for entry in told["answers"][0]["top"]] == [False, True]
