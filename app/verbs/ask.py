"""`regard ask`: questions about a picture, answered with probabilities and a map for every word."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard import figures
from regard.crossattn import Answer
from regard.datasets import open_image
from regard.models import DEMO, open_qa
from regard.vit.errors import InputError
from regard.vit.files import typed_path


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
            "answers": [_answer(answer) for answer in self.answers],
        }

    def __str__(self) -> str:
        lines = []
        for answer in self.answers:
            lines.append(f"{answer.question}\n  {answer.text}  {answer.probability:.1%}")
            others = ", ".join(f"{text} {p:.1%}" for text, p in answer.top[1:] if p >= 0.0005)
            lines.append(f"  then: {others}" if others else "")
            if answer.unknown:
                lines.append(f"  unknown to this model: {', '.join(answer.unknown)}; do not trust this answer")
        part = "" if self.drawn == len(self.answers) else f" (the first {self.drawn} of {len(self.answers)} questions)"
        return "\n".join([*filter(None, lines), f"maps: {self.picture}{part}"])


def ask(
    image: str | Path,
    questions: str | list[str],
    *,
    model: str | Path = DEMO,
    out: str | Path | None = None,
    top: int = 5,
    device: str = "auto",
) -> Asked:
    """Ask a picture one or more questions; it is looked at once.

    Args:
        image: picture file.
        questions: one question or several.
        model: model folder, run folder, or hub name; default: what `regard demo` trained.
        out: PNG with one panel per word; default: IMAGE-ask.png in the current folder.
        top: how many of the likeliest answers to report.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable picture or model, an empty or too long question, an unwritable place.
    """
    questions = [questions] if isinstance(questions, str) else list(questions)
    if not questions or not all(isinstance(question, str) for question in questions):
        raise InputError("questions must be a text or a list of texts, at least one")
    image = typed_path(image)
    picture = open_image(image)
    qa = open_qa(model, device)
    answers = qa.ask(qa.look(picture), questions, top=top)
    path = Path(f"{image.stem}-ask.png") if out is None else typed_path(out)
    saved = figures.save(figures.word_figure(picture, qa.preprocess, answers), path)
    return Asked(image, str(model), answers, saved, figures.questions_drawn(answers))


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question,
        "answer": answer.text,
        "probability": answer.probability,
        "top": [{"answer": text, "probability": p} for text, p in answer.top],
        "unknown_words": list(answer.unknown),
        "words": [
            {"word": word, "mass": answer.attention.mass(i), "map": answer.attention.map(i).tolist()}
            for i, word in enumerate(answer.attention.words)
        ],
    }
