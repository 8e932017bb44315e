"""What people do to `regard train classify` and `distill` at night, and the one line or the right thing they get."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from regard.train.classify.recipe import ClassifyRecipe
from regard.train.recipe import load_recipe
from regard.vit import ViT
from regard.vit.files import write_atomically

TINY = [
    *("--vit.dim", "16", "--vit.depth", "1", "--vit.heads", "2", "--vit.patch_size", "4"),
    *("--vit.image_size", "[16,16]", "--batch", "4", "--trainer.accelerator", "cpu"),
]


def draw(folder: Path, classes: str = "ab", count: int = 9, seed: int = 0) -> Path:
    """`folder/<class>/<number>.png`: noise."""
    generator = torch.Generator().manual_seed(seed)
    for kind in classes:
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(0, 256, (18, 20, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / kind / f"{number}.png")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    draw(tmp_path / "flat")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Command = Callable[..., Any]


def classify(regard_command: Command, *more: str, out: str = "run") -> Any:
    return regard_command("train", "classify", "--data", "flat", *TINY, "--epochs", "1", "--out", out, *more)


def refused(ran: Any) -> str:
    assert (ran.code, ran.out) == (2, ""), ran.err
    (line,) = [line for line in ran.err.splitlines() if line.startswith("regard: error")]
    return line


def test_a_refused_resume_leaves_the_runs_recipe_as_it_was(place: Path, regard_command: Command) -> None:
    assert classify(regard_command).code == 0
    before = (place / "run" / "recipe.yaml").read_bytes()
    line = refused(regard_command("train", "classify", "--batch", "2", "--epochs", "2", "--out", "run", "--resume"))
    assert "batch size" in line
    assert (place / "run" / "recipe.yaml").read_bytes() == before
    assert regard_command("train", "classify", "--epochs", "2", "--out", "run", "--resume").code == 0


@pytest.mark.parametrize("epochs", ["1", "2"])
def test_a_run_goes_on_with_its_own_data_alone(place: Path, regard_command: Command, epochs: str) -> None:
    """The finished run and the unfinished one: other classes of as many pictures are other data."""
    draw(place / "other", "xy", seed=1)
    assert classify(regard_command).code == 0
    model = {file.name: file.read_bytes() for file in (place / "run" / "model").iterdir()}
    line = refused(
        regard_command("train", "classify", "--data", "other", "--epochs", epochs, "--out", "run", "--resume")
    )
    assert "other data" in line
    assert {file.name: file.read_bytes() for file in (place / "run" / "model").iterdir()} == model


def test_a_set_of_broken_pictures_makes_no_model(place: Path, regard_command: Command) -> None:
    for file in (place / "flat").rglob("*.png"):
        write_atomically(file, lambda opened: opened.write(b"no picture"))
    line = refused(classify(regard_command, "--bad_images", "skip"))
    assert "none of its pictures can be read" in line
    assert not (place / "run" / "model").exists()


def test_held_out_pictures_of_which_none_can_be_read_choose_no_epoch(place: Path, regard_command: Command) -> None:
    for split in ("train", "val"):
        draw(place / "split" / split)
    for file in (place / "split" / "val").rglob("*.png"):
        write_atomically(file, lambda opened: opened.write(b"no picture"))
    line = refused(classify(regard_command, "--data", "split", "--held_out", "0", "--bad_images", "skip"))
    assert "none of the held-out pictures can be read" in line


def test_val_does_not_choose_the_best_epoch_of_a_training_on_val(place: Path, regard_command: Command) -> None:
    assert "split is val" in refused(classify(regard_command, "--split", "val", "--held_out", "0"))


@pytest.mark.parametrize(("channels", "says"), [("1", "3 values; give 1"), ("4", "1 (grey) or 3 (RGB)")])
@pytest.mark.parametrize("task", ["classify", "distill"])
def test_channels_without_means_say_what_to_give(
    place: Path, regard_command: Command, task: str, channels: str, says: str
) -> None:
    ran = regard_command("train", task, "--data", "flat", *TINY, "--vit.channels", channels, "--out", "run")
    assert says in refused(ran)


def distill(regard_command: Command, *more: str) -> Any:
    head = ("--prototypes", "64", "--hidden", "32", "--bottleneck", "16", "--epochs", "1")
    return regard_command("train", "distill", "--data", "flat", *TINY, *head, "--out", "run", *more)


def test_local_crops_follow_the_size_of_the_model(place: Path, regard_command: Command) -> None:
    ran = distill(regard_command)
    assert ran.code == 0, ran.err
    assert "2 of 16 x 16 and 8 of 8 x 8" in ran.err
    assert "larger than the global crops" in refused(distill(regard_command, "--local_size", "[32,32]", "--out", "two"))


def test_a_learning_rate_that_blows_up_is_one_line(place: Path, regard_command: Command) -> None:
    line = refused(distill(regard_command, "--lr", "1e30", "--trainer.log_every_n_steps", "1"))
    assert "not a finite number" in line


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("classify", ["--workers", "-1"]),
        ("knn", ["--workers", "-1"]),
        ("knn", ["--blocks", "0"]),
        ("linear", ["--epochs", "0"]),
        ("linear", ["--epochs", "-3"]),
        ("linear", ["--batch", "0"]),
    ],
)
def test_numbers_below_their_least_are_refused(
    place: Path, regard_command: Command, verb: str, flags: list[str]
) -> None:
    ran = regard_command("evaluate", verb, "--model", "run", "--data", "flat", *flags)
    assert f"{flags[0].removeprefix('--')} is {flags[1]}; it must be at least" in refused(ran)


def test_a_model_that_no_memory_holds_is_one_line(place: Path, regard_command: Command) -> None:
    ran = classify(regard_command, "--vit.image_size", "[1000000,1000000]")
    assert "not enough memory" in refused(ran)


def test_the_next_command_names_a_split_that_there_is(place: Path, regard_command: Command) -> None:
    ran = classify(regard_command)
    assert "--data OTHER" in ran.out
    for split in ("train", "val"):
        draw(place / "split" / split, seed=len(split))
    ran = classify(regard_command, "--data", "split", out="second")
    next_line = next(line for line in ran.out.splitlines() if line.startswith("try next: regard"))
    assert next_line.endswith("--data split --split val")
    assert regard_command(*next_line.removeprefix("try next: regard ").split()).code == 0


def test_a_trial_with_a_profile_points_at_no_file_that_is_gone(place: Path, regard_command: Command) -> None:
    ran = classify(regard_command, "--fast_dev_run", "--profile")
    assert ran.code == 0, ran.err
    assert "Self CPU" in ran.err
    assert "trace:" not in ran.err
    assert not (place / "run").exists()


def test_json_stands_alone_on_standard_output(place: Path, regard_command: Command) -> None:
    told = json.loads(classify(regard_command, "--json").out)
    assert told["epochs"] == 1
    assert "the card before the run" in refused(
        classify(regard_command, "--trainer.enable_model_summary", "true", "--json", out="two")
    )


def test_a_run_that_is_not_finished_opens_at_its_best_epoch(place: Path, regard_command: Command) -> None:
    ran = classify(regard_command, "--ema", "0.5", "--epochs", "2")
    assert ran.code == 0, ran.err
    finished = ViT.from_pretrained("run")
    shutil.rmtree(place / "run" / "model")
    for source in ("run", "run/checkpoints/best.ckpt"):
        opened = ViT.from_pretrained(source)
        assert opened.config == finished.config
        assert same(opened.state_dict(), finished.state_dict())
    again = regard_command("evaluate", "classify", "--model", "run", "--data", "flat", "--split", "train", "--json")
    assert again.code == 0, again.err


def test_a_teacher_in_a_checkpoint_opens_as_a_plain_vit(place: Path, regard_command: Command) -> None:
    assert distill(regard_command, "--drop_path", "0.2").code == 0
    saved, opened = ViT.from_pretrained("run"), ViT.from_pretrained("run/checkpoints/last.ckpt")
    assert opened.config == saved.config
    assert opened.config.drop_path == 0
    assert same(opened.state_dict(), saved.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task", ["classify", "distill"])
def test_either_task_starts_from_a_model_of_our_own(place: Path, regard_command: Command, task: str) -> None:
    assert classify(regard_command, out="first").code == 0
    shape = ("--vit.image_size", "[24,16]", "--batch", "4", "--epochs", "1", "--trainer.accelerator", "cpu")
    more = ("--prototypes", "64", "--hidden", "32") if task == "distill" else ()
    ran = regard_command("train", task, "--pretrained", "first", "--data", "flat", *shape, *more, "--out", "second")
    assert ran.code == 0, ran.err
    assert ViT.from_pretrained("second").config.image_size == (24, 16)


def test_a_field_that_the_weights_settle_is_named(place: Path, regard_command: Command) -> None:
    assert classify(regard_command, out="first").code == 0
    flags = ("--pretrained", "first", "--data", "flat", "--vit.dim", "64", "--out", "second")
    ran = regard_command("train", "classify", *flags)
    assert "leave dim out" in refused(ran)


def test_a_number_is_a_number_as_everyone_writes_it(place: Path) -> None:
    (place / "mine.yaml").write_text("lr: 1e-3\nweight_decay: 5E-2\nvit: {layer_scale: 1e-5}\n")
    recipe = load_recipe("mine.yaml", ClassifyRecipe)
    assert (recipe.lr, recipe.weight_decay, recipe.vit["layer_scale"]) == (1e-3, 5e-2, 1e-5)


def test_a_split_val_chooses_the_best_epoch_unless_told_otherwise(place: Path, regard_command: Command) -> None:
    for split in ("train", "val"):
        draw(place / "split" / split, seed=len(split))
    assert "on 18 of split/val" in classify(regard_command, "--data", "split").err
    assert "on 6 of split/train" in classify(regard_command, "--data", "split", "--held_out", "0.33", out="two").err


def test_another_width_brings_its_own_mlp() -> None:
    assert ViT.preset("tiny", dim=32, heads=2, depth=1).blocks[0].mlp.fc1.out_features == 128
    assert ViT.preset("tiny", dim=32, heads=2, depth=1, hidden_dim=48).blocks[0].mlp.fc1.out_features == 48


def test_a_misspelt_flag_and_a_verb_alone_get_help(regard_command: Command) -> None:
    assert "did you mean --epochs?" in refused(regard_command("train", "classify", "--epoch", "3"))
    ran = regard_command("train", "--help")
    assert ran.code == 0
    assert "regard train distill --help" in ran.out
    line = refused(regard_command("train", "classify", "--vit.image_size", "64"))
    assert "such as [64, 64]" in line
