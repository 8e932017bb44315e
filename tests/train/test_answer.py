"""The task `answer`: what it trains on, what it counts, and what it leaves behind."""

import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from regard.crossattn import ImageQA
from regard.datasets import Question, QuestionedImage, QuestionSet, load_questions, load_table
from regard.train import answer as answer_task
from regard.train.answer import prepare, train_answer
from regard.train.evaluate import evaluate_answer
from regard.train.finite import NonFiniteError
from regard.train.optim import parameter_groups
from regard.train.questions import Batch, QuestionBatches
from regard.train.recipe import AnswerRecipe, load_recipe, save_recipe
from regard.train.sampling import Draw
from regard.train.scoring import answer_loss, is_right, read
from regard.vit.errors import InputError


def recipe(small: dict[str, Any], **changes: Any) -> AnswerRecipe:
    return load_recipe(small["recipe"], **{**{k: v for k, v in small.items() if k != "recipe"}, **changes})


# What it trains on


def test_each_image_is_encoded_once_however_many_questions_it_has(small: dict[str, Any]) -> None:
    module, data = prepare(recipe(small, questions_per_image=None))
    seen: list[int] = []
    module.model.vit.register_forward_hook(lambda vit, inputs, output: seen.append(len(inputs[0])))
    batch = data.training.__getitems__([Draw(0), Draw(1), Draw(2)])
    assert len(batch.ids) == 9
    module.losses(batch)
    assert seen == [3]


