"""`ImageQAConfig`, all that an `ImageQA`'s numbers depend on besides its weights, and the presets by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from regard.crossattn.decoder import DecoderConfig
from regard.crossattn.text import TextConfig
from regard.vit.config import ViTConfig, changed_vit
from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import Preprocess
from regard.vit.values import LATER, changed


@dataclass(frozen=True)
class ImageQAConfig:
    """A ViT, a text encoder that asks it, and a way to answer.

    Attributes:
        vit: the image side.
        text: the text side.
        answers: `vocabulary`: the answers the model can give, in the order of its logits. `rank`: those it chooses
            from unless asked otherwise. `generate`: what it was trained on, if known.
        score: how the logits of a `vocabulary` become probabilities, and so how it is trained: `softmax` (one right
            answer) or `sigmoid` (several may be right).
        head: how it answers unless asked otherwise: `vocabulary` (a score for each answer of the list), `generate`
            (a decoder writes), `rank` (the decoder's log-probability of each answer of the list).
        decoder: the decoder of `generate` and `rank`.
        images: how many images of one item the model can tell apart by their order; 1 for none.
    """

    vit: ViTConfig
    text: TextConfig
    answers: tuple[str, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"
    head: Literal["vocabulary", "generate", "rank"] = field(default="vocabulary", metadata=LATER)
    decoder: DecoderConfig | None = field(default=None, metadata=LATER)
    images: int = field(default=1, metadata=LATER)

    def __post_init__(self) -> None:
        check_choices(self, "score", "head")
        if (self.decoder is None) != (self.head == "vocabulary"):
            has = "is missing" if self.decoder is None else "is there"
            raise InputError(
                f"ImageQAConfig.head is {self.head!r}, the decoder {has}; generate and rank need one, vocabulary none"
            )
        if self.decoder is not None and self.decoder.text.vocab_size != self.text.vocab_size:
            raise InputError(
                f"ImageQAConfig.decoder.text.vocab_size is {self.decoder.text.vocab_size}, text.vocab_size"
                f" {self.text.vocab_size}: one tokenizer serves both"
            )
        if self.images < 1:
            raise InputError(f"ImageQAConfig.images is {self.images}; it must be at least 1")
        if self.vit.pooling == "map":
            raise InputError(
                "ImageQAConfig.vit.pooling is 'map', whose weights no question would train; use 'cls' or 'mean'"
            )
        if self.vit.channels != len(self.vit.preprocess.mean):
            raise InputError(
                f"ImageQAConfig.vit.channels is {self.vit.channels}, its preprocess makes pictures of"
                f" {len(self.vit.preprocess.mean)}; set preprocess.mean and std to as many values"
            )
        if not self.answers and self.head == "vocabulary":
            raise InputError("ImageQAConfig.answers is empty; a model needs at least one answer to give")
        if odd := [a for a in self.answers if not isinstance(a, str)]:
            raise InputError(f"ImageQAConfig.answers holds {odd[0]!r}, which is no text")
        if len(set(self.answers)) < len(self.answers):
            twice = next(a for i, a in enumerate(self.answers) if a in self.answers[:i])
            raise InputError(f"ImageQAConfig.answers holds {twice!r} twice")


# Reads 64 x 64 images and trains in minutes on a CPU.
_DEMO_VIT = ViTConfig(
    image_size=(64, 64),
    patch_size=8,
    dim=96,
    depth=4,
    heads=3,
    preprocess=Preprocess(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3),
)
_DEMO_TEXT = TextConfig(vocab_size=1, dim=96, depth=2, heads=3, max_tokens=32)
_DEMO_DECODER = DecoderConfig(replace(_DEMO_TEXT, max_tokens=16), first=0, last=0, beams=1)
_PRESETS = {"demo": (_DEMO_VIT, _DEMO_TEXT, _DEMO_DECODER)}
PRESETS = tuple(_PRESETS)


def preset_config(
    name: str,
    *,
    vocab_size: int,
    answers: Sequence[str],
    score: Literal["softmax", "sigmoid"],
    vit: ViTConfig | Mapping[str, Any],
    text: dict[str, Any],
    head: Literal["vocabulary", "generate", "rank"] = "vocabulary",
    decoder: dict[str, Any] | None = None,
    ends: tuple[int, int] = (0, 0),
    images: int = 1,
) -> ImageQAConfig:
    """The configuration of a named size, with any field of its `ViTConfig` and `TextConfig` changed; or a whole one.

    `decoder` changes any field of the preset's `DecoderConfig`, for the heads that have one, and `ends` are the token
    ids that begin and end an answer.

    Another `image_size` is preprocessed to, unless `preprocess` says otherwise.
    Raises InputError for an unknown preset or field.
    """
    if name not in _PRESETS:
        raise InputError(f"no ImageQA preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    if isinstance(answers, str):
        raise InputError("answers is one text; give a list of answers")
    base_vit, base_text, base_decoder = _PRESETS[name]
    if head == "vocabulary" and decoder:
        raise InputError("decoder settings were given, but the head is 'vocabulary', which has none")
    writes = replace(base_decoder, text=replace(base_decoder.text, vocab_size=vocab_size), first=ends[0], last=ends[1])
    return ImageQAConfig(
        vit=vit if isinstance(vit, ViTConfig) else changed_vit(base_vit, vit),
        text=changed(replace(base_text, vocab_size=vocab_size), text),
        answers=tuple(answers),
        score=score,
        head=head,
        decoder=None if head == "vocabulary" else changed(writes, decoder or {}),
        images=images,
    )
