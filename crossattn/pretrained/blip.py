"""BLIP for visual question answering (Li et al., 2022, arXiv:2201.12086) as `ImageQA`, from any of its owners' files.

The authors' own program and transformers' give different answers with the same weights; `behaviour` says whose.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from regard.crossattn.model import ImageQA
from regard.crossattn.pretrained import blip_config, blip_tokens, vocabularies
from regard.crossattn.pretrained import blip_names as names
from regard.vit import checkpoint
from regard.vit.errors import InputError, reason
from regard.vit.pretrained import files, modules, rules
from regard.vit.pretrained.report import LoadReport
from regard.vit.pretrained.source import Source, pattern_of

_PREFIX = re.compile(r"(.*?)(?:vision_model|visual_encoder|text_encoder|text_decoder)\.")


def open_blip(
    name: str,
    place: Path | nn.Module,
    *,
    behaviour: Literal["original", "transformers"] = "original",
    image_size: int | tuple[int, int] | None = None,
    head: Literal["generate", "rank"] = "generate",
    answers: Sequence[str] = (),
    tokenizer: str | Path | Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    source: Source | None = None,
) -> ImageQA:
    """BLIP's weights as an `ImageQA` in inference mode; `qa.report` tells what was read, renamed and assumed.

    Args:
        name: what the user called it, for messages.
        place: a folder in transformers' layout, a file in either dialect (the authors' `.pth` too), or a live
            `BlipForQuestionAnswering`. The dialect is told by the tensors.
        behaviour: `original`, as published: questions are cleaned up and begin with [ENC], pictures have 480 px, the
            image side's eps is 1e-6, three beams, and nobody reads padding. `transformers`: questions as they are, from
            [CLS], 384 px, eps 1e-5, greedy, and the decoder reads padding, so that an answer depends on its batch.
        image_size: (height, width) in pixels, or one number for a square; the position table is resampled to it.
        head: how it answers unless asked otherwise, `generate` or `rank`.
        answers: those that `rank` chooses from unless asked otherwise.
        tokenizer: `tokenizer.json` or `vocab.txt` of bert-base-uncased, a folder with one of them, or a mapping of its
            pieces to ids; default: what lies beside the weights.
        dtype: of the weights.
        source: what `read` made of `place`, where that was done before.

    Raises InputError for a tensor that is missing, unknown, of another shape or not finite, named as the file names it;
    without a tokenizer; and for a file that would run code.
    """
    if behaviour not in ("original", "transformers"):
        raise InputError(f"behaviour is {behaviour!r}; choose 'original' or 'transformers'")
    if isinstance(answers, str):
        raise InputError("answers is one text; give a list of answers")
    if head not in ("generate", "rank"):
        raise InputError(f"head is {head!r}; BLIP's decoder does 'generate' and 'rank'")
    if source is None:
        source = read(name, place)
    elif isinstance(place, Path):
        source.where = source.where.replace(str(place), name, 1)
    tensors, unused, tied = _needed(source)
    original = behaviour == "original"
    folder = place if not isinstance(place, Path) or place.is_dir() else place.parent
    if isinstance(folder, Path) and tokenizer is None:
        vocabularies.beside(name, folder)  # of a hub's it is fetched
    rows = source.shape(names.QUESTION + names.WORDS, 2)[0]
    beside = folder if isinstance(folder, Path) else None
    words = blip_tokens.blip_tokenizer(source.where, beside, tokenizer, rows, original=original)
    config = blip_config.config_of(
        source, words, tied, original=original, image_size=image_size, head=head, answers=answers
    )
    try:
        with torch.device("meta"):
            qa = ImageQA(config, words)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise InputError(f"{source.where}: no model can be built from it ({reason(error)})") from error
    renamed = _accounted(source, tensors, qa)
    ours = {n: t.to(dtype, copy=True).contiguous() for n, t in renamed.tensors.items()}
    qa.load_state_dict(ours, assign=True)
    qa.report = LoadReport(
        source=source.where,
        layout="blip, " + ("transformers" if names.is_transformers(source) else "original"),
        parameters=sum(t.numel() for t in ours.values()),
        unwrapped=tuple(source.unwrapped),
        renamed=renamed.origin,
        folded=tuple(source.folded),
        resized=(),
        unused={what: tuple(theirs) for what, theirs in unused.items()},
        assumed=(f"behaviour {behaviour!r}: as asked for", *source.assumed),
    )
    return qa.requires_grad_(True).eval()


def read(name: str, place: Path | nn.Module) -> Source:
    """The tensors and the owner's configuration, a prefix that all names share gone."""
    source = modules.read(place) if isinstance(place, nn.Module) else files.read(place, name)
    found = [_PREFIX.match(theirs) for theirs in source.tensors]
    prefixes = {match[1] for match in found if match}
    if len(prefixes) == 1 and all(found) and (prefix := prefixes.pop()):
        source.unwrapped.append(f"prefix {prefix!r}")
        tensors = {theirs.removeprefix(prefix): tensor for theirs, tensor in source.tensors.items()}
        source = replace(source, prefix=prefix, tensors=tensors)
    return source


