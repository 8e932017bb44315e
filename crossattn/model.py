"""Image question answering: look once, ask many.

`memory = model.look(pictures)` encodes each picture once and projects its keys and values once per layer;
`model.ask(memory, questions)` reads that memory with any number of questions. Training takes the same way:
`remember`, then `logits`.  B images, N image tokens, Q questions, T text tokens, D width, A answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.crossattn.memory import Memory
from regard.crossattn.text import TextConfig, TextEncoder, check_choices
from regard.crossattn.tokenizer import EncodedQuestions, TextTokenizer
from regard.crossattn.words import WordMaps
from regard.vit import checkpoint
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.preprocess import Picture, Preprocess
from regard.vit.tokens import Tokens

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ImageQAConfig:
    """A ViT, a text encoder that asks it, and a closed list of answers.

    Attributes:
        vit: the image side.
        text: the text side.
        answers: the answers the model can give, in the order of its logits.
        score: how logits become probabilities, and so how the model is trained: `softmax` (one right answer) or
            `sigmoid` (several may be right).
    """

    vit: ViTConfig
    text: TextConfig
    answers: tuple[str, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"

    def __post_init__(self) -> None:
        check_choices(self, "score")
        if not self.answers:
            raise InputError("ImageQAConfig.answers is empty; a model needs at least one answer to give")
        if odd := [a for a in self.answers if not isinstance(a, str)]:
            raise InputError(f"ImageQAConfig.answers holds {odd[0]!r}, which is no text")
        if len(set(self.answers)) < len(self.answers):
            twice = next(a for i, a in enumerate(self.answers) if a in self.answers[:i])
            raise InputError(f"ImageQAConfig.answers holds {twice!r} twice")


@dataclass(frozen=True)
class Answer:
    """An answer with its evidence.

    Attributes:
        text: the likeliest answer.
        probability: its probability: over all answers for a `softmax` model, of this one alone for `sigmoid`.
        top: the likeliest answers with their probabilities, best first.
        attention: each word of the question -> where it looked, `(grid height, grid width)`.
        question: the question.
        unknown: words of the question that the model's vocabulary lacks; distrust the answer if there are any.
    """

    text: str
    probability: float
    top: tuple[tuple[str, float], ...]
    attention: WordMaps = field(compare=False)
    question: str
    unknown: tuple[str, ...]


class ImageQA(nn.Module):
    """Answers questions about images from a closed list of answers."""

    def __init__(self, config: ImageQAConfig, tokenizer: TextTokenizer):
        super().__init__()
        if len(tokenizer) != config.text.vocab_size:
            raise InputError(
                f"the tokenizer has {len(tokenizer)} tokens, the configuration says {config.text.vocab_size}"
            )
        self.config, self.tokenizer = config, tokenizer
        self.vit = ViT(config.vit)
        self.text = TextEncoder(config.text, context_dim=config.vit.dim)
        self.head = nn.Linear(config.text.dim, len(config.answers))
        self.reset_parameters()

    @classmethod
    def preset(
        cls,
        name: str = "demo",
        *,
        questions: Sequence[str],
        answers: Sequence[str],
        score: Literal["softmax", "sigmoid"] = "softmax",
        vit: dict[str, Any] | None = None,
        text: dict[str, Any] | None = None,
    ) -> "ImageQA":
        """A new model of a named size with random weights; its tokenizer is learned from `questions`.

        `demo` reads 64 x 64 images and trains in minutes on a CPU. `vit` and `text` change any field of `ViTConfig`
        and `TextConfig`; another `image_size` is preprocessed to, unless `preprocess` says otherwise.
        Raises InputError for an unknown preset or field.
        """
        if name not in _PRESETS:
            raise InputError(f"no ImageQA preset is called {name!r}; choose one of {', '.join(_PRESETS)}")
        if isinstance(answers, str):
            raise InputError("answers is one text; give a list of answers")
        sizes, vit = _PRESETS[name], dict(vit or {})
        if "image_size" in vit:
            vit.setdefault("preprocess", replace(sizes.vit.preprocess, size=vit["image_size"]))
        tokenizer = TextTokenizer.train(questions)
        config = ImageQAConfig(
            vit=_changed(sizes.vit, vit),
            text=_changed(replace(sizes.text, vocab_size=len(tokenizer)), text or {}),
            answers=tuple(answers),
            score=score,
        )
        return cls(config, tokenizer)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "ImageQA":
        """Open a folder, or a hub repository, written by `save_pretrained`; in inference mode.

        Raises InputError for anything missing, unused, renamed, of another shape, or pickled.
        """
        folder = checkpoint.find(source)
        config = checkpoint.read_config(folder, ImageQAConfig)  # a wrong folder is better told by its passport
        tokenizer = TextTokenizer.from_file(folder / TOKENIZER)
        if len(tokenizer) != config.text.vocab_size:
            raise InputError(
                f"{folder / TOKENIZER}: {len(tokenizer)} tokens, {checkpoint.CONFIG} says {config.text.vocab_size}"
            )
        return checkpoint.load(folder, ImageQAConfig, lambda config: cls(config, tokenizer))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors` and `tokenizer.json`, whole or not at all."""
        checkpoint.save(folder, self.config, self, {TOKENIZER: self.tokenizer.save})

    def reset_parameters(self) -> None:
        """Initialise the text side as the ViT does its own: truncated normal 0.02, biases 0."""
        for module in (*self.text.modules(), self.head):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.text.positions, std=0.02)

    # Looking

    @torch.inference_mode()
    def look(self, pictures: Picture | Sequence[Picture | None] | None) -> Memory:
        """Encode each picture once; the memory can be asked any number of questions.

        A picture is anything `Preprocess` takes, or a preprocessed float tensor `(C, height, width)`; None stands for
        "no image". A float tensor `(B, C, height, width)` is a batch. Sizes may differ.
        """
        batch = self._tensors(pictures)
        with self._evaluating():
            shapes = {tuple(t.shape) for t in batch if t is not None}
            if len(shapes) == 1 and None not in batch:
                return self.remember(torch.stack([t for t in batch if t is not None]))
            encoded: dict[int, Tokens] = {}
            for shape in shapes:
                rows = {i: t for i, t in enumerate(batch) if t is not None and tuple(t.shape) == shape}
                tokens = self.vit(torch.stack(list(rows.values())))
                encoded |= {row: _one(tokens, n) for n, row in enumerate(rows)}
            return self._remember_padded([encoded.get(i) for i in range(len(batch))])

    def remember(self, images: Tensor) -> Memory:
        """Preprocessed images of one size, `(B, C, height, width)`, to a memory, with gradients in training."""
        tokens = self.vit(images)
        return self._project(_context(tokens), None, (tokens.grid,) * len(images))

    def _remember_padded(self, encoded: list[Tokens | None]) -> Memory:
        weight = self.head.weight
        contexts = [
            weight.new_zeros(0, self.config.vit.dim) if tokens is None else _context(tokens)[0] for tokens in encoded
        ]
        longest = max(1, *(len(c) for c in contexts))
        padded = torch.stack([F.pad(c, (0, 0, 0, longest - len(c))) for c in contexts])
        lengths = torch.tensor([len(c) for c in contexts], device=padded.device)
        visible = torch.arange(longest, device=padded.device) < lengths[:, None]
        return self._project(padded, visible, tuple(None if t is None else t.grid for t in encoded))

    def _project(self, context: Tensor, visible: Tensor | None, grids: tuple[tuple[int, int] | None, ...]) -> Memory:
        layers = tuple(cross.remember(context) for cross in self.text.asking)
        return Memory(layers, visible, grids, int(self.config.vit.class_token), self.config.vit.registers)

    # Asking

    @overload
    def ask(self, memory: Memory, questions: str, *, top: int = 5) -> Answer: ...
    @overload
    def ask(self, memory: Memory, questions: list[str], *, top: int = 5) -> list[Answer]: ...
    @overload
    def ask(self, memory: Memory, questions: list[list[str]], *, top: int = 5) -> list[list[Answer]]: ...
    @torch.inference_mode()
    def ask(self, memory: Memory, questions: Any, *, top: int = 5) -> Any:
        """Ask remembered images; an answer depends on its own image and question only.

        `questions` is one question, or a list asked of the only image, or one question for each image, or a list of
        questions for each image. Returns `Answer` in the same arrangement.
        Raises InputError for an empty or too long question, or lists that do not fit the number of images.
        """
        if top < 1:
            raise InputError(f"top is {top}; ask for at least the best answer")
        flat, of = _arrange(questions, len(memory))
        if not flat:
            return [] if not _nested(questions) else [[] for _ in questions]
        encoded = self.tokenizer(flat, self.config.text.max_tokens)
        asked: list[Tensor] = []
        with self._evaluating():
            logits = self.logits(memory, encoded.ids, encoded.mask, torch.tensor(of), asked=asked)
        answers = self._answers(flat, of, encoded, memory, logits.float(), asked, top)
        if isinstance(questions, str):
            return answers[0]
        if not _nested(questions):
            return answers
        queue = iter(answers)
        return [[next(queue) for _ in group] for group in questions]

    def logits(
        self, memory: Memory, ids: Tensor, mask: Tensor, of: Tensor, *, asked: list[Tensor] | None = None
    ) -> Tensor:
        """Scores of every answer, `(Q, A)`: `ids` and `mask` are `(Q, T)`, `of (Q,)` names each question's image."""
        device = self.head.weight.device
        ids, mask, of = ids.to(device), mask.to(device), of.to(device)
        states = self.text(ids, mask, memory.layers, memory.visible, of, asked)
        return self.head(self.text.pool(states, mask))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits to probabilities as the model was trained: over all answers, or of each alone."""
        return logits.softmax(dim=-1) if self.config.score == "softmax" else logits.sigmoid()

    def _answers(
        self,
        questions: list[str],
        of: list[int],
        encoded: EncodedQuestions,
        memory: Memory,
        logits: Tensor,
        asked: list[Tensor],
        top: int,
    ) -> list[Answer]:
        attentions = [cross.attn for cross in self.text.asking]
        best = self.probabilities(logits).topk(min(top, logits.shape[-1]), dim=-1)
        answers = []
        for row, question in enumerate(questions):
            ranked = tuple(
                (self.config.answers[i], p)
                for p, i in zip(best.values[row].tolist(), best.indices[row].tolist(), strict=True)
            )
            length = int(encoded.mask[row].sum())
            queries = [q[row : row + 1, :, :length] for q in asked]
            maps = WordMaps(encoded.words[row], queries, memory[of[row]], attentions)
            answers.append(Answer(*ranked[0], ranked, maps, question, encoded.unknown[row]))
        return answers

    # Small parts

    @property
    def preprocess(self) -> Preprocess:
        """Turns a picture into the tensor this model expects."""
        return self.config.vit.preprocess

    def _tensors(self, pictures: Any) -> list[Tensor | None]:
        """Each picture as a preprocessed `(C, height, width)` on the model's device, None for none."""
        if isinstance(pictures, Tensor) and pictures.dim() == 4:
            pictures = list(pictures)
        elif not isinstance(pictures, (list, tuple)):
            pictures = [pictures]
        if any(isinstance(p, (list, tuple)) for p in pictures):
            raise InputError("look was given a list within a list; give one picture each, or None")
        weight = self.head.weight
        prepared = [
            p if p is None or (isinstance(p, Tensor) and p.is_floating_point()) else self.preprocess(p)[0]
            for p in pictures
        ]
        if not prepared:
            raise InputError("look was given no pictures")
        return [p if p is None else p.to(weight.device, weight.dtype) for p in prepared]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            yield
        finally:
            for module in training:  # each by itself: a frozen part may stand in inference mode within a training model
                module.training = True


