"""From what a question has read to its answers: a score for each of a list, or a text that the decoder writes.

Q questions, T question tokens, D width, A answers, C candidates.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.crossattn.config import ImageQAConfig
from regard.crossattn.decoder import MOST_BEAMS, TextDecoder
from regard.crossattn.generate import Written, generate
from regard.crossattn.rank import rank
from regard.crossattn.tokenizer import TextTokenizer
from regard.vit.errors import InputError


@dataclass(frozen=True)
class Asking:
    """How answers are wanted; None leaves a choice to the model.

    Attributes:
        top: how many answers, best first.
        candidates: the only answers allowed.
        beams, max_tokens: of the decoder; see `DecoderConfig`.
        normalise_length: compare candidates by log-probability per token rather than by log-probability.
        shortlist: rank only so many candidates, those with the likeliest first tokens; the others get 0.
    """

    top: int = 5
    candidates: tuple[str, ...] | None = None
    beams: int | None = None
    max_tokens: int | None = None
    normalise_length: bool = False
    shortlist: int | None = None

    def __post_init__(self) -> None:
        for name in ("top", "beams", "max_tokens", "shortlist"):
            value = getattr(self, name)
            given = value is not None or name == "top"
            if given and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if self.beams is not None and self.beams > MOST_BEAMS:
            raise InputError(f"beams is {self.beams}; at most {MOST_BEAMS} answers are followed at once")


@dataclass(frozen=True)
class Found:
    """The answers to one question, best first.

    Attributes:
        texts, probabilities: the answers. What a decoder writes stands in the order of its search, which compares
            log-probability / length ** length_penalty: with a penalty the first need not be the likeliest.
        logs: the decoder's exact log-probability of each text, its end included; for a vocabulary the logarithm of the
            probability.
        meaning: what a probability says.
        tokens: each answer's token ids, without those that begin and end it; None without a decoder.
        ended: whether the first answer ended by itself, rather than at the longest length.
    """

    texts: tuple[str, ...]
    probabilities: tuple[float, ...]
    logs: tuple[float, ...]
    meaning: str
    tokens: tuple[tuple[int, ...], ...] | None = None
    ended: bool = True


def from_vocabulary(logits: Tensor, config: ImageQAConfig, asking: Asking) -> list[Found]:
    """The best of the model's own list, by its logits `(Q, A)`; of the candidates among it where these are given.

    Raises InputError for candidates outside the list, settings of a decoder, and logits that are not finite.
    """
    if asking.beams or asking.max_tokens or asking.shortlist or asking.normalise_length:
        raise InputError(
            "beams, max_tokens, shortlist and normalise_length are settings of a decoder; this model scores a list"
        )
    scores = logits.cpu().double()
    if not scores.isfinite().all():
        raise _not_finite(logits.dtype)
    names, meaning = config.answers, f"share among the model's {len(config.answers)} answers"
    if asking.candidates is not None:
        names, places = check_candidates(asking.candidates), {name: i for i, name in enumerate(config.answers)}
        if unknown := [name for name in names if name not in places]:
            raise InputError(f"{unknown[0]!r} is no answer of this model; it has {_some(config.answers)}")
        scores = scores[:, [places[name] for name in names]]
        meaning = f"share among {len(names)} candidates"
    if config.score == "sigmoid":
        logs, meaning = torch.nn.functional.logsigmoid(scores), "this answer alone is right"
    else:
        logs = scores.log_softmax(dim=-1)
    best = logs.topk(min(asking.top, len(names)), dim=-1)
    return [
        Found(tuple(names[i] for i in chosen), tuple(values.exp().tolist()), tuple(values.tolist()), meaning)
        for values, chosen in zip(best.values, best.indices.tolist(), strict=True)
    ]


def from_candidates(
    decoder: TextDecoder, tokenizer: TextTokenizer, states: Tensor, visible: Tensor | None, asking: Asking
) -> list[Found]:
    """Rank the candidates by what the decoder makes of the questions' states `(Q, T, D)`.

    The shares of a question sum to 1. Raises InputError for candidates that are no list to choose from (see
    `check_candidates` and `candidate_tokens`), settings of writing, and scores that are not finite.
    """
    if asking.beams or asking.max_tokens:
        raise InputError(
            "beams and max_tokens are for written answers; candidates are ranked, and so is the list of a model"
            " whose head is 'rank'"
        )
    if asking.candidates == ():
        raise InputError("this model chooses from a list and has no answers of its own; give candidates")
    names = check_candidates(asking.candidates or ())
    tokens = candidate_tokens(names, decoder, tokenizer)
    logs = rank(decoder, decoder.remember(states), visible, tokens, shortlist=asking.shortlist).cpu().double()
    ranked = min(asking.shortlist or len(names), len(names))
    if (logs.isfinite().sum(dim=1) < ranked).any():
        raise _not_finite(states.dtype)
    meaning = f"share among {len(names)} candidates"
    if ranked < len(names):
        meaning += f", {ranked} of them ranked"
    if asking.normalise_length:
        meaning += ", by log-probability per token"
    lengths = torch.tensor([len(ids) + 1 for ids in tokens])  # the end is a token too
    scores = logs / lengths if asking.normalise_length else logs
    shares, found = scores.softmax(dim=-1), []
    orders = scores.argsort(dim=-1, descending=True, stable=True)[:, : asking.top]
    for row, places in enumerate(orders.tolist()):
        found.append(
            Found(
                tuple(names[i] for i in places),
                tuple(shares[row, places].tolist()),
                tuple(logs[row, places].tolist()),
                meaning,
                tuple(tokens[i] for i in places),
            )
        )
    return found


def written(
    decoder: TextDecoder, tokenizer: TextTokenizer, states: Tensor, visible: Tensor | None, asking: Asking
) -> list[Found]:
    """Let the decoder write; its probability of a text is that of writing exactly this and ending.

    Raises InputError for settings of ranking, more tokens than the decoder has places, and scores that are not finite.
    """
    if asking.shortlist or asking.normalise_length:
        raise InputError("shortlist and normalise_length choose among candidates; give candidates")
    config = decoder.config
    tokens = config.max_tokens if asking.max_tokens is None else asking.max_tokens
    if not config.min_tokens < tokens <= config.text.max_tokens:
        raise InputError(
            f"max_tokens is {tokens}; this decoder writes {config.min_tokens + 1} to {config.text.max_tokens} tokens,"
            " the end counted"
        )
    config = replace(config, beams=asking.beams or config.beams, max_tokens=tokens)
    found = []
    for beam in generate(decoder, decoder.remember(states), visible, config):
        if not beam or not all(math.isfinite(one.log_probability) for one in beam):
            raise _not_finite(states.dtype)
        texts = _by_text(beam, tokenizer)[: asking.top]
        logs = tuple(log for _, log, _ in texts)
        found.append(
            Found(
                tuple(text for text, _, _ in texts),
                tuple(map(math.exp, logs)),
                logs,
                "the decoder writes exactly this" if beam[0].ended else "the decoder begins with exactly this",
                tuple(best.ids for _, _, best in texts),
                beam[0].ended,
            )
        )
    return found


def _by_text(beam: Sequence[Written], tokenizer: TextTokenizer) -> list[tuple[str, float, Written]]:
    """Each text with its log-probability and the best of the tokens that spell it, in the order of the search.

    Tokens that differ may spell one text, as a whole word and its pieces do; it is one answer to whoever asked, and
    what is known of its probability is the sum. A text that was cut is not one that ended, and tokens that no text
    shows are no other way to spell it: these answers stand by themselves.
    """
    ways: dict[tuple[str, bool, tuple[int, ...]], list[Written]] = {}
    for one in beam:
        unseen = tuple(i for i in one.ids if tokenizer.is_special(i))
        ways.setdefault((tokenizer.decode(one.ids), one.ended, unseen), []).append(one)
    return [(text, _added(one.log_probability for one in same), same[0]) for (text, _, _), same in ways.items()]


def _added(logs: Iterable[float]) -> float:
    """The logarithm of a sum of probabilities."""
    largest, *others = sorted(logs, reverse=True)
    return largest + math.log1p(math.fsum(math.exp(log - largest) for log in others))


def check_candidates(candidates: Sequence[str]) -> tuple[str, ...]:
    """The candidates, if they are a list to choose from. Raises InputError for none, a blank, or a text twice."""
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise InputError("candidates must be a list of texts")
    names = tuple(candidates)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise InputError(f"candidates holds {odd[0]!r}, which is no text")
    if not names:
        raise InputError("candidates is empty; give at least one answer to choose from")
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise InputError(f"candidate {number} is blank")
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise InputError(f"candidate {number} holds half a character (a lone surrogate); repair its encoding")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"candidate {twice!r} is given twice; its share would be split")
    return names


def candidate_tokens(names: Sequence[str], decoder: TextDecoder, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """Each candidate as token ids.

    Raises InputError for one too long for the decoder, read like another, or with a word that the vocabulary lacks.
    """
    tokens, longest = tokenizer.answers(names), decoder.config.text.max_tokens - 1  # a place is the first token's
    seen: dict[tuple[int, ...], str] = {}
    for name, ids in zip(names, tokens, strict=True):
        if len(ids) > longest:
            raise InputError(
                f"candidate {name[:40]!r} has {len(ids)} tokens, the decoder has places for {longest}; shorten it"
            )
        if not ids:
            raise InputError(f"candidate {name!r} has no token that the tokenizer knows")
        if tokenizer.unknown_id in ids:
            raise InputError(
                f"candidate {name[:40]!r} has a word that this model's vocabulary lacks, so it cannot be written;"
                " leave it out or say it otherwise"
            )
        if ids in seen:
            raise InputError(f"candidates {seen[ids]!r} and {name!r} are the same tokens to this model; give one")
        seen[ids] = name
    return tokens


def _not_finite(dtype: torch.dtype) -> InputError:
    if dtype == torch.float16:
        return InputError(
            "the scores are not finite: float16 ends at 65504, and this model goes beyond; use torch.bfloat16 or"
            " torch.float32"
        )
    return InputError(f"the scores are not finite numbers in {dtype}; the weights or the picture are not either")


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