def _needed(source: Source) -> tuple[dict[str, Tensor], dict[str, list[str]], bool]:
    """The tensors that the model takes, those that it does not by what they are, and whether the output is tied.

    The output layer's table and bias may each stand there under two names. Raises InputError where they contradict.
    """
    tensors, counted = dict(source.tensors), pattern_of(names.COUNTED)
    unused: dict[str, list[str]] = {}
    for theirs in [theirs for theirs in tensors if counted.fullmatch(theirs)]:
        unused.setdefault("counted places", []).append(theirs)
        del tensors[theirs]
    untied = source.settings.get("tie_word_embeddings") is False
    if (again := tensors.pop(names.OUT_BIAS_AGAIN, None)) is not None:
        kept, other = names.OUT_BIAS, names.OUT_BIAS_AGAIN
        if not _same(again, tensors.setdefault(names.OUT_BIAS, again)):
            if not untied:
                raise InputError(
                    f"{source.where}: {source.own_name(other)} and {source.own_name(kept)} are one bias, and differ;"
                    " remove the wrong one"
                )
            # A model of transformers with tie_word_embeddings=False ties neither, and computes with this one.
            tensors[names.OUT_BIAS] = again
            source.tell(f"the bias of the output is {other}: transformers does not use {kept} where nothing is tied")
        unused["the bias of the output once more"] = [other]
    words, out = tensors.get(names.ANSWER + names.WORDS), tensors.get(names.OUT_TABLE)
    if out is None:
        # transformers leaves a tied table out of the file; torch's own files hold it under both names.
        tied = names.is_transformers(source) and not untied
        if tied:
            source.folded.append("the output layer is the decoder's table of words: the file has one for both")
        return tensors, unused, tied
    tied = words is not None and _same(words, out)
    if tied:
        del tensors[names.OUT_TABLE]
        unused["the decoder's table of words once more"] = [names.OUT_TABLE]
    elif source.settings.get("tie_word_embeddings"):
        source.tell("the output layer has a table of its own: its configuration ties it, its values differ")
    return tensors, unused, tied


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def _accounted(source: Source, tensors: Mapping[str, Tensor], qa: ImageQA) -> rules.Renamed:
    """Their tensors under our names, every one checked. Raises InputError naming the one at fault."""
    renamed = rules.read(names.RULES, tensors, qa.config.vit)
    if renamed.unknown:
        unknown = checkpoint.some(sorted(map(source.own_name, renamed.unknown)))
        hint = f" (is it {missing!r}?)" if (missing := _missing(source, renamed, qa)) else ""
        raise InputError(
            f"{source.where}: {unknown} in a BLIP checkpoint: no part of the model takes it, and leaving it out would"
            f" change the numbers{hint}"
        )

    def called(name: str) -> str:
        return _called(source, renamed, name)

    checkpoint.account(source.where, qa.state_dict(), renamed.tensors, called)
    return renamed


def _missing(source: Source, renamed: rules.Renamed, qa: ImageQA) -> str:
    """The first tensor that is not there, as the file would call it."""
    absent = sorted(qa.state_dict().keys() - renamed.tensors.keys())
    return _called(source, renamed, absent[0]) if absent else ""


def _called(source: Source, renamed: rules.Renamed, name: str) -> str:
    """What the file calls a tensor of ours, or would call it."""
    return source.own_name(renamed.origin.get(name) or rules.their_name(names.rules(source), name) or name)
