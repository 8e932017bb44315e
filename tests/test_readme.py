"""What the README tells a newcomer to type does what it says."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

README = Path(__file__).parent.parent / "README.md"
SHORTER = "--epochs 1 --trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.accelerator cpu"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the README supposes it: a model in demo, a photo, a table of questions, photos of cats and dogs."""
    shutil.copytree(trained, tmp_path / "demo")
    for name in ("photo.png", "other.png", "third.png"):
        picture = Image.new("RGB", (90, 60), "ivory")
        ImageDraw.Draw(picture).ellipse((30, 20, 50, 40), fill="blue")
        picture.save(tmp_path / name)
    noise = torch.Generator().manual_seed(0)
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(0, 256, (40, 48, 3), generator=noise, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / kind / f"{number}.png")
    rows = [{"image": f"{name}.png", "question": "is it red?", "answer": "no"} for name in ("photo", "other", "third")]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_shell_line_works(place: Path, regard_command: Callable[..., "object"]) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert len(lines) >= 5
    for line in lines:
        command, *arguments = shlex.split(line, comments=True)
        assert command == "regard", line
        if arguments[0] == "train":  # the whole of it is tested elsewhere; here each flag must be right
            arguments += shlex.split(SHORTER)
        ran = regard_command(*arguments)
        assert ran.code == 0, f"{line}\n{ran.err}"


def test_every_python_block_works(place: Path) -> None:
    found = blocks("python")
    assert len(found) >= 2
    for block in found:
        exec(compile(block, str(README), "exec"), {})


def test_every_file_it_points_at_exists() -> None:
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (README.parent / target).exists(), target
    for name in re.findall(r"`(tests/[\w./]+|benchmarks/[\w./]+)`", text):
        assert (README.parent / name).exists(), name
