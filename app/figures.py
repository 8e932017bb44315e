"""What `regard ask` draws: the picture, then one panel per word of each question, each with its evidence.

The panels of a line share the scale its heading states, and next to each map stand the masses that tell whether to
trust it.
"""

from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from regard.crossattn import Answer
from regard.crossattn.written import END
from regard.pictures.colours import overlay
from regard.pictures.sheet import ACROSS, LINES, Group, Panel, Sheet, draw, number, panel_size, save
from regard.vit import Preprocess
from regard.vit.maps.grid import Frame

__all__ = ["evidence", "questions_drawn", "save", "word_figure"]
_SHARPEST = 462  # pixels of a picture's longer side; every panel would draw a photo's millions of pixels anew


def word_figure(image: Image.Image, preprocess: Preprocess, answers: Sequence[Answer]) -> Sheet:
    """For each of the first `questions_drawn(answers)` questions the picture, then a panel per word, and one per token
    of the answer that a decoder chose: the words' maps in the proportion in which it read them.

    `image` is upright RGB.
    """
    seen = _as_seen(image, preprocess)
    shown = answers[: questions_drawn(answers)]
    most = max(_panels(answer) for answer in shown)
    height, width = panel_size((seen.height, seen.width), most)
    seen = seen.resize((width, height), Image.Resampling.BOX)
    return draw([_question(seen, answer) for answer in shown])


def questions_drawn(answers: Sequence[Answer]) -> int:
    """How many of the questions, from the first, one picture holds: at least one."""
    drawn = lines = 0
    for answer in answers:
        lines += -(-_panels(answer) // ACROSS)
        if drawn and lines > LINES:
            break
        drawn += 1
    return drawn


def evidence(heat: Tensor, mass: dict[str, float], share: bool = True) -> str:
    """The peak of a map, and what of the attention fell beside the patches."""
    return f"peak {number(float(heat.max()), share)}" + "".join(f", {name} {part:.0%}" for name, part in mass.items())


def _question(seen: Image.Image, answer: Answer) -> Group:
    places = _drawn_words(answer)
    heats = [answer.attention.map(place) for place in places]
    written = [] if answer.written is None else [answer.written.map(token) for token in _drawn_tokens(answer)]
    # One scale for a question: a map that is nearly even must not glow as brightly as one with a peak.
    peak = max((float(heat.max()) for heat in [*heats, *written]), default=0.0) or 1.0
    panels = [Panel(f"{answer.probability:.1%}  {answer.text}", seen, bold=True)]
    for place, heat in zip(places, heats, strict=True):
        word = answer.attention.words[place]
        unknown = "(unknown word) " if word in answer.unknown else ""
        mass = {k: share for k, share in answer.attention.mass(place).items() if k != "patches" and share > 0}
        panels.append(Panel(f"{unknown}{word}\n{evidence(heat, mass)}", _overlaid(seen, heat, peak)))
    for token, heat in zip(_drawn_tokens(answer), written, strict=True):
        assert answer.written is not None
        shares = answer.written.words(token)
        word = max(shares, key=shares.__getitem__)
        panels.append(
            Panel(
                f"answer: {answer.written.tokens[token]}\n{evidence(heat, {})}, {shares[word]:.0%} through {word}",
                _overlaid(seen, heat, peak),
            )
        )
    scale = ("0", f"{number(peak, True)} of a word's attention", "one scale for this question")
    return Group(answer.question, panels, scale)


def _overlaid(seen: Image.Image, heat: Tensor, peak: float) -> Image.Image:
    size = (seen.height, seen.width)
    return overlay(seen, heat, Frame(size, (0, 0), (heat.shape[0], heat.shape[1]), (0, 0, *size)), peak)


def _panels(answer: Answer) -> int:
    return 1 + len(_drawn_words(answer)) + len(_drawn_tokens(answer))


def _drawn_tokens(answer: Answer) -> list[int]:
    """The places of the tokens that a decoder chose, but for the end; as many as leave room for the words."""
    if answer.written is None:
        return []
    tokens = answer.written.tokens
    return [place for place, token in enumerate(tokens) if token != END][: ACROSS - 1]


def _drawn_words(answer: Answer) -> list[int]:
    """The places of the words that are more than punctuation; as many as one picture holds."""
    places = [i for i, word in enumerate(answer.attention.words) if any(c.isalnum() for c in word)]
    return places[: ACROSS * LINES - 1 - len(_drawn_tokens(answer))]


def _as_seen(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """The picture in the frame the model saw: itself where it was squashed, the cut where it was cropped."""
    if preprocess.size is not None and (preprocess.fit == "crop" or preprocess.crop_ratio != 1):
        image = Image.fromarray(preprocess.pixels(image).permute(1, 2, 0).numpy())
    shrink = _SHARPEST / max(image.size)
    if shrink >= 1:
        return image
    width, height = (max(1, round(side * shrink)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX, reducing_gap=2.0)
