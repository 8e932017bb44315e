"""`ImageQAConfig`, all that an `ImageQA`'s numbers depend on besides its weights, and the presets by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from regard.crossattn.text import TextConfig
from regard.vit.config import ViTConfig, changed_vit
from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import Preprocess
from regard.vit.values import changed


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
        if self.vit.pooling == "map":
            raise InputError(
                "ImageQAConfig.vit.pooling is 'map', whose weights no question would train; use 'cls' or 'mean'"
            )
        if self.vit.channels != len(self.vit.preprocess.mean):
            raise InputError(
                f"ImageQAConfig.vit.channels is {self.vit.channels}, its preprocess makes pictures of"
                f" {len(self.vit.preprocess.mean)}; set preprocess.mean and std to as many values"
            )
        if not self.answers:
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
_PRESETS = {"demo": (_DEMO_VIT, _DEMO_TEXT)}
PRESETS = tuple(_PRESETS)


def preset_config(
    name: str,
    *,
    vocab_size: int,
    answers: Sequence[str],
    score: Literal["softmax", "sigmoid"],
    vit: ViTConfig | Mapping[str, Any],
    text: dict[str, Any],
) -> ImageQAConfig:
    """The configuration of a named size, with any field of its `ViTConfig` and `TextConfig` changed; or a whole one.

    Another `image_size` is preprocessed to, unless `preprocess` says otherwise.
    Raises InputError for an unknown preset or field.
    """
    if name not in _PRESETS:
        raise InputError(f"no ImageQA preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    if isinstance(answers, str):
        raise InputError("answers is one text; give a list of answers")
    base_vit, base_text = _PRESETS[name]
    return ImageQAConfig(
        vit=vit if isinstance(vit, ViTConfig) else changed_vit(base_vit, vit),
        text=changed(replace(base_text, vocab_size=vocab_size), text),
        answers=tuple(answers),
        score=score,
    )