def test_questions_that_fill_a_share_change_nothing(
    small: dict[str, Any], squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = prepare(recipe(small))
    module.eval()
    one, two, three = load_questions(squares, "train").images[:3]
    uneven = QuestionSet((one, two, QuestionedImage(three.id, three.path, three.questions[:2])), "uneven")
    model, answers = module.model, module.model.config.answers
    monkeypatch.setattr(module, "log", lambda *a, **k: None)

    def batch(worth: float) -> Batch:
        monkeypatch.setattr("regard.train.questions._WORTH_FILLING", worth)
        made = QuestionBatches(uneven, model.tokenizer, 32, answers, model.preprocess, seed=0)
        return made.__getitems__([Draw(0), Draw(1), Draw(2)])

    filled, copied = batch(9.0), batch(1.0)
    assert filled.of is None
    assert copied.of is not None
    assert (len(filled.ids), int(filled.counts.sum()), len(copied.ids)) == (9, 8, 8)
    given, alone = (model.scores(*read(model, batch)) for batch in (filled, copied))
    torch.testing.assert_close(given[filled.counts], alone)
    torch.testing.assert_close(module.training_step(filled, 0), module.training_step(copied, 0))
    assert evaluate_answer(model, uneven).n_questions == 8


def test_the_test_split_is_never_read_and_held_out_images_are_never_trained_on(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = []

    def load(source: str, split: str) -> QuestionSet:
        asked_for.append(split)
        return load_questions(source, split)

    monkeypatch.setattr(answer_task, "load_questions", load)
    _, data = prepare(recipe(small))
    assert asked_for == ["train"]
    training, held_out = ({image.id for image in part.images} for part in (data.training, data.held_out))
    assert training.isdisjoint(held_out)
    assert (len(training), len(held_out)) == (18, 6)


def test_a_picture_moves_but_is_never_mirrored(tmp_path: Path) -> None:
    ramp = Image.new("RGB", (24, 16))
    ramp.putdata([(10 * x, 15 * y, 0) for y in range(16) for x in range(24)])
    ramp.save(tmp_path / "ramp.png")
    questions = load_table([(tmp_path / "ramp.png", "which way?", "right")])
    model = ImageQA.preset(questions=["which way?"], answers=["right"], vit={"image_size": (16, 24)})
    make = answer_task.QuestionBatches(
        questions, model.tokenizer, 32, ["right"], model.preprocess, seed=0, shift=3, keep=True
    )
    seen = set()
    for epoch in range(60):
        pixels = make.__getitems__([Draw(0, epoch)]).pixels[0].int()
        assert (pixels[0].diff(dim=1) >= 0).all(), "left stays left"
        assert (pixels[1].diff(dim=0) >= 0).all(), "top stays top"
        seen.add((int(pixels[0, 8, 12]) // 10 - 12, int(pixels[1, 8, 12]) // 15 - 8))
    assert {x for x, _ in seen} == {y for _, y in seen} == set(range(-3, 4))
    again = make.__getitems__([Draw(0, 7)]).pixels
    assert torch.equal(again, make.__getitems__([Draw(0, 7)]).pixels), "a function of seed, epoch and image"


def test_questions_are_drawn_anew_each_epoch_and_alike_each_run(small: dict[str, Any]) -> None:
    def drawn(epoch: int) -> list[list[int]]:
        _, data = prepare(recipe(small))
        return data.training.__getitems__([Draw(0, epoch), Draw(5, epoch)]).ids.tolist()

    assert drawn(1) == drawn(1)
    assert len({json.dumps(drawn(epoch)) for epoch in range(6)}) > 1


def test_biases_norms_tokens_and_tables_are_not_decayed(small: dict[str, Any]) -> None:
    module, _ = prepare(recipe(small, vit={"layer_scale": 0.1}, text={"gate": True}))
    groups = {group["name"]: {id(p) for p in group["params"]} for group in parameter_groups(module, 0.05)}
    names = {name for name, p in module.named_parameters() if id(p) in groups["decay"]}
    assert names
    assert all(name.endswith("weight") for name in names)
    for part in ("bias", "norm", "cls", "registers", "positions", "words", "gate", "gamma"):
        assert not [name for name in names if part in name], part


# What it counts


def test_loss_and_accuracy_follow_the_shares_of_the_annotators() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    targets = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    log = logits.log_softmax(dim=1)
    softmax = answer_loss(logits, targets, "softmax")
    torch.testing.assert_close(
        softmax, torch.stack([-(0.75 * log[0, 0] + 0.25 * log[0, 1]), -log[1, 0], log[0, 0] * 0])
    )
    sigmoid = answer_loss(logits, targets, "sigmoid")
    by_hand = -(targets * logits.sigmoid().log() + (1 - targets) * (1 - logits.sigmoid()).log()).sum(dim=1)
    torch.testing.assert_close(sigmoid[:2], by_hand[:2])
    assert sigmoid[2] == 0
    assert is_right(logits, targets).tolist() == [True, False, False]


def test_answers_outside_the_list_count_as_wrong_and_are_told(small: dict[str, Any], squares: Path) -> None:
    module, _ = prepare(recipe(small))
    questions = load_questions(squares, "train")
    honest = evaluate_answer(module.model, questions, batch_images=5)
    strange = QuestionSet(
        tuple(
            QuestionedImage(image.id, image.path, (*image.questions, Question(f"x{image.id}", "is it?", ("perhaps",))))
            for image in questions.images
        ),
        "with strangers",
    )
    module.model.tokenizer(["is it?"], 32)
    score = evaluate_answer(module.model, strange, batch_images=7)
    assert (honest.n_questions, score.n_questions) == (72, 96)
    assert (honest.out_of_vocabulary, score.out_of_vocabulary) == (0, 24)
    assert score.n_correct == honest.n_correct
    assert score.accuracy == honest.n_correct / 96


def test_questions_without_a_known_answer_are_not_scored(small: dict[str, Any], squares: Path) -> None:
    module, _ = prepare(recipe(small))
    image = load_questions(squares, "train").images[0]
    open_question = Question("open", image.questions[0].text, ())
    open_set = QuestionSet((QuestionedImage(image.id, image.path, (open_question, *image.questions)),), "open")
    assert evaluate_answer(module.model, open_set).n_questions == 3


# What it leaves behind


def test_the_result_opens_and_scores_what_validation_measured(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "epochs": 3}
    result = train_answer(**settings, out=tmp_path / "run")
    model = ImageQA.from_pretrained(tmp_path / "run")
    assert not model.training
    _, data = prepare(recipe(settings))
    held_out = QuestionSet(data.held_out.images, "held out")
    assert evaluate_answer(model, held_out).accuracy == pytest.approx(result.fit.best_score, abs=1e-7)
    with (tmp_path / "run" / "logs" / "metrics.csv").open() as file:
        logged = [float(row["val/accuracy"]) for row in csv.DictReader(file) if row.get("val/accuracy")]
    assert len(logged) == 3
    assert max(logged) == pytest.approx(result.fit.best_score)
    assert list((tmp_path / "run" / "logs").glob("events.out.tfevents.*"))
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["epochs"] == 3


def test_a_second_run_in_the_same_folder_needs_resume(small: dict[str, Any], tmp_path: Path) -> None:
    train_answer(**{**small, "epochs": 1}, out=tmp_path)
    before = (tmp_path / "recipe.yaml").read_text()
    with pytest.raises(InputError, match="already holds a run; pass --resume"):
        train_answer(**{**small, "lr": 1e-5}, out=tmp_path)
    assert (tmp_path / "recipe.yaml").read_text() == before


def test_a_finished_run_can_be_made_longer(small: dict[str, Any], tmp_path: Path) -> None:
    train_answer(**{**small, "epochs": 1}, out=tmp_path)
    longer = train_answer(out=tmp_path, resume=True, epochs=2)
    assert longer.fit.epochs_done == 2
    with pytest.raises(InputError, match="leave the recipe out"):
        train_answer("easy_vqa", out=tmp_path, resume=True)


def test_a_loss_that_is_not_finite_names_the_samples_and_keeps_the_last_good_weights(
    small: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError) as caught:
        train_answer(**{**small, "lr": 1e30, "warmup_steps": 0, "clip_norm": None}, out=tmp_path)
    assert "samples" in str(caught.value)
    assert ".png" in str(caught.value)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in last["state_dict"].values())


RUN = """
import json, sys
from regard.train.answer import train_answer
train_answer(**json.loads(sys.argv[1]))
"""


def start(settings: dict[str, Any]) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", RUN, json.dumps(settings, default=str)]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_a_run_killed_at_a_random_step_and_resumed_ends_with_the_same_weights(
    small: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**small, "epochs": 12, "save_every_steps": 1}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    whole = start({**settings, "out": undisturbed})
    run = start({**settings, "out": killed})
    last = killed / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (killed / "model").exists(), "killed before it ended"
    assert torch.load(last, weights_only=True)["state_dict"]
    resumed = start({"out": killed, "resume": True})
    for process in (whole, resumed):
        assert process.wait(timeout=120) == 0, process.stderr.read()
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (undisturbed, killed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_two_devices_validate_exactly_as_one(small: dict[str, Any], tmp_path: Path) -> None:
    """Five held-out pictures on two ranks: the sixth place is padding and must not count."""
    settings = {**small, "epochs": 1, "held_out": 5 / 24, "lr": 1e-9, "warmup_steps": 0}
    one = start({**settings, "out": tmp_path / "one"})
    assert one.wait(timeout=120) == 0, one.stderr.read()
    script = tmp_path / "run.py"
    script.write_text(f"if __name__ == '__main__':\n    {RUN.strip().replace(chr(10), chr(10) + '    ')}\n")
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    arguments = json.dumps({**settings, "out": tmp_path / "two", "trainer": trainer}, default=str)
    two = subprocess.run([sys.executable, script, arguments], capture_output=True, text=True, timeout=200)
    assert two.returncode == 0, two.stderr
    scores = []
    for name in ("one", "two"):
        with (tmp_path / name / "logs" / "metrics.csv").open() as file:
            scores.append([float(row["val/accuracy"]) for row in csv.DictReader(file) if row.get("val/accuracy")])
    assert scores[0] == scores[1]
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()


# Recipes


def test_a_flag_wins_over_the_recipe_and_merges_into_its_mappings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1.0e-4\nepochs: 3\nvit: {dim: 32, heads: 2}\n")
    found = load_recipe(path, epochs=5, vit={"heads": 4})
    assert (found.lr, found.epochs, found.vit) == (1e-4, 5, {"dim": 32, "heads": 4})
    assert found.batch_images == AnswerRecipe().batch_images


def test_a_saved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    before = load_recipe("easy_vqa", trainer={"devices": 2}, questions_per_image=None, vit={"image_size": (32, 48)})
    save_recipe(before, tmp_path / "recipe.yaml")
    after = load_recipe(tmp_path / "recipe.yaml")
    assert after.vit["image_size"] == [32, 48]
    assert {**vars(after), "vit": None} == {**vars(before), "vit": None}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lerning_rate: 1", "no field 'lerning_rate'"),
        ("epoch: 3", "did you mean 'epochs'?"),
        ("epochs: many", "expected int"),
        ("epochs: 2.5", "expected int"),
        ("lr: -1.0", "lr is -1.0"),
        ("score: soft", "softmax, sigmoid"),
        ("- a\n- b", "a mapping"),
        ("lr: [", "not valid YAML"),
    ],
)
def test_a_wrong_recipe_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_recipe_that_ships_says_what_it_reaches() -> None:
    from regard.train.recipe import names

    assert {"easy_vqa", "easy_vqa_demo"} <= set(names())
    for name in names():
        about = load_recipe(name).about
        assert "%" in about, f"{name} states no measured score"
        assert "cores" in about, f"{name} states no machine"


def test_an_unreadable_picture_stops_the_run_and_is_named(small: dict[str, Any], tmp_path: Path, squares: Path) -> None:
    rows = [json.loads(line) for line in (squares / "train.jsonl").read_text().splitlines()]
    for row in rows:
        (tmp_path / row["image"]).write_bytes((squares / row["image"]).read_bytes())
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:60])
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"7\.png"):
        train_answer(**{**small, "data": str(tmp_path)}, out=tmp_path / "run")


def test_a_question_too_long_for_the_model_is_named_before_training(small: dict[str, Any], tmp_path: Path) -> None:
    Image.new("RGB", (24, 16)).save(tmp_path / "a.png")
    Image.new("RGB", (24, 16)).save(tmp_path / "b.png")
    rows = [{"image": n, "question": "is " * 99 + "it?", "answer": "yes", "id": f"q-{n}"} for n in ("a.png", "b.png")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"q-[ab]\.png.*reads at most 32"):
        train_answer(**{**small, "data": str(tmp_path), "held_out": 0.5, "batch_images": 1}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
