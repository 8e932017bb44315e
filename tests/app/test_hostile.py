"""What tired people and odd machines do to the command: one line each, nothing hangs, nothing is half drawn."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import regard
from regard import InputError
from regard.commands import _train, parse
from regard.figures import _as_seen, questions_drawn
from regard.vit import Preprocess

Command = Callable[..., "object"]


def fails(regard_command: Command, *arguments: object, says: str) -> None:
    ran = regard_command(*arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert says in ran.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.timeout(60)
def test_a_named_pipe_is_refused_instead_of_waited_for(regard_command: Command, trained: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    fails(regard_command, "ask", tmp_path / "pipe.png", "is it red?", "--model", trained, says="a pipe or a device")
    fails(regard_command, "look", "/dev/zero", "--model", trained, says="a pipe or a device")


def test_an_address_is_told_from_a_file(regard_command: Command, trained: Path) -> None:
    fails(regard_command, "look", "https://example.com/a.png", "--model", trained, says="download the picture first")


@pytest.mark.parametrize("text", ["what is $\\frac$?", "$a_{$", "is it 漢字?", "is it\nred\0 \x1b[31m?", "a" * 3000])
def test_any_question_can_be_drawn(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path, text: str
) -> None:
    ran = regard_command("ask", photo, text, "--model", trained, "--out", tmp_path / "maps.png")
    assert (ran.code, ran.err) == (0, "")
    assert Image.open(tmp_path / "maps.png").width > 400


@pytest.mark.slow
def test_a_picture_holds_the_first_of_very_many_questions_and_says_so(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path
) -> None:
    out, began = tmp_path / "maps.png", time.monotonic()
    ran = regard_command("ask", photo, *["is there a red shape?"] * 300, "--model", trained, "--out", out)
    assert ran.code == 0, ran.err
    assert time.monotonic() - began < 60
    assert "(the first 48 of 300 questions)" in ran.out
    width, height = Image.open(out).size
    assert width < 4000
    assert height < 20_000
    told = json.loads(regard_command("ask", photo, "red?", "--model", trained, "--out", out, "--json").out)
    assert told["questions_drawn"] == 1


def test_a_long_question_takes_several_lines(trained: Path, photo: Path, tmp_path: Path) -> None:
    asked = regard.ask(photo, "is it red or is it blue or is it teal or green?", model=trained, out=tmp_path / "a.png")
    assert questions_drawn(asked.answers) == 1
    short = regard.ask(photo, "is it red?", model=trained, out=tmp_path / "b.png")
    long, small = Image.open(asked.picture), Image.open(short.picture)
    assert long.width < 2200
    assert long.height > 1.5 * small.height


def test_a_photo_is_drawn_no_sharper_than_a_panel_shows() -> None:
    seen = _as_seen(Image.new("RGB", (6000, 3000)), Preprocess(size=(16, 24)))
    assert max(seen.size) < 500
    assert seen.width == 2 * seen.height


def test_the_home_folder_is_meant_where_no_shell_has_said_so(
    regard_command: Command, trained: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert regard_command("look", "~/photo.png", "--model", trained, "--out", "~/heads.png").code == 0
    assert (tmp_path / "heads.png").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("flag", ["--model", "--out"])
def test_an_empty_path_is_not_the_working_folder(
    regard_command: Command, trained: Path, photo: Path, flag: str
) -> None:
    model = [] if flag == "--model" else ["--model", trained]
    fails(regard_command, "look", photo, *model, flag, "", says="no path")


def test_a_device_that_computes_nothing_is_refused(regard_command: Command, trained: Path, photo: Path) -> None:
    fails(regard_command, "look", photo, "--model", trained, "--device", "meta", says="'meta' cannot be used")


@pytest.mark.parametrize("size", ["0", "-3"])
def test_an_evaluation_in_batches_of_nothing_is_refused(regard_command: Command, trained: Path, size: str) -> None:
    fails(regard_command, "evaluate", "answer", "--model", trained, "--batch_images", size, says=f"is {size};")


def test_functions_refuse_what_they_cannot_read_in_one_line(trained: Path, photo: Path) -> None:
    for questions in ([], [["is it red?"]]):
        with pytest.raises(InputError, match="a list of texts"):
            regard.ask(photo, questions, model=trained)
    with pytest.raises(InputError, match="one layer"):
        regard.look(photo, model=trained, layer=[0, 1])


def test_flags_reach_into_a_mapping_within_a_mapping_one_by_one() -> None:
    verb = ("train", "answer")

    def parsed(*flags: str) -> dict:
        return parse(_train(verb), verb, [*verb, *flags])

    both = {"vit": {"preprocess": {"fit": "crop", "interpolation": "bilinear"}, "dim": 48}}
    assert parsed("--vit.preprocess.fit", "crop", "--vit.preprocess.interpolation=bilinear", "--vit.dim", "48") == both
    mixed = parsed("--vit.preprocess", '{"fit": "crop"}', "--vit.preprocess.interpolation", "bilinear")
    assert mixed == {"vit": {"preprocess": both["vit"]["preprocess"]}}
    assert parsed("--data", "a/b.c/d.jsonl") == {"data": "a/b.c/d.jsonl"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vit.dim", "x"], "ViTConfig.dim: expected int, found 'x'"),
        (["--vit.image_size", "48"], "ViTConfig.image_size: expected a list"),
        (["--vit.image_size", "[48.5,80]"], "ViTConfig.image_size: expected int, found 48.5"),
        (["--vit.preprocess.fit", "stretch"], "Preprocess.fit is 'stretch'; choose one of squash, crop"),
        (["--vit.class_token", "maybe"], "ViTConfig.class_token: expected bool"),
        (["--vit.norm_eps", "-1"], "norm_eps is -1.0; it must be 0 or more"),
        (["--vit.channels", "1"], "vit.channels is 1"),
        (["--text.dropout", "x"], "TextConfig.dropout: expected float"),
        (["--text.hidden_dim", "0"], "TextConfig.hidden_dim is 0"),
        (["--seed", "9" * 30], "must fit into 64 bits"),
        (["--beta2", "1"], "beta2 is 1.0"),
        (["--clip_norm", "-1"], "clip_norm is -1.0"),
        (["--weight_decay", "-1"], "weight_decay is -1.0"),
        (["--held_out", "0"], "held_out is 0.0"),
        (["--trainer.accumulate_grad_batches", "0"], "accumulate_grad_batches is 0"),
        (["--trainer.check_val_every_n_epoch", "0"], "check_val_every_n_epoch is 0"),
        (["--trainer.callbacks", "[x]"], "no Callback"),
        (["--trainer.benchmark", "x"], "Lightning refuses"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_setting_of_the_wrong_kind_leaves_nothing_behind(
    regard_command: Command, squares: Path, tmp_path: Path, flags: list[str], says: str
) -> None:
    out = tmp_path / "run"
    fails(regard_command, "train", "answer", "--data", squares, "--out", out, *flags, says=says)
    assert not out.exists()


def regard_process(*arguments: object, shell: str = '"$@"', **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-OO", "-c", "import sys; from regard.cli import main; sys.exit(main())"]
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}", "bash", *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    ran = regard_process("doctor", shell='"$@" | true')
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.slow
def test_a_terminal_without_the_letters_is_told_in_escapes(trained: Path, photo: Path, tmp_path: Path) -> None:
    """An ASCII terminal and a matplotlibrc that typesets everything with TeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    odd = {"PYTHONIOENCODING": "ascii", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    ran = regard_process(
        "ask", photo, "что это?", "--model", trained, "--out", tmp_path / "maps.png", shell='"$@"', **odd
    )
    assert ran.returncode == 0, ran.stderr
    assert "\\u0447" in ran.stdout


def test_a_demo_killed_before_its_first_save_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.verbs import demo

    class Trained(Exception):
        pass

    def train(recipe: str | None, *, out: Path, resume: bool) -> None:
        raise Trained(recipe, resume)

    monkeypatch.setattr(demo, "train_answer", train)
    (tmp_path / "recipe.yaml").write_text("epochs: 1\n")
    with pytest.raises(Trained) as first:
        demo.demo(out=tmp_path)
    assert first.value.args == ("easy_vqa_demo", False)
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(Trained) as second:
        demo.demo(out=tmp_path)
    assert second.value.args == (None, True)


@pytest.mark.parametrize("delay", [0.4, 1.2])
def test_ctrl_c_while_libraries_load_is_no_traceback(trained: Path, delay: float) -> None:
    script = (
        "import signal, sys, threading\nfrom regard.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"threading.Timer({delay}, signal.raise_signal, [signal.SIGINT]).start()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "evaluate", "answer", "--model", str(trained)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (130, "stopped\n")
