"""What several folders of tests share: a model trained for two steps, and the command in this process."""

import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

# Before anything asks whether torchvision is there: some remember the answer.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
importlib.import_module("peers").peer("torchvision")


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of `regard train answer`, stopped after two steps: right in form, wrong in its answers."""
    from regard.train.answer import train_answer

    out = tmp_path_factory.mktemp("runs") / "tiny"
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "accelerator": "cpu"}
    train_answer("easy_vqa", out=out, epochs=1, trainer=limits)
    return out


@pytest.fixture
def regard_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run `regard` with arguments, and with lines on its standard input, in this process."""
    from regard.cli import main

    def run(*arguments: object, stdin: str | None = "") -> Ran:
        capfd.readouterr()
        monkeypatch.setattr("sys.stdin", None if stdin is None else io.StringIO(stdin))
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question set in a table: 24 pictures of 16 x 24 pixels, a red or blue square on the left or the right."""
    folder = tmp_path_factory.mktemp("squares")
    rows = []
    for number in range(24):
        colour, side = ("red", "blue")[number % 2], ("left", "right")[number // 2 % 2]
        picture = Image.new("RGB", (24, 16), "white")
        picture.paste(colour, (2 if side == "left" else 14, 4, 10 if side == "left" else 22, 12))
        picture.save(folder / f"{number}.png")
        rows += [
            {"image": f"{number}.png", "question": "what color is the square?", "answer": colour},
            {
                "image": f"{number}.png",
                "question": "is the square on the left?",
                "answer": ("no", "yes")[side == "left"],
            },
            {
                "image": f"{number}.png",
                "question": "is the square on the right?",
                "answer": ("no", "yes")[side == "right"],
            },
        ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


SMALL = {
    "epochs": 2,
    "batch_images": 3,
    "held_out": 0.25,
    "shift": 1,
    "lr": 3e-3,
    "warmup_steps": 2,
    "questions_per_image": 2,
    "vit": {"image_size": (16, 24), "dim": 16, "heads": 2, "depth": 1, "registers": 2, "drop_path": 0.1},
    "text": {"dim": 16, "heads": 2, "depth": 1, "dropout": 0.1},
    "trainer": {"accelerator": "cpu"},
}


@pytest.fixture
def small(squares: Path) -> dict[str, Any]:
    """Settings for `train_answer` that end in a second."""
    return {"recipe": "easy_vqa", "data": str(squares), **SMALL}
