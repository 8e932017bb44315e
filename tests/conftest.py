"""What several folders of tests share: a model trained for two steps, and the command in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


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
def regard_command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `regard` with arguments in this process."""
    from regard.cli import main

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
