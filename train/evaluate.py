"""Scoring an ImageQA on a question set: every question counts, known answer list or not."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from regard.crossattn import ImageQA
from regard.datasets import QuestionSet, coverage
from regard.train.questions import QuestionBatches
from regard.train.sampling import EvalBatches
from regard.train.scoring import read, right
from regard.vit.errors import InputError


@dataclass(frozen=True)
class Score:
    """Accuracy on a question set, with what it was measured on.

    Attributes:
        accuracy: share of questions whose likeliest answer is the one most annotators gave. What a head `generate`
            writes is compared as text, without regard to case, accents and the spaces around punctuation.
        n_questions, n_correct, n_images: counts.
        out_of_vocabulary: questions no answer of the model's list could be right for; they count as wrong.
        yes_no, other: accuracy on questions answered yes or no, and on the rest; None where there are none.
        data: name of the question set.
    """

    accuracy: float
    n_questions: int
    n_correct: int
    n_images: int
    out_of_vocabulary: int
    yes_no: float | None
    other: float | None
    data: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        both = {"yes/no": self.yes_no, "other": self.other}
        kinds = [f"{name} {share:.2%}" for name, share in both.items() if share is not None]
        strange = f"; {self.out_of_vocabulary} have an answer the model cannot give" if self.out_of_vocabulary else ""
        return (
            f"{self.data}: {self.accuracy:.2%} right ({self.n_correct} of {self.n_questions} questions on"
            f" {self.n_images} images; {', '.join(kinds)}){strange}"
        )


@torch.inference_mode()
def evaluate_answer(
    model: ImageQA,
    questions: QuestionSet,
    *,
    batch_images: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Ask every question of a set; unanswered ones (no known answer) are left out of the count.

    `progress(done, total)` is called after each batch of images.
    Raises InputError for an image that cannot be read or a question the model cannot.
    """
    config = model.config
    if config.head == "rank" and not config.answers:
        raise InputError("this model ranks a list of answers and has none; open it with answers=, or head='generate'")
    dataset = QuestionBatches(
        questions,
        model.tokenizer,
        config.text.max_tokens,
        config.answers,
        model.preprocess,
        seed=0,
        decoder=config.decoder,
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=EvalBatches(len(dataset), batch_images), collate_fn=lambda batch: batch
    )
    asked = [question for image in questions.images for question in image.questions]
    told: list[bool] = []
    in_training, device = [m for m in model.modules() if m.training], next(model.parameters()).device
    model.eval()
    for done, batch in enumerate(loader, start=1):
        batch.pixels = batch.pixels.to(device)
        told += right(model, *read(model, batch), batch)[batch.counts.to(device)].tolist()
        if progress is not None:
            progress(min(done * batch_images, len(dataset)), len(dataset))
    for module in in_training:  # each by itself: a frozen part may stand in inference mode within a training model
        module.training = True
    scored = [(q, r) for q, r in zip(asked, told, strict=True) if q.majority is not None]
    yes_no = [r for q, r in scored if _is_yes_no(q.majority)]
    other = [r for q, r in scored if not _is_yes_no(q.majority)]
    free = config.head == "generate"
    covered = coverage(questions, dataset.columns)
    return Score(
        accuracy=_share([r for _, r in scored]) or 0.0,
        n_questions=len(scored),
        n_correct=sum(r for _, r in scored),
        n_images=len(questions.images),
        out_of_vocabulary=0 if free else covered.n_questions - covered.n_covered,
        yes_no=_share(yes_no),
        other=_share(other),
        data=questions.name,
    )


def _share(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _is_yes_no(answer: str | None) -> bool:
    return answer is not None and answer.lower() in ("yes", "no")