@dataclass(frozen=True)
class _Sizes:
    vit: ViTConfig
    text: TextConfig


_PRESETS = {
    "demo": _Sizes(
        ViTConfig(
            image_size=(64, 64), patch_size=8, dim=128, depth=4, heads=4,
            preprocess=Preprocess(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3),
        ),
        TextConfig(vocab_size=1, dim=128, depth=2, heads=4, max_tokens=32),
    ),
}  # fmt: skip


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    known = set(config.__dataclass_fields__)
    if unknown := sorted(set(changes) - known):
        raise InputError(f"{type(config).__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return replace(config, **changes)


def _context(tokens: Tokens) -> Tensor:
    """What the words ask, `(B, N, D)`: class token, registers, patches."""
    cls = [] if tokens.cls is None else [tokens.cls[:, None]]
    return torch.cat([*cls, tokens.registers, tokens.patches], dim=1)


def _one(tokens: Tokens, row: int) -> Tokens:
    rows = slice(row, row + 1)
    cls = None if tokens.cls is None else tokens.cls[rows]
    return Tokens(cls, tokens.registers[rows], tokens.patches[rows], tokens.grid)


def _nested(questions: Sequence[Any]) -> bool:
    return not isinstance(questions, str) and any(not isinstance(q, str) for q in questions)


def _arrange(questions: Any, images: int) -> tuple[list[str], list[int]]:
    """Questions in any accepted arrangement as a flat list and the image number of each."""
    if not isinstance(questions, Sequence):
        raise InputError(f"questions must be a text or a list, not {type(questions).__name__}")
    if isinstance(questions, str):
        questions = [questions]
    if not _nested(questions):
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
