"""The model that a recipe trains: a preset, a preset on a pretrained image side, or a whole model to go on from."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.crossattn import ImageQA
from regard.crossattn.config import PRESETS
from regard.crossattn.decoder import DecoderConfig
from regard.crossattn.pretrained import compose
from regard.crossattn.tokenizer import TextTokenizer
from regard.datasets import QuestionSet, vocabulary
from regard.train.recipe import AnswerRecipe
from regard.train.recompute import recompute_layers
from regard.train.written import spellings
from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.lora import add_lora


def build(recipe: AnswerRecipe, training: QuestionSet) -> ImageQA:
    """The model, with what the recipe keeps as it is frozen, and with adapters where it wants them.

    A preset's tokenizer and answers come from the training images alone. Raises InputError for settings that contradict
    each other or the model.
    """
    starts = _goes_on(recipe)
    answers = vocabulary(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = _opened(recipe, answers) if starts else _preset(recipe, training, answers)
        if model.decoder is None and recipe.label_smoothing:
            raise InputError("label_smoothing is for a head with a decoder; this model has a vocabulary")
        if model.config.decoder is not None:
            known = distinct(model.config.answers or answers, model.tokenizer, model.config.decoder)
            model.config = dataclasses.replace(model.config, answers=known)
        _choose_what_is_trained(recipe, model, starts)
    if recipe.gradient_checkpointing:
        recompute_layers(model)
    return model


def new_parts(recipe: AnswerRecipe) -> tuple[str, ...]:
    """The parts of the model that start from random weights beside pretrained ones."""
    if recipe.pretrained is None:
        return ()
    return ("text", "decoder", "head") if recipe.pretrained_text is None else ("decoder", "head")


def starts_pretrained(recipe: AnswerRecipe) -> bool:
    """Whether any part of the model starts from trained weights."""
    return recipe.pretrained is not None or recipe.model not in PRESETS


def freezes_vit(recipe: AnswerRecipe) -> bool:
    """Whether the image side is kept as it is."""
    return recipe.freeze_vit if recipe.freeze_vit is not None else recipe.pretrained is not None


def _goes_on(recipe: AnswerRecipe) -> bool:
    """Whether `model` names a whole model rather than a preset."""
    if recipe.model in PRESETS:
        return False
    name = recipe.model
    if not Path(name).expanduser().exists() and "/" not in name and os.sep not in name:
        raise InputError(
            f"no ImageQA preset is called {name!r}, and no folder; choose one of {', '.join(PRESETS)}, or give the"
            " folder or hub name of a model"
        )
    fields = ("pretrained", "pretrained_text", "vit", "text", "decoder")
    if conflict := next((field for field in fields if getattr(recipe, field)), None):
        raise InputError(
            f"{conflict} is for a new model; {name} is a whole one with its own: leave {conflict} out, or set"
            f" model to {', '.join(PRESETS)}"
        )
    return True


def freezes_text(recipe: AnswerRecipe) -> bool:
    """Whether what a pretrained text side brought is kept as it is."""
    if recipe.pretrained_text is None:
        if recipe.freeze_text:
            raise InputError("freeze_text keeps a pretrained text side; give pretrained_text")
        return False
    return recipe.freeze_text is not False


def _preset(recipe: AnswerRecipe, training: QuestionSet, answers: tuple[str, ...]) -> ImageQA:
    if recipe.pretrained_text is not None:
        return _composed(recipe, answers)
    return ImageQA.preset(
        recipe.model,
        questions=training.question_texts(),
        answers=answers,
        score=recipe.score or "softmax",
        vit=recipe.vit if recipe.pretrained is None else ViT.from_pretrained(recipe.pretrained, **recipe.vit),
        text=recipe.text,
        head=recipe.head or "vocabulary",
        decoder=recipe.decoder or None,
    )


def _composed(recipe: AnswerRecipe, answers: tuple[str, ...]) -> ImageQA:
    if recipe.pretrained is None:
        raise InputError("pretrained_text is joined with a pretrained image side; give pretrained too")
    if other := sorted(set(recipe.text) - {"cross_every", "gate"}):
        raise InputError(f"text.{other[0]} is the pretrained text side's own; only cross_every and gate are new")
    return ImageQA.compose(
        vit=ViT.from_pretrained(recipe.pretrained, **recipe.vit),
        text=recipe.pretrained_text,
        answers=answers,
        score=recipe.score or "softmax",
        head=recipe.head or "vocabulary",
        decoder=recipe.decoder or None,
        **recipe.text,
    )


def _opened(recipe: AnswerRecipe, answers: tuple[str, ...]) -> ImageQA:
    name = recipe.model
    model = ImageQA.from_pretrained(name).float()
    config = model.config
    for field, theirs in (("head", config.head), ("score", config.score)):
        wanted = getattr(recipe, field)
        if wanted is None or wanted == theirs:
            continue
        if field == "score" or "vocabulary" in (wanted, theirs):
            raise InputError(f"{field} is {wanted!r}, and {name} has {theirs!r}; leave {field} out")
    if model.decoder is None:
        if new := [answer for answer in answers if answer not in config.answers]:
            raise InputError(
                f"{name} knows {len(config.answers)} answers, and the data has {len(new)} others"
                f" ({', '.join(map(repr, new[:3]))}, ...), which its head has no place for; train a new model"
                f" (--model {PRESETS[0]}), one with a decoder (--head generate or rank) to learn new answers later"
            )
        return model
    both = tuple(dict.fromkeys((*config.answers, *answers)))  # what it chose from before, and what is new
    model.config = dataclasses.replace(config, answers=both, head=recipe.head or config.head)
    return model


def distinct(answers: tuple[str, ...], tokenizer: TextTokenizer, decoder: DecoderConfig) -> tuple[str, ...]:
    """The answers that the decoder can write, one of those that are the same tokens to it.

    Raises InputError where none is left.
    """
    seen: dict[tuple[int, ...], str] = {}
    for answer, ids in spellings(answers, tokenizer, decoder).items():
        if ids is not None:
            seen.setdefault(ids, answer)
    if not seen:
        raise InputError(f"the model can write none of the answers, such as {answers[0]!r}; check model and data")
    return tuple(seen.values())


def _choose_what_is_trained(recipe: AnswerRecipe, model: ImageQA, whole: bool) -> None:
    """Freeze the image side, or everything but adapters, as the recipe says."""
    frozen = freezes_vit(recipe)
    if freezes_text(recipe):
        new = compose.new_parts(model)
        for name, parameter in model.text.named_parameters(prefix="text"):
            parameter.requires_grad_(name in new)
    if not recipe.lora_rank:
        if frozen:
            model.vit.requires_grad_(False)
        return
    if not starts_pretrained(recipe):
        raise InputError(
            "lora_rank adapts pretrained weights, which a preset has none of; give --model PATH or --pretrained"
        )
    if not whole and recipe.freeze_vit:
        raise InputError("lora_rank and freeze_vit leave nothing to adapt: only the image side is pretrained")
    lora: dict[str, Any] = {"targets": recipe.lora_targets, "rank": recipe.lora_rank, "alpha": recipe.lora_alpha}
    if not whole:
        add_lora(model.vit, **lora)
        return
    if recipe.freeze_vit:
        parts = nn.ModuleDict({"text": model.text} | ({} if model.decoder is None else {"decoder": model.decoder}))
        model.requires_grad_(False)
        add_lora(parts, **lora)
    else:
        add_lora(model, **lora)
    if model.head is not None:
        model.head.requires_grad_(True)
