"""The common shape of an image question answering set, and how much of it a closed answer list can answer."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from regard.vit.errors import InputError


@dataclass(frozen=True)
class Question:
    """One question; `answers` holds one, or one per annotator, or none when the answer is unknown."""

    id: str
    text: str
    answers: tuple[str, ...]

    @property
    def majority(self) -> str | None:
        """The commonest answer, the first given of equals; None when unknown."""
        return Counter(self.answers).most_common(1)[0][0] if self.answers else None


@dataclass(frozen=True)
class QuestionedImage:
    """One image file and everything asked about it."""

    id: str
    path: Path
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class QuestionSet:
    """Images with questions, in file order; `answers` is the closed list of a set that ships one.

    Raises InputError when two images or two questions share an id.
    """

    images: tuple[QuestionedImage, ...]
    name: str
    answers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require_unique((image.id for image in self.images), f"{self.name}: image")
        _require_unique((q.id for image in self.images for q in image.questions), f"{self.name}: question")

    @cached_property
    def n_questions(self) -> int:
        """How many questions all images have together."""
        return sum(len(image.questions) for image in self.images)

    def question_texts(self) -> list[str]:
        """Every question's text, image by image, repetitions kept."""
        return [question.text for image in self.images for question in image.questions]

    def answer_counts(self) -> Counter[str]:
        """How often each answer is the majority answer; unknown answers count nowhere."""
        majorities = (question.majority for image in self.images for question in image.questions)
        return Counter(answer for answer in majorities if answer is not None)

    def split(self, fraction: float, seed: int) -> tuple["QuestionSet", "QuestionSet"]:
        """Split by image -> (rest, held out), `fraction` of the images in the second; both keep file order.

        The same images and seed give the same parts, whatever order the file lists them in.
        Raises InputError when either part would be empty.
        """
        n_held_out = round(fraction * len(self.images)) if 0 < fraction < 1 else 0
        if not 0 < n_held_out < len(self.images):
            raise InputError(
                f"{self.name}: holding out a fraction of {fraction} of {len(self.images)} images leaves one "
                "part empty; give a fraction (--held_out) that is at least one image and not all of them"
            )
        ids = sorted(image.id for image in self.images)
        random.Random(seed).shuffle(ids)
        held_out = set(ids[:n_held_out])
        return (
            replace(self, images=tuple(image for image in self.images if image.id not in held_out)),
            replace(
                self,
                images=tuple(image for image in self.images if image.id in held_out),
                name=f"{self.name}/held-out",
            ),
        )

    def subset(self, n_images: int) -> "QuestionSet":
        """Return the first `n_images` images with all their questions (all images if there are fewer).

        Raises InputError when `n_images` is below 1.
        """
        if n_images < 1:
            raise InputError(f"{self.name}: a subset needs at least 1 image, got {n_images}")
        return replace(self, images=self.images[:n_images])


def _require_unique(ids: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for identity in ids:
        if identity in seen:
            raise InputError(f"{what} id {identity!r} occurs twice; ids must be unique")
        seen.add(identity)


def vocabulary(question_set: QuestionSet, min_count: int = 1) -> tuple[str, ...]:
    """Return the set's own closed list in its order, else the majority answers by frequency, then first seen.

    `min_count` drops rarer answers, and only applies where the set ships no list.
    Raises InputError when nothing is left.
    """
    if question_set.answers is not None:
        return question_set.answers
    counts = question_set.answer_counts()
    answers = tuple(answer for answer, count in counts.most_common() if count >= min_count)
    if not answers:
        known = f"the commonest is given {max(counts.values())} times" if counts else "no answer is known"
        raise InputError(f"{question_set.name}: no answer is given {min_count} times or more ({known})")
    return answers


@dataclass(frozen=True)
class Coverage:
    """What a closed list can answer: of `n_questions` with a known answer, `n_covered` have one in the list.

    `missing` counts the majority answers of the others.
    """

    n_questions: int
    n_covered: int
    missing: Counter[str]

    @property
    def fraction(self) -> float:
        """Covered questions among those with a known answer: the highest accuracy the list allows, 0..1."""
        return self.n_covered / self.n_questions if self.n_questions else 0.0


def coverage(question_set: QuestionSet, answers: Iterable[str]) -> Coverage:
    """Count the questions for which any annotator's answer stands in `answers`."""
    known = set(answers)
    missing: Counter[str] = Counter()
    n_questions = 0
    for image in question_set.images:
        for question in image.questions:
            if question.majority is None:
                continue
            n_questions += 1
            if known.isdisjoint(question.answers):
                missing[question.majority] += 1
    return Coverage(n_questions, n_questions - missing.total(), missing)


def require_coverage(question_set: QuestionSet, answers: Iterable[str], at_least: float = 0.5) -> Coverage:
    """Return the coverage; below `at_least` raise InputError with the commonest missing answers.

    Call it before training or scoring: a list that does not fit the set would show as accuracy near 0, later.
    Nothing is dropped; a question outside the list still counts, as wrong.
    """
    answers = tuple(answers)
    found = coverage(question_set, answers)
    if found.n_questions == 0:
        raise InputError(f"{question_set.name}: no question has a known answer, so nothing can be learned or scored")
    if found.fraction < at_least:
        commonest = ", ".join(f"{answer!r} ({count})" for answer, count in found.missing.most_common(5))
        raise InputError(
            f"{question_set.name}: only {found.n_covered} of {found.n_questions} questions have an answer "
            f"among the {len(answers)} known; commonest missing: {commonest}; "
            "check that model and data belong together"
        )
    return found
