"""Answers as a decoder is to write them: tokens, the share of annotators behind each, and the loss.

Q questions, T question tokens, R answers of all of them, t answer tokens, n tokens to be predicted, D width, V
vocabulary. Here alone an answer becomes tokens for training: it begins with the decoder's first token in place of the
tokenizer's own, ends with its last, and is shifted once.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.crossattn import TextTokenizer
from regard.crossattn.decoder import DecoderConfig, TextDecoder
from regard.datasets import Question, QuestionSet


@dataclass
class WrittenAnswers:
    """R answers of Q questions.

    Attributes:
        ids: `(R, t)`, the first token, then the answer, then the end, then padding, which nothing reads.
        weights: share of the annotators behind each answer `(R,)`.
        of: the question of each answer `(R,)`, rising.
        shares: how many answers each question has, Q numbers.
        rows, places, following: the answer each token to be predicted belongs to, the place it is predicted from, and
            the token, `(n,)` each. Known before the batch reaches its device, so that nothing waits there.
    """

    ids: Tensor
    weights: Tensor
    of: Tensor
    shares: tuple[int, ...]
    rows: Tensor
    places: Tensor
    following: Tensor

    @classmethod
    def made(
        cls, answers: Sequence[Sequence[tuple[tuple[int, ...], float]]], first: int, last: int, padding: int
    ) -> "WrittenAnswers":
        """From the tokens and the weight of each answer of each question."""
        flat = [(question, ids, part) for question, own in enumerate(answers) for ids, part in own]
        longest = max((len(ids) for _, ids, _ in flat), default=0) + 2
        table = torch.full((len(flat), longest), padding)
        for row, (_, ids, _) in enumerate(flat):
            table[row, : len(ids) + 2] = torch.tensor([first, *ids, last])
        lengths = torch.tensor([len(ids) + 1 for _, ids, _ in flat], dtype=torch.long)
        rows = torch.arange(len(flat)).repeat_interleave(lengths)
        places = torch.cat([torch.arange(0), *(torch.arange(length) for length in lengths.tolist())])
        return cls(
            ids=table,
            weights=torch.tensor([part for _, _, part in flat]),
            of=torch.tensor([question for question, _, _ in flat], dtype=torch.long),
            shares=tuple(map(len, answers)),
            rows=rows,
            places=places,
            following=table[rows, places + 1],
        )


class AnswerWriter:
    """Turns the answers of a question set into `WrittenAnswers`.

    An answer that the tokenizer cannot spell, or that is longer than the decoder, teaches nothing; `left_out` counts
    them.
    """

    def __init__(self, questions: QuestionSet, tokenizer: TextTokenizer, config: DecoderConfig):
        self.config, self.padding = config, tokenizer.pad_id
        given = Counter(a for image in questions.images for question in image.questions for a in question.answers)
        spelled = spellings(list(given), tokenizer, config)
        self.spelled = {text: ids for text, ids in spelled.items() if ids is not None}
        self.left_out = Counter({text: count for text, count in given.items() if text not in self.spelled})

    def __call__(self, questions: Sequence[Question]) -> WrittenAnswers:
        """The answers of Q questions, each once, however many annotators gave it."""
        return WrittenAnswers.made(
            [self._of(question) for question in questions], self.config.first, self.config.last, self.padding
        )

    def columns(self, answers: Sequence[str], tokenizer: TextTokenizer) -> dict[str, int]:
        """The place in a list of the model's answers of each answer of the question set that is spelled alike."""
        own = {ids: column for column, ids in enumerate(spellings(answers, tokenizer, self.config).values())}
        return {text: own[ids] for text, ids in self.spelled.items() if ids in own}

    def _of(self, question: Question) -> list[tuple[tuple[int, ...], float]]:
        counted = Counter(self.spelled[answer] for answer in question.answers if answer in self.spelled)
        return [(ids, count / len(question.answers)) for ids, count in counted.items()]


def spellings(
    answers: Sequence[str], tokenizer: TextTokenizer, config: DecoderConfig
) -> dict[str, tuple[int, ...] | None]:
    """The token ids of each answer, without those that begin and end it; None for one that cannot be written."""
    longest = config.text.max_tokens - 1  # a place is the first token's

    def fits(ids: tuple[int, ...]) -> bool:
        return 0 < len(ids) <= longest and tokenizer.unknown_id not in ids

    return {a: ids if fits(ids) else None for a, ids in zip(answers, tokenizer.answers(answers), strict=True)}


def written_loss(
    decoder: TextDecoder, states: Tensor, visible: Tensor | None, answers: WrittenAnswers, smoothing: float = 0.0
) -> Tensor:
    """The loss of each question `(Q,)`, in fp32 or wider, as BLIP is trained (Li et al., 2022, arXiv:2201.12086).

    For each answer the sum over its tokens, the end included, of the cross-entropy, each token being predicted from
    those before it; times the answer's weight; summed over the answers of the question. A question is read once, and
    its keys and values serve all its answers. One without an answer that can be written has loss 0.

    Args:
        states: what the questions are after reading their images, `(Q, T, D)`.
        visible: which of their tokens may be read, bool `(Q, T)`; None for all.
        smoothing: label smoothing, on every token.
    """
    if not len(answers.ids):
        return states.flatten(1).sum(dim=1) * 0.0
    inputs = answers.ids[:, :-1]
    even = len(set(answers.shares)) == 1
    read = decoder(inputs, decoder.remember(states), visible, None if even else answers.shares)
    chosen = read.flatten(0, 1).index_select(0, answers.rows * inputs.shape[1] + answers.places)
    logits = decoder.logits(chosen)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, answers.following, reduction="none", label_smoothing=smoothing)
    weighted = losses * answers.weights.to(losses.dtype)[answers.rows]
    return losses.new_zeros(len(answers.shares)).index_add(0, answers.of[answers.rows], weighted)


def wanted_texts(question: Question) -> frozenset[str]:
    """The answers that most annotators gave, as `plain_text`; none where the answer is unknown."""
    counted = Counter(map(plain_text, question.answers))
    return frozenset(text for text, count in counted.items() if count == max(counted.values()))


def plain_text(text: str) -> str:
    """A text as two spellings of one answer agree: lower case, no accents, no spaces but between words."""
    letters = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(letters.split()))
