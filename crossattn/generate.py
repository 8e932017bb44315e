"""A decoder writes answers: greedily, or following several at once (beam search).

At each step every answer followed is tried with every next token; the `beams` likeliest that do not end are followed
further, and those that end are kept, compared by log-probability / length ** length_penalty. A question is done when no
answer it follows could, at its present length, beat the worst of `beams` kept ones. These are the rules of the beam
search of transformers, so the same weights write the same answers. Greedy decoding is the search with one beam.

Q questions, b answers followed for each, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.crossattn.chances import best_next
from regard.crossattn.decoder import DecoderConfig, TextDecoder
from regard.crossattn.text import Cache
from regard.vit.attention import KeysValues


@dataclass(frozen=True)
class Written:
    """An answer as token ids, without those that begin and end it.

    Attributes:
        log_probability: the exact sum over its tokens, the end included if it has one.
        ended: whether it ended by itself, rather than at the longest length.
    """

    ids: tuple[int, ...]
    log_probability: float
    ended: bool

    def score(self, length_penalty: float) -> float:
        """What the search compares; the end counts as a token."""
        return self.log_probability / (len(self.ids) + self.ended) ** length_penalty


@dataclass
class _Search:
    """The search for one question.

    Attributes:
        live: log-probability and token ids of the answers followed, best first.
        done: the best of those that ended, best first.
    """

    live: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    done: list[Written] = field(default_factory=list)

    def step(self, config: DecoderConfig, logs: list[float], parents: list[int], ids: list[int]) -> list[int]:
        """Take the likeliest continuations, best first; returns which of the live answers each next one continues."""
        length = len(self.live[0][1]) + 1
        if math.isnan(logs[0]):  # first, where there is one: nothing that follows would mean anything
            self.live, self.done = [], []
            return []
        live: list[tuple[float, tuple[int, ...]]] = []
        chosen: list[int] = []
        for place, (log, parent, token) in enumerate(zip(logs, parents, ids, strict=True)):
            before, ends = self.live[parent][1], token == config.last
            if ends or length == config.max_tokens:
                # An end less likely than as many others is no contender; one that is forbidden has -inf.
                if place < config.beams and log > -math.inf:
                    self.done.append(Written(before if ends else (*before, token), log, ends))
            elif len(live) < config.beams:
                live.append((log, (*before, token)))
                chosen.append(parent)
        self.done = sorted(self.done, key=lambda written: -written.score(config.length_penalty))[: config.beams]
        self.live = live
        if len(self.done) == config.beams and live:
            hope = live[0][0] / length**config.length_penalty
            if hope <= self.done[-1].score(config.length_penalty):
                self.live = []
        return chosen if self.live else []


@torch.no_grad()
def generate(
    decoder: TextDecoder, kept: tuple[KeysValues, ...], visible: Tensor | None, config: DecoderConfig
) -> list[list[Written]]:
    """The best answers to each question, at most `config.beams`, best first; none where the scores are not numbers.

    Args:
        kept: what `decoder.remember` made of the questions' states, of Q questions. It is held once per question.
        visible: which of a question's tokens may be read, bool `(Q, T)`; None for all.
        config: how to search; its `text` is the decoder's own.
    """
    device, questions = kept[0].k.device, len(kept[0])
    searches = [_Search() for _ in range(questions)]
    running = list(range(questions))
    ids = torch.full((questions, 1), config.first, device=device)
    scores, cache = torch.zeros(questions, 1, device=device), Cache()  # scores (Q, b)
    for length in range(config.max_tokens):
        states = decoder(ids, kept, visible, cache=cache)[:, -1]
        logs, tokens, parents = _continuations(decoder, states, scores, config, length < config.min_tokens)
        chosen = [
            searches[question].step(config, *row)
            for question, *row in zip(running, logs.tolist(), parents.tolist(), tokens.tolist(), strict=True)
        ]
        going = [i for i, rows in enumerate(chosen) if rows]
        if not going:
            break
        b = scores.shape[1]
        cache.choose(torch.tensor([i * b + row for i in going for row in chosen[i]], device=device))
        if len(going) < len(running):  # a question that is done costs nothing more
            rows = torch.tensor(going, device=device)
            kept, visible = tuple(kv[rows] for kv in kept), None if visible is None else visible[rows]
            running = [running[i] for i in going]
        live = [searches[question].live for question in running]
        ids = torch.tensor([[answer[-1]] for answers in live for _, answer in answers], device=device)
        scores = torch.tensor([[log for log, _ in answers] for answers in live], device=device, dtype=logs.dtype)
    return [search.done for search in searches]


def _continuations(
    decoder: TextDecoder, states: Tensor, scores: Tensor, config: DecoderConfig, must_go_on: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest continuations of each question's answers, best first, each `(Q, up to 2 * beams)`: log-probability,
    token and which answer it continues.

    Twice as many as are followed: however many of them end, enough do not. One beam is done with its first end.
    """
    vocab = decoder.config.text.vocab_size
    count = 1 if config.beams == 1 else min(2 * config.beams, vocab)
    logs, tokens = best_next(decoder, states, count, config.last if must_go_on else None)
    logs = (scores.to(logs.dtype).flatten()[:, None] + logs).view(len(scores), -1)
    best = logs.topk(min(2 * config.beams, logs.shape[1]), dim=-1)
    return best.values, tokens.view(len(scores), -1).gather(1, best.indices), best.indices // count
