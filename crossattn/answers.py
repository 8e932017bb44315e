"""Answers with their evidence, and the arrangements in which questions may be asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.crossattn.words import WordMaps
from regard.crossattn.written import WrittenMaps
from regard.vit.errors import InputError


@dataclass(frozen=True)
class Answer:
    """An answer with its evidence.

    Attributes:
        text: the answer: the likeliest, or the best of a decoder's search.
        probability: its probability, in the sense of `meaning`.
        top: the best answers with their probabilities, best first. A decoder's search compares log-probability /
            length ** length_penalty, so the first need not be the likeliest.
        attention: each word of the question -> where it looked, `(grid height, grid width)`.
        question: the question.
        unknown: words of the question that the model's vocabulary lacks; distrust the answer if there are any.
        meaning: what `probability` says: a share among the model's answers or among the candidates (they sum to 1), the
            probability that this answer alone is right, or that the decoder writes exactly this.
        logs: for each of `top` the decoder's exact log-probability of its text, the end included; without a decoder
            the logarithm of its probability.
        written: for a decoder: each token of the answer -> words of the question -> patches.
    """

    text: str
    probability: float
    top: tuple[tuple[str, float], ...]
    attention: WordMaps = field(compare=False)
    question: str
    unknown: tuple[str, ...]
    meaning: str
    logs: tuple[float, ...]
    written: WrittenMaps | None = field(compare=False)


def nested(questions: Sequence[Any]) -> bool:
    """Whether questions come as one list per image."""
    return not isinstance(questions, str) and any(not isinstance(q, str) for q in questions)


def arrange(questions: Any, images: int) -> tuple[list[str], list[int]]:
    """Questions in any accepted arrangement as a flat list and the image number of each."""
    if not isinstance(questions, Sequence):
        raise InputError(f"questions must be a text or a list, not {type(questions).__name__}")
    if isinstance(questions, str):
        questions = [questions]
    if not nested(questions):
        if images == 1:
            return list(questions), [0] * len(questions)
        if len(questions) != images:
            raise InputError(
                f"{len(questions)} questions for {images} images; give one question or one list of questions per image"
            )
        return list(questions), list(range(images))
    if any(isinstance(group, str) or not isinstance(group, Sequence) for group in questions):
        raise InputError("questions mix strings and lists; give one list of questions per image")
    if len(questions) != images:
        raise InputError(f"{len(questions)} lists of questions for {images} images; give one list per image")
    return [q for group in questions for q in group], [i for i, group in enumerate(questions) for _ in group]


def rearrange(answers: list[Answer], questions: Any) -> Any:
    """Answers from a flat list back in the arrangement of their questions."""
    if isinstance(questions, str):
        return answers[0]
    if not nested(questions):
        return answers
    queue = iter(answers)
    return [[next(queue) for _ in group] for group in questions]
