"""`ImageQA.compose`: any vision transformer and any pretrained text encoder, joined by new cross-attention."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from regard.crossattn.config import ImageQAConfig
from regard.crossattn.decoder import DecoderConfig
from regard.crossattn.model import ImageQA
from regard.crossattn.pretrained.bert import fitted, is_new, open_text
from regard.crossattn.text import TextConfig, TextEncoder
from regard.crossattn.tokenizer import ANSWER, FIRST, LAST, TextTokenizer
from regard.vit.config import ViTConfig, changed_vit
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.values import changed

VisionSide = ViT | Mapping[str, Any] | str | Path | nn.Module
TextSource = TextEncoder | str | Path | nn.Module
TextSide = TextSource | tuple[TextSource, TextTokenizer | str | Path | None]


def compose(
    *,
    vit: VisionSide,
    text: TextSide,
    answers: Sequence[str],
    head: Literal["vocabulary", "generate", "rank"] = "vocabulary",
    score: Literal["softmax", "sigmoid"] = "softmax",
    cross_every: int = 1,
    gate: bool = True,
    decoder: Mapping[str, Any] | None = None,
    images: int = 1,
) -> ImageQA:
    """What `ImageQA.compose` does; see there."""
    if isinstance(answers, str):
        raise InputError("answers is one text; give a list of answers")
    if head == "vocabulary" and decoder:
        raise InputError("decoder settings were given, but the head is 'vocabulary', which has none")
    side = _vision_side(vit)
    encoder, tokenizer = _text_side(text, side.config.dim, cross_every, gate)
    config = ImageQAConfig(
        vit=side.config,
        text=encoder.config,
        answers=tuple(answers),
        score=score,
        head=head,
        decoder=None if head == "vocabulary" else changed(_decoder(encoder.config, tokenizer), decoder or {}),
        images=images,
    )
    model = ImageQA(config, tokenizer)
    model.vit, model.text = side, encoder
    return model.train()


def new_parts(model: ImageQA) -> dict[str, nn.Parameter]:
    """What `compose` has added, by name: cross-attention, its norms and gates, the head or the decoder.

    To train them alone: `model.requires_grad_(False)`, then `requires_grad_(True)` on each of these.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(("vit.", "text.")) or is_new(name.removeprefix("text."))
    }


def _vision_side(vit: VisionSide) -> ViT:
    if isinstance(vit, Mapping):
        return ViT(changed_vit(ViTConfig(), vit))
    return (vit if isinstance(vit, ViT) else ViT.from_pretrained(vit)).as_encoder()


def _text_side(text: TextSide, context_dim: int, cross_every: int, gate: bool) -> tuple[TextEncoder, TextTokenizer]:
    source, tokenizer = text if isinstance(text, tuple) else (text, None)
    if isinstance(source, TextEncoder):
        config = changed(source.config, {"cross_every": cross_every, "gate": gate})
        encoder = fitted(config, context_dim, source.state_dict())
        encoder.report = source.report
        if isinstance(tokenizer, (str, Path)):
            tokenizer = TextTokenizer.from_file(tokenizer)
    else:
        encoder, tokenizer = open_text(
            source, tokenizer=tokenizer, context_dim=context_dim, cross_every=cross_every, gate=gate
        )
    if tokenizer is None:
        raise InputError(
            "the text side has no tokenizer: no tokenizer.json or vocab.txt lies beside its weights; pass"
            " text=(weights, tokenizer)"
        )
    return encoder, tokenizer


def _decoder(text: TextConfig, tokenizer: TextTokenizer) -> DecoderConfig:
    """A small one as wide as the text encoder; where the vocabulary has no token that begins answers, [CLS] does."""
    body = TextConfig(vocab_size=text.vocab_size, dim=text.dim, depth=2, heads=text.heads, max_tokens=16)
    try:
        first = tokenizer.id(ANSWER)
    except InputError:
        first = tokenizer.id(FIRST)
    return DecoderConfig(body, first=first, last=tokenizer.id(LAST), beams=1)
