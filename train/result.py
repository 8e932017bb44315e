"""What a finished run hands back: the model folder, how training went, and the next command."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from regard.train.loop import FitResult

MODEL = "model"
"""The folder of the finished model within that of the run."""


def next_score(by: str, run: str, data: str, splits: tuple[str, ...]) -> str:
    """The command that scores a run on pictures it has not been trained on, or what that would take."""
    if split := next((split for split in ("test", "val") if split in splits), None):
        told = "" if split == "test" else f" --split {split}"
        return f"try next: regard evaluate {by} --model {run} --data {data}{told}"
    return f"to score it on a set with a split test: regard evaluate {by} --model {run} --data OTHER"


@dataclass(frozen=True)
class Trained:
    """A finished run: the model folder that `from_pretrained` opens, and how training went.

    Attributes:
        model: the folder.
        fit: best score, epochs, steps, time.
        data: what was trained on, as the recipe has it.
    """

    model: Path
    fit: FitResult
    data: str

    score_name: ClassVar[str] = "held_out_accuracy"
    score_told: ClassVar[str] = "best held-out accuracy"

    def as_dict(self) -> dict[str, Any]:
        fit = self.fit
        return {
            "model": str(self.model) if fit.folder is None else None,
            "best_checkpoint": str(fit.best) if fit.best and fit.folder is None else None,
            "last_checkpoint": str(fit.last) if fit.folder is None else None,
            self.score_name: fit.best_score,
            "epochs": fit.epochs_done,
            "steps": fit.steps,
            "seconds": round(fit.seconds, 1),
        }

    def __str__(self) -> str:
        fit = self.fit
        if fit.folder is not None:
            return f"the configuration works: {fit.steps} steps, a validation and a saved model; nothing was kept"
        score = "" if fit.best_score is None else f", {self.score_told} {fit.best_score:.2%}"
        first = f"trained {fit.epochs_done} epochs in {fit.seconds:.0f} s{score}"
        return "\n".join([first, f"model: {self.model}", *self.next_commands()])

    def next_commands(self) -> list[str]:
        """Lines with what to type next."""
        raise NotImplementedError

    @property
    def quoted(self) -> tuple[str, str]:
        """The run's folder and the data as words of a command line."""
        return shlex.quote(str(self.model.parent)), shlex.quote(self.data)
