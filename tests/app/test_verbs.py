"""Each verb does its job, tells it in words and as JSON, and the Python function is the same thing."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.crossattn import ImageQA
from regard.vit import ViT, attention_rows

Command = Callable[..., "object"]


def test_ask_tells_answer_probability_runners_up_and_a_map_per_word(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "maps.png"
    ran = regard_command(
        "ask", photo, "is there a red shape?", "what color is the dog?", "--model", trained, "--out", out, "--json"
    )
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    first, second = told["answers"]
    assert len(first["top"]) == 5
    assert (first["top"][0]["answer"], first["top"][0]["probability"]) == (first["answer"], first["probability"])
    assert first["meaning"] == "share among the model's 13 answers"
    assert [w["word"] for w in first["words"]] == ["is", "there", "a", "red", "shape", "?"]
    for word in first["words"]:
        heat = np.array(word["map"])
        assert heat.shape == (8, 8)
        assert (heat >= 0).all()
        assert heat.sum() == pytest.approx(word["mass"]["patches"], abs=1e-5)
        assert sum(word["mass"].values()) == pytest.approx(1, abs=1e-5)
    assert second["unknown_words"] == ["dog"]
    assert told["picture"] == str(out)
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 6 * 100


def test_ask_in_words_warns_of_words_the_model_never_saw(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = regard_command("ask", photo, "what color is the dog?", "--model", trained)
    assert ran.code == 0
    assert "unknown to this model: dog; do not trust this answer" in ran.out
    assert "%" in ran.out
    assert Path("photo-ask.png").is_file()


def test_the_function_and_the_command_say_the_same(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path
) -> None:
    called = regard.ask(photo, "is there a red shape?", model=str(trained), out=tmp_path / "a.png")
    ran = regard_command(
        "ask", photo, "is there a red shape?", "--model", trained, "--out", tmp_path / "a.png", "--json"
    )
    assert json.loads(ran.out) == json.loads(json.dumps(called.as_dict()))


def test_look_draws_every_head_of_the_models_own_vit(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path
) -> None:
    ran = regard_command("look", photo, "--model", trained, "--out", tmp_path / "heads.png", "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    vit = ImageQA.from_pretrained(trained).vit
    assert told["layer"] == vit.config.depth - 1
    assert len(told["heads"]) == vit.config.heads
    rows = attention_rows(vit, vit.preprocess(Image.open(photo)))
    for head, expected in zip(told["heads"], rows.patches[0, 0, :, 0], strict=True):
        torch.testing.assert_close(torch.tensor(head["map"]), expected, atol=1e-6, rtol=1e-5)
        assert np.sum(head["map"]) + head["cls"] + sum(head["registers"]) == pytest.approx(1, abs=1e-5)


def test_look_takes_a_vit_of_any_shape_too(regard_command: Command, photo: Path, tmp_path: Path) -> None:
    vit = ViT.preset("tiny", depth=2, patch_size=8, image_size=(32, 48), registers=3)
    vit.save_pretrained(tmp_path / "vit")
    ran = regard_command(
        "look", photo, "--model", tmp_path / "vit", "--layer", 0, "--out", tmp_path / "x.png", "--json"
    )
    told = json.loads(ran.out)
    assert np.array(told["heads"][0]["map"]).shape == (4, 6)
    assert len(told["heads"][0]["registers"]) == 3
    assert told["layer"] == 0


def test_the_colours_of_a_map_lie_where_its_peak_is(tmp_path: Path) -> None:
    """The brightest panel pixel of a map with one hot patch, on a picture of another aspect than the grid."""
    from regard.pictures.colours import overlay
    from regard.pictures.sheet import Group, Panel, draw, save
    from regard.vit.maps.grid import Frame

    heat = torch.full((2, 4), 0.01)
    heat[1, 3] = 0.93
    picture = Image.new("RGB", (400, 100), "black")
    frame = Frame((100, 400), (16, 32), (2, 4), (0, 0, 100, 400))
    sheet = draw([Group("x", [Panel("picture", picture), Panel("map", overlay(picture, heat, frame, 0.93))])])
    save(sheet, tmp_path / "peak.png")
    pixels = np.asarray(Image.open(tmp_path / "peak.png").convert("RGB")).astype(int)
    left, top, right, bottom = sheet.boxes[0][1]
    inside = pixels[top:bottom, left:right]
    row, column = np.unravel_index(inside.sum(axis=-1).argmax(), inside.shape[:2])
    assert row >= inside.shape[0] // 2
    assert column >= inside.shape[1] * 3 // 4


def test_evaluate_counts_every_question_and_reports_both_kinds(
    regard_command: Command, trained: Path, squares: Path
) -> None:
    ran = regard_command("evaluate", "answer", "--model", trained, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["n_questions"], told["n_images"], told["out_of_vocabulary"]) == (9673, 1000, 0)
    assert told["accuracy"] == pytest.approx(told["n_correct"] / 9673)
    right = told["yes_no"] * 7136 + told["other"] * (9673 - 7136)
    assert right == pytest.approx(told["n_correct"])
    ran = regard_command("evaluate", "answer", "--model", trained, "--data", squares / "train.jsonl", "--json")
    assert json.loads(ran.out)["n_questions"] == 72


def test_evaluate_refuses_a_set_that_no_answer_fits(regard_command: Command, trained: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "test.csv").write_text("image,question,answer\na.png,is it red?,perhaps\n")
    ran = regard_command("evaluate", "answer", "--model", trained, "--data", tmp_path)
    assert ran.code == 2
    assert "only 0 of 1 questions" in ran.err


def test_doctor_tells_versions_devices_and_extras(regard_command: Command) -> None:
    ran = regard_command("doctor", "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert told["packages"]["torch"] == torch.__version__
    assert told["missing"] == []
    assert told["devices"][-1].startswith("cpu")
    assert set(told["extras"]) == {"demo", "export", "test", "lint"}
    assert f"regard {regard.__version__}" in regard_command("doctor").out


def test_the_demo_trains_scores_asks_and_names_the_next_command(
    regard_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.train.answer import train_answer
    from regard.verbs import demo as verb

    shorter = {"limit_train_batches": 2, "limit_val_batches": 1}
    monkeypatch.setattr(verb, "train_answer", functools.partial(train_answer, trainer=shorter, epochs=1))
    ran = regard_command("demo", "--out", tmp_path / "demo")
    assert ran.code == 0, ran.err
    assert ran.err.count("epoch 1/1") == 1
    assert "of 9673 questions right" in ran.out
    assert f"maps: {tmp_path}/demo/maps.png" in ran.out
    assert (tmp_path / "demo" / "maps.png").is_file()
    (following,) = [line.strip() for line in ran.out.splitlines() if line.strip().startswith("regard ask")]
    assert f"--model {tmp_path}/demo" in following
    monkeypatch.setattr(verb, "train_answer", lambda *a, **k: pytest.fail("a finished demo is trained again"))
    again = regard_command("demo", "--out", tmp_path / "demo", "--json")
    assert json.loads(again.out)["score"]["n_questions"] == 9673


@pytest.mark.parametrize(
    "verb", [[], ["ask"], ["look"], ["train", "answer"], ["evaluate", "answer"], ["demo"], ["doctor"]]
)
def test_every_verb_has_help(regard_command: Command, verb: list[str]) -> None:
    ran = regard_command(*verb, "--help")
    assert ran.code == 0
    assert "usage: regard" in ran.out
    if verb:
        assert "--json" in ran.out
