"""`regard demo`: the main job in minutes on a CPU. Train on easy-VQA, score, ask, draw."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.datasets import QuestionedImage, QuestionSet, load_questions
from regard.train.answer import train_answer
from regard.train.evaluate import Score
from regard.train.result import MODEL
from regard.verbs.ask import Asked, ask
from regard.verbs.evaluate import evaluate_answer
from regard.vit import checkpoint
from regard.vit.files import typed_path

RECIPE_NAME = "easy_vqa_demo"


@dataclass(frozen=True)
class Demo:
    """What the demo made: a model folder, its score on the official test split, and one question asked."""

    model: Path
    score: Score
    asked: Asked

    def as_dict(self) -> dict[str, Any]:
        return {"model": str(self.model), "score": self.score.as_dict(), "asked": self.asked.as_dict()}

    def __str__(self) -> str:
        score, image, run = self.score, self.asked.image, self.model.parent
        return "\n".join(
            [
                f"easy-VQA test split: {score.accuracy:.2%} of {score.n_questions} questions right"
                " (a guess from the question alone: 67.0%)",
                "",
                str(self.asked),
                "",
                "try next:",
                f'  regard ask {image} "is there a red shape?" "what shape is in the image?" --model {run}',
                f"  regard look {image} --model {run}",
            ]
        )


def demo(*, out: str | Path = "demo") -> Demo:
    """Train a small model on easy-VQA, score it on the test split, ask it about a test image, and draw the maps.

    A demo that was interrupted goes on where it stopped; one that is finished is not trained again.

    Args:
        out: folder for the model, its logs and the picture.

    Raises:
        InputError: easy-VQA is not installed, or `out` cannot be used.
    """
    out = typed_path(out)
    test = load_questions("easy-vqa", "test")  # before training: a missing package should not cost four minutes
    if not (out / MODEL / checkpoint.CONFIG).is_file():
        resume = (out / "checkpoints" / "last.ckpt").is_file()  # one killed before its first save starts anew
        train_answer(None if resume else RECIPE_NAME, out=out, resume=resume)
    score = evaluate_answer(model=str(out))
    image = _telling(test)
    question = next(q.text for q in image.questions if q.text.startswith("what"))
    asked = ask(image.path, [question], model=str(out), out=out / "maps.png")
    return Demo(out / MODEL, score, asked)


def _telling(test: QuestionSet) -> QuestionedImage:
    """The first test image with a question that asks for more than yes or no."""
    return next(image for image in test.images if any(q.text.startswith("what") for q in image.questions))
