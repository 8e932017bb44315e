"""A user's mistake is one clear line on stderr and a non-zero exit, never a traceback."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

Command = Callable[..., "object"]


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A copy of a trained model that a test may damage."""
    return Path(shutil.copytree(trained / "model", tmp_path / "copy"))


def fails(regard_command: Command, *arguments: object, says: str) -> str:
    """The command fails with one line that contains `says`."""
    ran = regard_command(*arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("regard: error: "), ran.err
    assert ran.err.count("\n") == 1, ran.err
    assert says in ran.err
    return ran.err


def a_bomb(path: Path, side: int = 30_000) -> Path:
    """A PNG of side x side pixels in a few bytes: only its header is right."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def test_a_missing_file_is_named(regard_command: Command, trained: Path) -> None:
    fails(regard_command, "ask", "nowhere.png", "is it red?", "--model", trained, says="nowhere.png: no such file")


def test_a_folder_is_no_image(regard_command: Command, trained: Path, tmp_path: Path) -> None:
    fails(regard_command, "ask", tmp_path, "is it red?", "--model", trained, says="a folder, not an image")


@pytest.mark.parametrize("verb", ["ask", "look"])
@pytest.mark.parametrize("fault", ["truncated.jpg", "empty.png", "text.png", "bomb.png"])
def test_a_broken_image_is_named(regard_command: Command, trained: Path, tmp_path: Path, verb: str, fault: str) -> None:
    path = tmp_path / fault
    if fault == "truncated.jpg":
        Image.effect_noise((300, 200), 80).convert("RGB").save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif fault == "empty.png":
        path.touch()
    elif fault == "text.png":
        path.write_text("dear diary")
    else:
        a_bomb(path)
    question = ["is it red?"] if verb == "ask" else []
    fails(regard_command, verb, path, *question, "--model", trained, says=fault)


@pytest.mark.parametrize("question", ["", "   ", "\n"])
def test_an_empty_question_is_refused(regard_command: Command, trained: Path, photo: Path, question: str) -> None:
    fails(regard_command, "ask", photo, question, "--model", trained, says="question 1 is empty")


def test_a_question_of_ten_thousand_words_is_refused(regard_command: Command, trained: Path, photo: Path) -> None:
    fails(regard_command, "ask", photo, "is " * 10_000, "--model", trained, says="reads at most")


def test_an_unknown_model_is_named(regard_command: Command, photo: Path) -> None:
    fails(regard_command, "ask", photo, "is it red?", "--model", "no/such/model", says="no/such/model")


def test_without_a_model_the_demo_is_recommended(
    regard_command: Command, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fails(regard_command, "ask", photo, "is it red?", says="regard demo")


def test_a_missing_tensor_is_named(regard_command: Command, model: Path, photo: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["vit.blocks.0.attn.to_q.weight"]
    save_file(tensors, model / "model.safetensors")
    said = fails(regard_command, "ask", photo, "is it red?", "--model", model, says="vit.blocks.0.attn.to_q.weight")
    assert "missing" in said


def test_a_renamed_tensor_is_named_both_ways(regard_command: Command, model: Path, photo: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["head.wait"] = tensors.pop("head.weight")
    save_file(tensors, model / "model.safetensors")
    said = fails(regard_command, "ask", photo, "is it red?", "--model", model, says="head.weight")
    assert "head.wait" in said


def test_a_config_of_another_version_is_refused(regard_command: Command, model: Path, photo: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["format"] = 99
    (model / "config.json").write_text(json.dumps(config))
    fails(regard_command, "ask", photo, "is it red?", "--model", model, says="format 99")


class Bait:
    """A pickle that writes a file when it is opened."""

    def __init__(self, trap: Path):
        self.trap = trap

    def __reduce__(self):
        return (os.system, (f"touch {self.trap}",))


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_pickle_is_refused_and_runs_nothing(
    regard_command: Command, model: Path, photo: Path, tmp_path: Path, as_folder: bool
) -> None:
    trap = tmp_path / "sprung"
    weights = model / "model.safetensors" if as_folder else tmp_path / "weights.pt"
    weights.write_bytes(pickle.dumps({"head.weight": Bait(trap)}))
    source = model if as_folder else weights
    fails(regard_command, "ask", photo, "is it red?", "--model", source, says="pickle")
    assert not trap.exists()


@pytest.mark.parametrize("verb", ["ask", "look", "train", "demo"])
def test_a_read_only_place_is_named(
    regard_command: Command, trained: Path, photo: Path, verb: str, tmp_path: Path
) -> None:
    # Root may write anywhere but in a place that is no folder at all, or in the kernel's own.
    nowhere = "/proc/regard" if os.geteuid() == 0 else str(tmp_path / "locked" / "place")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o555)
    lines = {
        "ask": ("ask", photo, "is it red?", "--model", trained, "--out", f"{nowhere}/maps.png"),
        "look": ("look", photo, "--model", trained, "--out", f"{nowhere}/maps.png"),
        "train": ("train", "answer", "--out", nowhere),
        "demo": ("demo", "--out", nowhere),
    }
    fails(regard_command, *lines[verb], says=nowhere)


def test_a_full_disk_leaves_no_half_picture(trained: Path, photo: Path, tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\n"
        "from regard.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["ask", photo, "is it red?", "--model", trained, "--out", tmp_path / "out" / "maps.png"]
    ran = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 2, ran.stderr
    assert "cannot write" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["paint"], "there is no verb 'paint'"),
        (["train"], "there is no verb 'train'"),
        (["train", "answer", "--recipe", "easy_vqq"], "no recipe is called 'easy_vqq'"),
        (["train", "answer", "--epoch", "3"], "--epoch"),
        (["train", "answer", "--epochs", "many"], "epochs"),
        (["train", "answer", "--epochs", "0"], "epochs is 0"),
        (["train", "answer", "--trainer.devises", "2"], "devises"),
        (["train", "answer", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["train", "answer", "--resume", "--out", "nowhere"], "nothing to resume"),
        (["evaluate", "answer", "--data", "nowhere"], "nowhere"),
        (["ask", "photo.png"], "photo.png: no such file"),
        (["look"], "image"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    regard_command: Command, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fails(regard_command, *arguments, says=says)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_layer_or_device_is_told(regard_command: Command, trained: Path, photo: Path) -> None:
    fails(regard_command, "look", photo, "--model", trained, "--layer", 99, says="layer 99 does not exist")
    fails(regard_command, "look", photo, "--model", trained, "--device", "abacus", says="abacus")


def test_a_picture_is_only_written_as_png(regard_command: Command, trained: Path, photo: Path, tmp_path: Path) -> None:
    fails(regard_command, "look", photo, "--model", trained, "--out", tmp_path / "maps.gif", says=".png")
