"""`regard ask`: questions about a picture, answered with probabilities and a map for every word."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regard import figures
from regard.crossattn import Answer
from regard.datasets import open_image
from regard.models import DEMO, open_qa
from regard.vit.errors import InputError
from regard.vit.files import require_another, typed_path


@dataclass(frozen=True)
class Asked:
    """What `ask` found: an `Answer` per question, and the PNG with a panel per word of the first `drawn` questions."""

    image: Path
    model: str
    answers: list[Answer]
    picture: Path
    drawn: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a program to read; maps are rows of patches."""
        return {
            "image": str(self.image),
            "model": self.model,
            "picture": str(self.picture),
            "questions_drawn": self.drawn,
            "answers": [answer_as_dict(answer) for answer in self.answers],
        }

    def __str__(self) -> str:
        meanings = "; ".join(dict.fromkeys(answer.meaning for answer in self.answers))
        part = "" if self.drawn == len(self.answers) else f" (the first {self.drawn} of {len(self.answers)} questions)"
        return "\n".join(
            [*map(told, self.answers), f"probability: {meanings}", f"maps: {self.picture}{part}"],
        )


def ask(
    image: str | Path,
    questions: str | list[str],
    *,
    model: str | Path = DEMO,
    out: str | Path | None = None,
    top: int = 5,
    candidates: str | list[str] | None = None,
    beams: int | None = None,
    max_tokens: int | None = None,
    normalise_length: bool = False,
    shortlist: int | None = None,
    behaviour: Literal["original", "transformers"] | None = None,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
) -> Asked:
    """Ask a picture one or more questions; it is looked at once. Without a question it takes them one by one.

    Args:
        image: picture file.
        questions: one question or several.
        model: model folder, run folder, public BLIP weights (file, folder, hub name); default: what `regard demo` made.
        out: PNG with one panel per word; default: IMAGE-ask.png in the current folder.
        top: how many of the likeliest answers to report.
        candidates: the only answers allowed, separated by commas.
        beams: answers that a decoder follows at once; default: the model's own.
        max_tokens: longest answer that a decoder writes, in tokens; default: the model's own.
        normalise_length: compare candidates by their mean log-probability per token.
        shortlist: rank only so many candidates, those with the likeliest first tokens.
        behaviour: whose numbers BLIP weights give: the authors' (original, the default) or transformers'.
        image_size: for BLIP weights: side of the square, or height and width, in pixels.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable picture or model, an empty or too long question, an unwritable place.
    """
    questions = [questions] if isinstance(questions, str) else list(questions)
    if not questions or not all(isinstance(question, str) for question in questions):
        raise InputError("questions must be a text or a list of texts, at least one")
    if pictures := [question for question in questions if Path(question).suffix and Path(question).is_file()]:
        raise InputError(f"{pictures[0]} is a file, not a question; ask one picture at a time")
    image = typed_path(image)
    path = Path(f"{image.stem}-ask.png") if out is None else typed_path(out)
    require_another(path, image)
    picture = open_image(image)
    qa = open_qa(model, device, **_blip(behaviour, image_size))
    answers = qa.ask(
        qa.look(picture),
        questions,
        top=top,
        candidates=_listed(candidates),
        beams=beams,
        max_tokens=max_tokens,
        normalise_length=normalise_length,
        shortlist=shortlist,
    )
    saved = figures.save(figures.word_figure(picture, qa.preprocess, answers), path)
    return Asked(image, str(model), answers, saved, figures.questions_drawn(answers))


def converse(
    image: str | Path,
    questions: Iterable[str],
    *,
    model: str | Path = DEMO,
    behaviour: Literal["original", "transformers"] | None = None,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    candidates: str | list[str] | None = None,
    **wanted: Any,
) -> Iterator[tuple[str, Answer | InputError]]:
    """Look at a picture once and answer questions as they come, each with its answer, until one is empty.

    A question that cannot be asked gives its InputError, and the next one is taken. Arguments as for `ask`.
    """
    picture = open_image(typed_path(image))
    qa = open_qa(model, device, **_blip(behaviour, image_size))
    wanted["candidates"] = _listed(candidates)
    memory = qa.look(picture)
    qa.ask(memory, ["?"], **wanted)  # settings that do not fit are told before the first question
    for question in questions:
        question = question.strip()
        if not question:
            return
        try:
            answer: Answer | InputError = qa.ask(memory, question, **wanted)
        except InputError as error:
            answer = error
        yield question, answer


def told(answer: Answer) -> str:
    """An answer in a few lines."""
    lines = [f"{answer.question}\n  {answer.text or '(nothing)'}  {answer.probability:.1%}"]
    if others := ", ".join(f"{text} {p:.1%}" for text, p in answer.top[1:] if p >= 0.0005):
        lines.append(f"  then: {others}")
    if answer.unknown:
        lines.append(f"  unknown to this model: {', '.join(answer.unknown)}; do not trust this answer")
    return "\n".join(lines)


def answer_as_dict(answer: Answer) -> dict[str, Any]:
    """Plain values for a program to read; maps are rows of patches."""
    written = answer.written
    return {
        "question": answer.question,
        "answer": answer.text,
        "probability": answer.probability,
        "meaning": answer.meaning,
        "top": [
            {"answer": text, "probability": p, "log_probability": log if math.isfinite(log) else None}
            for (text, p), log in zip(answer.top, answer.logs, strict=True)
        ],
        "unknown_words": list(answer.unknown),
        "words": [
            {"word": word, "mass": answer.attention.mass(i), "map": answer.attention.map(i).tolist()}
            for i, word in enumerate(answer.attention.words)
        ],
        "answer_tokens": [
            {"token": token, "words": written.words(i), "map": written.map(i).tolist()}
            for i, token in enumerate(written.tokens)
        ]
        if written is not None
        else [],
    }


def _listed(candidates: str | list[str] | None) -> list[str] | None:
    return [text.strip() for text in candidates.split(",")] if isinstance(candidates, str) else candidates


def _blip(behaviour: str | None, image_size: int | tuple[int, int] | None) -> dict[str, Any]:
    given = {"behaviour": behaviour, "image_size": image_size}
    return {name: value for name, value in given.items() if value is not None}
