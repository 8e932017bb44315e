"""Image question answering: look once, ask many.

`memory = model.look(pictures)` encodes each picture once and projects its keys and values once per layer;
`model.ask(memory, questions)` reads that memory with any number of questions. Training takes the same way:
`remember`, then `logits`.  B images, N image tokens, Q questions, T text tokens, D width, A answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.crossattn.answers import Answer, arrange, rearrange
from regard.crossattn.config import ImageQAConfig, preset_config
from regard.crossattn.memory import Memory
from regard.crossattn.text import TextEncoder
from regard.crossattn.tokenizer import EncodedQuestions, TextTokenizer
from regard.crossattn.words import WordMaps
from regard.vit import checkpoint
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.preprocess import Picture, Preprocess
from regard.vit.tokens import Tokens

TOKENIZER = "tokenizer.json"


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
        vit: "Mapping[str, Any] | ViT | str | Path | nn.Module | None" = None,
        text: dict[str, Any] | None = None,
    ) -> "ImageQA":
        """A new model of a named size with random weights; its tokenizer is learned from `questions`.

        `demo` reads 64 x 64 images and trains in minutes on a CPU. `vit` and `text` change any field of `ViTConfig`
        and `TextConfig`; another `image_size` is preprocessed to, unless `preprocess` says otherwise. `vit` may instead
        be a pretrained image side: a `ViT`, or anything that `ViT.from_pretrained` opens.
        Raises InputError for an unknown preset or field.
        """
        tokenizer = TextTokenizer.train(questions)
        side: ViT | None = None
        fields: ViTConfig | Mapping[str, Any] = vit if isinstance(vit, Mapping) else {}
        if vit is not None and not isinstance(vit, Mapping):
            side = (vit if isinstance(vit, ViT) else ViT.from_pretrained(vit)).as_encoder()
            fields = side.config
        config = preset_config(
            name, vocab_size=len(tokenizer), answers=answers, score=score, vit=fields, text=text or {}
        )
        model = cls(config, tokenizer)
        if side is not None:
            model.vit = side.train(model.training)
        return model

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
        """Initialise every weight anew, the ViT's included."""
        self.vit.reset_parameters()
        self.text.reset_parameters()
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    # Looking

    @torch.inference_mode()
    def look(self, pictures: Picture | Sequence[Picture | None] | None) -> Memory:
        """Encode each picture once; the memory can be asked any number of questions.

        A picture is anything `Preprocess` takes, or a preprocessed float tensor `(C, height, width)`; None stands for
        "no image". A float tensor `(B, C, height, width)` is a batch. Sizes may differ.
        """
        with self._evaluating():
            return self.remember(self._tensors(pictures))

    def remember(self, images: Tensor | Sequence[Tensor | None]) -> Memory:
        """Preprocessed images to a memory, with gradients in training: the road that `look` takes too.

        `images` is `(B, C, height, width)`, or a list of `(C, height, width)`, of any sizes, with None for "no image".
        """
        if isinstance(images, Tensor):
            tokens = self.vit(images)
            return self._project(_context(tokens), None, (tokens.grid,) * len(images))
        shapes = {image.shape for image in images if image is not None}
        if len(shapes) == 1 and all(image is not None for image in images):
            return self.remember(torch.stack([image for image in images if image is not None]))
        contexts = [self.head.weight.new_zeros(0, self.config.vit.dim)] * len(images)
        grids: list[tuple[int, int] | None] = [None] * len(images)
        for shape in shapes:  # one pass per size; the memory pads the shorter ones
            rows = {i: image for i, image in enumerate(images) if image is not None and image.shape == shape}
            tokens = self.vit(torch.stack(list(rows.values())))
            for row, context in zip(rows, _context(tokens), strict=True):
                contexts[row], grids[row] = context, tokens.grid
        longest = max(1, *(len(context) for context in contexts))
        lengths = torch.tensor([len(context) for context in contexts], device=contexts[0].device)
        padded = torch.stack([F.pad(context, (0, 0, 0, longest - len(context))) for context in contexts])
        return self._project(padded, torch.arange(longest, device=padded.device) < lengths[:, None], tuple(grids))

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
        if not isinstance(top, int) or top < 1:
            raise InputError(f"top is {top}; ask for at least the best answer")
        if not isinstance(memory, Memory):
            raise InputError(f"ask reads the memory that `look` returns, not a {type(memory).__name__}")
        flat, of = arrange(questions, len(memory))
        if not flat:
            return rearrange([], questions)
        encoded = self.tokenizer(flat, self.config.text.max_tokens)
        asked: list[Tensor] = []
        per_image = [of.count(image) for image in range(len(memory))]
        in_shares = None if len(set(per_image)) == 1 else torch.tensor(of)
        with self._evaluating():
            logits = self.logits(memory, encoded.ids, encoded.mask, in_shares, asked=asked)
        return rearrange(self._answers(flat, of, encoded, memory, logits.float(), asked, top), questions)

    def logits(
        self,
        memory: Memory,
        ids: Tensor,
        mask: Tensor,
        of: Tensor | None = None,
        *,
        asked: list[Tensor] | None = None,
    ) -> Tensor:
        """Scores of every answer, `(Q, A)`: `ids` and `mask` are `(Q, T)`, `of (Q,)` names each question's image.

        Without `of` each image has an equal share of the questions, in order; this copies no keys or values.
        """
        offered = [(kv.k.shape[1], kv.k.shape[3]) for kv in memory.layers]
        expected = [(cross.attn.heads, cross.attn.head_dim) for cross in self.text.asking]
        if offered != expected:
            raise InputError(
                f"this memory has (heads, head width) {offered} in its layers, this model asks {expected}: "
                "another model made it; look at the picture with this one"
            )
        device = self.head.weight.device
        ids, mask, of = ids.to(device), mask.to(device), None if of is None else of.to(device)
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


def _context(tokens: Tokens) -> Tensor:
    """What the words ask, `(B, N, D)`: class token, registers, patches."""
    cls = [] if tokens.cls is None else [tokens.cls[:, None]]
    return torch.cat([*cls, tokens.registers, tokens.patches], dim=1)
