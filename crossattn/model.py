"""Image question answering: look once, ask many.

`memory = model.look(pictures)` encodes each picture once and projects its keys and values once per layer;
`model.ask(memory, questions)` reads that memory with any number of questions. Training takes the same way:
`remember`, then `read`.  B items, N image tokens, Q questions, T text tokens, D width, A answers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from regard.crossattn import answering, looking
from regard.crossattn.answering import Asking, Found
from regard.crossattn.answers import Answer, arrange, rearrange
from regard.crossattn.config import ImageQAConfig, preset_config
from regard.crossattn.cross_attention import Shares
from regard.crossattn.decoder import TextDecoder
from regard.crossattn.memory import Memory
from regard.crossattn.rank import rank
from regard.crossattn.text import TextEncoder
from regard.crossattn.tokenizer import ANSWER, LAST, EncodedQuestions, TextTokenizer
from regard.crossattn.words import WordMaps
from regard.crossattn.written import WrittenMaps
from regard.vit import checkpoint
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.maps.streamed import evaluating
from regard.vit.model import ViT
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained.files import locate
from regard.vit.pretrained.report import LoadReport
from regard.vit.tokens import Tokens

TOKENIZER = "tokenizer.json"


class ImageQA(nn.Module):
    """Answers questions about images: from a closed list, by writing, or by ranking what it could write."""

    def __init__(self, config: ImageQAConfig, tokenizer: TextTokenizer):
        super().__init__()
        if len(tokenizer) != config.text.vocab_size:
            raise InputError(
                f"the tokenizer has {len(tokenizer)} tokens, the configuration says {config.text.vocab_size}"
            )
        self.config, self.tokenizer = config, tokenizer
        self.vit = ViT(config.vit)
        # Which of an item's images a token is of.
        self.image_index = nn.Embedding(config.images, config.vit.dim) if config.images > 1 else None
        self.text = TextEncoder(config.text, context_dim=config.vit.dim)
        self.head = nn.Linear(config.text.dim, len(config.answers)) if config.decoder is None else None
        self.decoder = None if config.decoder is None else TextDecoder(config.decoder, context_dim=config.text.dim)
        self.report: LoadReport | None = None  # where the weights came from
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
        head: Literal["vocabulary", "generate", "rank"] = "vocabulary",
        decoder: dict[str, Any] | None = None,
        images: int = 1,
    ) -> "ImageQA":
        """A new model of a named size with random weights; its tokenizer is learned from `questions`.

        `demo` reads 64 x 64 images and trains in minutes on a CPU. `vit` and `text` change any field of `ViTConfig`
        and `TextConfig`; another `image_size` is preprocessed to, unless `preprocess` says otherwise. `vit` may instead
        be a pretrained image side: a `ViT`, or anything that `ViT.from_pretrained` opens. `head` says how it answers,
        `decoder` changes any field of `DecoderConfig`, and `images` is how many images of one item it tells apart.
        Raises InputError for an unknown preset or field.
        """
        writes = head != "vocabulary"
        if writes and not answers:
            raise InputError("answers is empty; a decoder's vocabulary is learned from them")
        tokenizer = TextTokenizer.train(questions, answers=answers if writes else ())
        ends = (tokenizer.id(ANSWER), tokenizer.id(LAST)) if writes else (0, 0)
        side: ViT | None = None
        fields: ViTConfig | Mapping[str, Any] = vit if isinstance(vit, Mapping) else {}
        if vit is not None and not isinstance(vit, Mapping):
            side = (vit if isinstance(vit, ViT) else ViT.from_pretrained(vit)).as_encoder()
            fields = side.config
        config = preset_config(
            name,
            vocab_size=len(tokenizer),
            answers=answers,
            score=score,
            vit=fields,
            text=text or {},
            head=head,
            decoder=decoder,
            ends=ends,
            images=images,
        )
        model = cls(config, tokenizer)
        if side is not None:
            model.vit = side.train(model.training)
        return model

    @classmethod
    def compose(cls, *, vit: Any, text: Any, answers: Sequence[str], **settings: Any) -> "ImageQA":
        """Join any vision transformer with a pretrained text encoder by new cross-attention, its gates at 0.

        `vit` is a `ViT`, fields of `ViTConfig`, or anything that `ViT.from_pretrained` opens; `text` a BERT's folder,
        file, hub name or module, or a pair of that (or a `TextEncoder`) and a tokenizer. `settings`: `head`, `score`,
        `cross_every`, `gate`, `decoder`, `images`. Raises InputError for what does not fit together.
        """
        from regard.crossattn.pretrained.compose import compose

        return compose(vit=vit, text=text, answers=answers, **settings)

    @classmethod
    def from_pretrained(cls, source: "str | Path | nn.Module", **settings: Any) -> "ImageQA":
        """Open a folder, or a hub repository, written by `save_pretrained`, or public BLIP weights; in inference mode.

        BLIP's may also be the authors' `.pth` or a live module of transformers; `qa.report` tells what was done.
        `settings` are those of `regard.crossattn.pretrained.open_blip`: `behaviour`, `image_size`, `head`, `answers`.
        Raises InputError for anything missing, unused, renamed, of another shape, or pickled.
        """
        from regard.crossattn.pretrained import opener

        place = source if isinstance(source, nn.Module) else locate(source)
        ours = isinstance(place, Path) and checkpoint.is_ours(place)
        if not ours and (found := opener(place)) is not None:
            return found(str(source), place, **settings)
        assert not isinstance(source, nn.Module)  # `opener` has refused a strange one
        if settings:
            raise InputError(f"{source}: {next(iter(settings))} is for BLIP weights; a model of Regard has its own")
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
        if self.image_index is not None:
            nn.init.zeros_(self.image_index.weight)  # a model that has learned from single images starts unharmed
        self.text.reset_parameters()
        if self.head is not None:
            nn.init.xavier_uniform_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        if self.decoder is not None:
            self.decoder.reset_parameters()

    # Looking

    @torch.inference_mode()
    def look(self, pictures: looking.Pictures) -> Memory:
        """Encode each picture once; the memory can be asked any number of questions.

        A picture is anything `Preprocess` takes, or a preprocessed float tensor `(C, height, width)`; None stands for
        "no image". A list holds one item for each entry: a picture, or a list of pictures that its questions see
        together. A float tensor `(B, C, height, width)` is a batch. Sizes may differ.

        The order of an item's pictures makes a difference where the model knows `ImageQAConfig.images` > 1 of them by
        their number; with 1 it makes none.
        Raises InputError for what is no picture, and for more pictures in an item than the model tells apart.
        """
        with evaluating(self):
            memory = self.remember(looking.prepared(pictures, self.preprocess, self.text.words.weight))
        if memory.dtype == torch.float16:  # the only one that ordinary values overflow
            memory.require_finite()
        return dataclasses.replace(memory, fingerprint=looking.fingerprint(self))

    def remember(self, images: looking.Images) -> Memory:
        """Preprocessed images to a memory, with gradients in training: the road that `look` takes too.

        `images` is `(B, C, height, width)`, or a list of items: a `(C, height, width)` of any size, None for "no
        image", or a list of these.
        """
        vit, empty = self.config.vit, self.text.words.weight.new_zeros(0, self.config.vit.dim)
        context, visible, grids = looking.contexts(images, self._encode, self.image_index, empty)
        return Memory(self.text.remember(context), visible, grids, int(vit.class_token), vit.registers)

    def _encode(self, images: Tensor) -> Tokens:
        if any(parameter.requires_grad for parameter in self.vit.parameters()):
            return self.vit(images)
        with torch.no_grad(), evaluating(self.vit):  # a frozen image side costs no backward and drops nothing
            return self.vit(images)

    # Asking

    @overload
    def ask(self, memory: Memory, questions: str, **wanted: Any) -> Answer: ...
    @overload
    def ask(self, memory: Memory, questions: list[str], **wanted: Any) -> list[Answer]: ...
    @overload
    def ask(self, memory: Memory, questions: list[list[str]], **wanted: Any) -> list[list[Answer]]: ...
    @torch.inference_mode()  # type: ignore[misc]  # the overloads tell of arrangements, not of the settings
    def ask(
        self,
        memory: Memory,
        questions: Any,
        *,
        top: int = 5,
        candidates: Sequence[str] | None = None,
        beams: int | None = None,
        max_tokens: int | None = None,
        normalise_length: bool = False,
        shortlist: int | None = None,
    ) -> Any:
        """Ask remembered items; an answer depends on its own item and question only.

        Args:
            questions: one question, or a list asked of the only item, or one question for each item, or a list of
                questions for each item. Returns `Answer` in the same arrangement.
            top: how many answers to report for each question, best first; a decoder knows at most `beams` of them.
            candidates: the only answers allowed. A vocabulary is cut to them; a decoder ranks them by the exact
                log-probability of each.
            beams, max_tokens: of the decoder that writes; default: the model's own, see `DecoderConfig`.
            normalise_length: compare candidates by log-probability per token.
            shortlist: rank only so many candidates, those with the likeliest first tokens; the others get 0.

        Raises:
            InputError: an empty or too long question; lists that do not fit the number of items; candidates that are
                none, twice the same, or longer than the decoder; a memory of other weights, or on another device or in
                another dtype than the model; settings of another head.
        """
        if not isinstance(memory, Memory):
            raise InputError(f"ask reads the memory that `look` returns, not a {type(memory).__name__}")
        only = None if candidates is None else answering.check_candidates(candidates)
        asking = Asking(top, only, beams, max_tokens, normalise_length, shortlist)
        looking.require_readable(memory, self)
        flat, of = arrange(questions, len(memory))
        if not flat:
            return rearrange([], questions)
        encoded = self.tokenizer(flat, self.config.text.max_tokens)
        asked: list[Tensor] = []
        with evaluating(self):
            shares = tuple(of.count(image) for image in range(len(memory)))
            states = self.read(memory, encoded.ids, encoded.mask, shares, asked=asked)
            mask = encoded.mask.to(states.device)
            found = self._found(states, mask, asking)
        return rearrange(self._answers(flat, of, encoded, memory, found, states, mask, asked), questions)

    def read(
        self, memory: Memory, ids: Tensor, mask: Tensor, of: Shares = None, *, asked: list[Tensor] | None = None
    ) -> Tensor:
        """What the questions are after reading their images, `(Q, T, D)`; `ids` and `mask` are `(Q, T)`.

        `of` says which item each question asks, as in `CrossAttention`: by default each has an equal share.
        """
        offered = [(kv.k.shape[1], kv.k.shape[3]) for kv in memory.layers]
        expected = [(cross.attn.heads, cross.attn.head_dim) for cross in self.text.asking]
        if offered != expected:
            raise InputError(
                f"this memory has (heads, head width) {offered} in its layers, this model asks {expected}: "
                "another model made it; look at the picture with this one"
            )
        device = self.text.words.weight.device
        of = of.to(device) if isinstance(of, Tensor) else of
        return self.text(ids.to(device), mask.to(device), memory.layers, memory.visible, of, asked)

    def logits(self, memory: Memory, ids: Tensor, mask: Tensor, of: Shares = None) -> Tensor:
        """Scores of every answer of `config.answers`, `(Q, A)`; a decoder's are exact log-probabilities.

        Arguments as for `read`.
        """
        states = self.read(memory, ids, mask, of)
        return self.scores(states, mask.to(states.device))

    def scores(self, states: Tensor, mask: Tensor) -> Tensor:
        """The same from what the questions are after reading, `(Q, T, D)` and `(Q, T)`."""
        if self.head is not None:
            return self.head(self.text.pool(states, mask))
        assert self.decoder is not None
        tokens = answering.candidate_tokens(self.config.answers, self.decoder, self.tokenizer)
        return rank(self.decoder, self.decoder.remember(states), self.readable(mask), tokens)

    def readable(self, mask: Tensor) -> Tensor | None:
        """Which of the question's tokens the decoder may read, `(Q, T)`, from those that exist; None for all."""
        assert self.decoder is not None
        return None if self.decoder.config.reads_padding else mask

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits to probabilities as the model was trained: over all answers, or of each alone."""
        return logits.softmax(dim=-1) if self.config.score == "softmax" else logits.sigmoid()

    def _found(self, states: Tensor, mask: Tensor, asking: Asking) -> list[Found]:
        """What the head answers, in fp32 or wider."""
        if self.decoder is None:
            return answering.from_vocabulary(self.scores(states, mask), self.config, asking)
        if self.config.head == "rank" and asking.candidates is None:
            asking = dataclasses.replace(asking, candidates=self.config.answers)
        answer = answering.written if asking.candidates is None else answering.from_candidates
        return answer(self.decoder, self.tokenizer, states, self.readable(mask), asking)

    def _answers(
        self,
        questions: list[str],
        of: list[int],
        encoded: EncodedQuestions,
        memory: Memory,
        found: list[Found],
        states: Tensor,
        mask: Tensor,
        asked: list[Tensor],
    ) -> list[Answer]:
        attentions = [cross.attn for cross in self.text.asking]
        items = {item: memory[item] for item in dict.fromkeys(of)}
        answers = []
        for row, (question, best) in enumerate(zip(questions, found, strict=True)):
            one, length = slice(row, row + 1), int(encoded.mask[row].sum())
            maps = WordMaps(encoded.words[row], [q[one, :, :length] for q in asked], items[of[row]], attentions)
            written = None
            if self.decoder is not None and best.tokens is not None:
                # A decoder that reads padding has read this question's with that of its batch.
                read = states[one] if self.readable(mask) is None else states[one, :length]
                texts = self.tokenizer.pieces(best.tokens[0])
                written = WrittenMaps(self.decoder, read, best.tokens[0], texts, maps, best.ended)
            ranked = tuple(zip(best.texts, best.probabilities, strict=True))
            answers.append(
                Answer(*ranked[0], ranked, maps, question, encoded.unknown[row], best.meaning, best.logs, written)
            )
        return answers

    # Small parts

    @property
    def preprocess(self) -> Preprocess:
        """Turns a picture into the tensor this model expects."""
        return self.config.vit.preprocess
