"""Questioned images as batches: pictures once, each with its questions.

B images, Q questions in the batch, T text tokens, A answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from regard.crossattn import TextTokenizer
from regard.crossattn.decoder import DecoderConfig
from regard.datasets import Question, QuestionSet, open_image
from regard.train.sampling import Draw, EvalBatches, TrainBatches, digest, sample_seed
from regard.train.workers import TellingData, loader_of
from regard.train.written import AnswerWriter, WrittenAnswers, wanted_texts
from regard.vit import Preprocess
from regard.vit.errors import InputError

_CACHE_BYTES = 1 << 30
_WORTH_FILLING = 1.25


@dataclass
class Batch:
    """B pictures and the Q questions about them.

    Attributes:
        pixels: uint8 `(B, C, height, width)`.
        ids, mask: question tokens `(Q, T)`, mask True on real tokens.
        of: the picture of each question `(Q,)`; None where each picture has an equal share of them, in order.
        targets: share of each answer `(Q, A)`; a row of zeros when no right answer is in the list.
        counts: True where a question is to be scored `(Q,)`; False on those that fill a share or an evaluation shard.
        image_ids: names of the pictures, for messages.
        written: the questions' answers, for a decoder to learn to write; None without one.
        wanted: for a decoder, the answers that most annotators gave to each question.
    """

    pixels: Tensor
    ids: Tensor
    mask: Tensor
    of: Tensor | None
    targets: Tensor
    counts: Tensor
    image_ids: list[str]
    written: WrittenAnswers | None = None
    wanted: list[frozenset[str]] = field(default_factory=list)


class QuestionBatches(Dataset[Batch]):
    """Makes a `Batch` from a list of draws; random choices are functions of (seed, epoch, image) alone.

    `answers` is the model's list, and `decoder` its decoder, for which answers become tokens.
    """

    def __init__(
        self,
        questions: QuestionSet,
        tokenizer: TextTokenizer,
        max_tokens: int,
        answers: Sequence[str],
        preprocess: Preprocess,
        *,
        seed: int,
        questions_per_image: int | None = None,
        shift: int = 0,
        keep: bool = False,
        decoder: DecoderConfig | None = None,
    ):
        self.images = questions.images
        self.preprocess, self.seed, self.shift = preprocess, seed, shift
        self.questions_per_image = questions_per_image
        self.writer = None if decoder is None else AnswerWriter(questions, tokenizer, decoder)
        self.n_answers = len(answers)
        self.columns = (
            {answer: column for column, answer in enumerate(answers)}
            if self.writer is None
            else self.writer.columns(answers, tokenizer)
        )
        texts = sorted(set(questions.question_texts()))
        _check_texts(questions, tokenizer, max_tokens)
        encoded = tokenizer(texts, max_tokens)
        self.rows = {text: row for row, text in enumerate(texts)}
        self.ids, self.mask = encoded.ids, encoded.mask
        self.unknown = Counter(word for words in encoded.unknown for word in words)
        self.kept: dict[int, Tensor] | None = {} if keep else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, draws: list[Draw]) -> Batch:
        """The whole batch at once (the data loader's batched fetch)."""
        return self._batch(draws, torch.stack([self._shifted(self._pixels(draw.index), draw) for draw in draws]))

    def fullest(self, images: int) -> Batch:
        """The largest batch of so many images, for its shapes: its pictures are blank."""
        limit = self.questions_per_image or max(len(image.questions) for image in self.images)
        asked = [min(len(image.questions), limit) for image in self.images]
        draws = [Draw(i) for i in sorted(range(len(asked)), key=asked.__getitem__, reverse=True)[:images]]
        assert self.preprocess.size is not None
        blank = torch.zeros(len(draws), len(self.preprocess.mean), *self.preprocess.size, dtype=torch.uint8)
        return self._batch(draws, blank)

    def _batch(self, draws: list[Draw], pixels: Tensor) -> Batch:
        chosen = [self._chosen(draw) for draw in draws]
        share, total = max(map(len, chosen)), sum(map(len, chosen))
        # Equal shares spare a copy of every image's keys and values per question; a few repeated questions are cheaper.
        even = all(chosen) and share * len(draws) <= _WORTH_FILLING * total
        asked: list[Question] = []
        of: list[int] = []
        counts: list[bool] = []
        shares: list[tuple[int, int, float]] = []
        for place, (draw, questions) in enumerate(zip(draws, chosen, strict=True)):
            fill = [questions[-1]] * (share - len(questions)) if even else []
            for number, question in enumerate([*questions, *fill]):
                shares += [(len(asked), column, part) for column, part in self._shares(question)]
                asked.append(question)
                of.append(place)
                counts.append(draw.valid and number < len(questions))
        rows = [self.rows[question.text] for question in asked]
        targets = torch.zeros(len(rows), self.n_answers)
        if shares:
            places, columns, parts = zip(*shares, strict=True)
            targets[list(places), list(columns)] = torch.tensor(parts)
        mask = self.mask[rows]
        longest = int(mask.sum(dim=1).max()) if rows else 0
        return Batch(
            pixels=pixels,
            ids=self.ids[rows, :longest],
            mask=mask[:, :longest],
            of=None if even else torch.tensor(of, dtype=torch.long),
            targets=targets,
            counts=torch.tensor(counts, dtype=torch.bool),
            image_ids=[self.images[draw.index].id for draw in draws],
            written=None if self.writer is None else self.writer(asked),
            wanted=[] if self.writer is None else [wanted_texts(question) for question in asked],
        )

    def _chosen(self, draw: Draw) -> Sequence[Question]:
        questions, limit = self.images[draw.index].questions, self.questions_per_image
        if limit is None or len(questions) <= limit:
            return questions
        generator = torch.Generator().manual_seed(sample_seed(self.seed, draw.epoch, draw.index))
        return [questions[i] for i in torch.randperm(len(questions), generator=generator)[:limit].tolist()]

    def _shares(self, question: Question) -> list[tuple[int, float]]:
        """The column of each answer in the list, and the share of annotators behind it."""
        counted = Counter(self.columns[answer] for answer in question.answers if answer in self.columns)
        return [(column, count / len(question.answers)) for column, count in counted.items()]

    def _pixels(self, index: int) -> Tensor:
        if self.kept is not None and index in self.kept:
            return self.kept[index]
        pixels = self.preprocess.pixels(open_image(self.images[index].path, background=self.preprocess.background))
        if self.kept is not None:
            self.kept[index] = pixels
        return pixels

    def _shifted(self, pixels: Tensor, draw: Draw) -> Tensor:
        """Move the picture by up to `shift` pixels each way; what comes in at the edge repeats it."""
        if not self.shift:
            return pixels
        generator = torch.Generator().manual_seed(sample_seed(self.seed + 1, draw.epoch, draw.index))
        top, left = torch.randint(0, 2 * self.shift + 1, (2,), generator=generator).tolist()
        height, width = pixels.shape[1:]
        rows = (torch.arange(height) + top - self.shift).clamp(0, height - 1)
        columns = (torch.arange(width) + left - self.shift).clamp(0, width - 1)
        return pixels[:, rows[:, None], columns]


class QuestionData(TellingData):
    """Training and held-out batches of one question set."""

    def __init__(
        self, training: QuestionBatches, held_out: QuestionBatches, *, batch_images: int, seed: int, workers: int
    ):
        super().__init__()
        self.training, self.held_out = training, held_out
        self.batch_images, self.seed, self.workers = batch_images, seed, workers

    def setup(self, stage: str) -> None:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self.train_batches = TrainBatches(len(self.training), self.batch_images, seed=self.seed, rank=rank, world=world)
        self.eval_batches = EvalBatches(len(self.held_out), 4 * self.batch_images, rank=rank, world=world)

    def identity(self) -> str:
        """A digest of the training questions, their answers, and the names of their images, in order."""
        asked = (q for image in self.training.images for q in (image.id, *image.questions))
        return digest(asked)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(self.training, self.train_batches, self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader_of(self.held_out, self.eval_batches, self.workers)


def fits_in_memory(n_images: int, preprocess: Preprocess) -> bool:
    """Whether all preprocessed pictures of a set may be kept as uint8."""
    if preprocess.size is None:
        return False
    height, width = preprocess.size
    return n_images * len(preprocess.mean) * height * width <= _CACHE_BYTES


def _check_texts(questions: QuestionSet, tokenizer: TextTokenizer, max_tokens: int) -> None:
    """Name the question, and its id, that the model could not read."""
    seen: set[str] = set()
    for image in questions.images:
        for question in image.questions:
            if question.text not in seen:
                seen.add(question.text)
                try:
                    tokenizer([question.text], max_tokens)
                except InputError as error:
                    raise InputError(f"{questions.name}, question {question.id}: {error}") from error
