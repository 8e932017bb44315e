"""`regard evaluate answer`: accuracy of a model on a question set."""

from pathlib import Path

from regard.datasets import load_questions, require_coverage
from regard.models import DEMO, open_qa
from regard.progress import bar
from regard.train.evaluate import Score
from regard.train.evaluate import evaluate_answer as score


def evaluate_answer(
    *,
    model: str | Path = DEMO,
    data: str = "easy-vqa",
    split: str = "test",
    batch_images: int = 64,
    device: str = "auto",
) -> Score:
    """Score a model on every question of a set; questions outside its answer list count as wrong.

    Args:
        model: model folder, run folder, or hub name; default: what `regard demo` trained.
        data: `easy-vqa`, a folder, or a table (JSONL, CSV) with the columns image, question, answer.
        split: which split of a folder.
        batch_images: pictures per step.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable model, data set or picture, or a data set that the answers do not fit.
    """
    questions = load_questions(data, split)
    qa = open_qa(model, device)
    if qa.config.head != "generate":  # which can answer what no list holds
        require_coverage(questions, qa.config.answers, at_least=0.01)
    with bar("evaluating", len(questions.images), "images") as update:
        return score(qa, questions, batch_images=batch_images, progress=update)
