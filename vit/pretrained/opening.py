"""`open_vit`: any pretrained vision transformer, in one call, with the numbers its owner gets."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.vit import checkpoint
from regard.vit.config import PositionResize, ViTConfig, changed_vit
from regard.vit.errors import InputError, reason
from regard.vit.model import ViT
from regard.vit.pretrained import files, modules, processors, rules
from regard.vit.pretrained.layout import Layout
from regard.vit.pretrained.report import LoadReport
from regard.vit.pretrained.source import Source, pattern_of
from regard.vit.pretrained.unwrap import unwrapped


def open_vit(
    source: str | Path | nn.Module,
    *,
    classes: int | None = None,
    position_resize: str | PositionResize | None = None,
    part: str | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> ViT:
    """What `ViT.from_pretrained` does; see there."""
    if not isinstance(source, nn.Module):
        folder = files.locate(source)
        if is_own(folder):
            return _ours(folder, classes, position_resize, changes)
        read = files.read(folder, str(source), part)
    else:
        read = modules.read(source)
    read.changes = {name: value for name, value in {**changes, "classes": classes}.items() if value is not None}
    read, layout = unwrapped(read, part)
    return _build(layout.prepare(read), layout, classes, position_resize, dtype)


def is_own(path: Path) -> bool:
    """Whether a model of Regard's own is there: a saved one, or that of a training checkpoint."""
    return checkpoint.is_ours(path) or checkpoint.of_training(path, ViTConfig) is not None


def _build(
    source: Source, layout: Layout, classes: int | None, resize: str | PositionResize | None, dtype: torch.dtype
) -> ViT:
    config = _config(source, layout, resize)
    heads = {**source.tensors, **source.beside}
    classifier = rules.read(layout.classifiers, heads, config)
    offered = classifier.tensors.get("head.weight")
    if classes:
        if offered is None or len(offered) != classes:
            has = "no classifier" if offered is None else f"a classifier of {len(offered)} classes"
            raise InputError(f"{source.where}: it has {has}, classes={classes} was asked for")
        config = dataclasses.replace(config, classes=classes)
    tensors, unused = _set_aside(source, layout, set(classifier.origin.values()))
    if classes:
        tensors |= {name: heads[name] for name in classifier.origin.values()}
        unused.pop("classifier", None)
    try:
        with torch.device("meta"):
            vit = ViT(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise InputError(f"{source.where}: no model can be built from it ({reason(error)})") from error
    table = (*layout.rules, *layout.classifiers)
    renamed = rules.read(table, tensors, config)
    if renamed.unknown:
        names = checkpoint.some(sorted(map(source.own_name, renamed.unknown)))
        raise InputError(
            f"{source.where}: {names} in a {layout.name} checkpoint: no part of the model takes it, and leaving it out"
            " would change the numbers"
        )
    expected = vit.state_dict()
    ours = _without_zero_biases(source, expected, renamed)
    _adapt_channels(source, layout, config, ours)

    def called(name: str) -> str:
        return source.own_name(_called(name, renamed.origin, table, tensors))

    checkpoint.account(source.where, expected, ours, called)
    vit.load_state_dict({name: t.to(dtype, copy=True).contiguous() for name, t in ours.items()}, assign=True)
    vit.report = LoadReport(
        source=source.where,
        layout=layout.name,
        parameters=sum(t.numel() for t in ours.values()),
        unwrapped=tuple(source.unwrapped),
        renamed={name: renamed.origin[name] for name in ours},
        folded=tuple(source.folded),
        resized=tuple(source.resized),
        unused={what: tuple(names) for what, names in unused.items()},
        assumed=tuple(source.assumed),
    )
    return vit.requires_grad_(True).eval()


def _config(source: Source, layout: Layout, resize: str | PositionResize | None) -> ViTConfig:
    try:
        config = ViTConfig(**layout.describe(source))
        changes = {name: value for name, value in source.changes.items() if name != "channels"}
        config = changed_vit(config, {n: v for n, v in changes.items() if getattr(config, n, None) != v})
    except InputError as error:
        text = str(error)
        raise error if text.startswith(source.where) else InputError(f"{source.where}: {text}") from error
    if "channels" in source.changes:
        config = dataclasses.replace(config, channels=source.changes["channels"])
    if config.channels == 1 and len(config.preprocess.mean) == 3 and "preprocess" not in source.changes:
        config = dataclasses.replace(config, preprocess=processors.grey(config.preprocess))
        source.assumed.append("preprocess to grey with the means over the channels stated")
    if isinstance(resize, str):
        recipe = layout.resize(resize, config)
        if recipe is None:
            raise InputError(f"{source.where}: the {layout.name} layout has no position_resize {resize!r}")
        return dataclasses.replace(config, position_resize=recipe)
    return config if resize is None else dataclasses.replace(config, position_resize=resize)


def _set_aside(source: Source, layout: Layout, classifier: set[str]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """The tensors that the model must take, and those that no vision transformer uses, by what they are."""
    patterns = [(pattern_of(unused.pattern), unused.what) for unused in layout.unused]
    tensors: dict[str, Tensor] = {}
    unused: dict[str, list[str]] = {}
    for name, tensor in source.tensors.items():
        what = next((what for regex, what in patterns if regex.fullmatch(name)), None)
        if name in classifier:
            what = "classifier"
        if what is None:
            tensors[name] = tensor
        else:
            unused.setdefault(what, []).append(name)
    for name in source.beside:
        what = "classifier" if name in classifier else "beside the vision transformer"
        unused.setdefault(what, []).append(name)
    return tensors, unused


def _adapt_channels(source: Source, layout: Layout, config: ViTConfig, tensors: dict[str, Tensor]) -> None:
    """A patch projection for another number of channels: grey sums them, others repeat them at the same brightness."""
    name, pixels = "tokenizer.proj.weight", config.patch_size**2
    weight = tensors.get(name)
    if weight is None or "channels" not in source.changes or weight.dim() != 2 or weight.shape[1] % pixels:
        return
    old, new = weight.shape[1] // pixels, config.channels
    if old == new or not old:
        return
    by_channel = weight.unflatten(1, (old, pixels))
    if new == 1:
        adapted = by_channel.sum(dim=1, keepdim=True)
    else:
        adapted = by_channel.repeat(1, math.ceil(new / old), 1)[:, :new] * (old / new)
    tensors[name] = adapted.flatten(1)
    source.resized.append(f"{layout.anchor} from {old} to {new} channels")


def _without_zero_biases(source: Source, expected: Mapping[str, Tensor], renamed: rules.Renamed) -> dict[str, Tensor]:
    """Without biases of exactly 0 that the model does not have: in a stack of q, k and v whose k has none, say."""
    ours = dict(renamed.tensors)
    dropped = [name for name in ours if name not in expected and name.endswith(".bias") and not ours[name].any()]
    for name in dropped:
        del ours[name]
    if dropped:
        source.folded.append(f"{len(dropped)} biases that are exactly 0, such as {renamed.origin[dropped[0]]}")
    return ours


def _called(name: str, origin: Mapping[str, str], table: tuple[rules.Rule, ...], present: Iterable[str]) -> str:
    return origin.get(name) or rules.their_name(table, name, present) or name


def _ours(folder: Path, classes: int | None, resize: str | PositionResize | None, changes: Mapping[str, Any]) -> ViT:
    if isinstance(resize, str) or classes is not None or any(value is not None for value in changes.values()):
        given = [name for name, value in {**changes, "classes": classes}.items() if value is not None]
        what = given[0] if given else "position_resize by name"
        raise InputError(f"{folder}: saved by Regard with every setting beside it, {what} among them; leave {what} out")
    trained = checkpoint.of_training(folder, ViTConfig)
    if trained is None:
        vit = checkpoint.load(folder, ViTConfig, ViT)
    else:
        vit = ViT(trained[0])
        checkpoint.account(str(folder), vit.state_dict(), trained[1])
        vit.load_state_dict(trained[1])
        vit.eval()
    count = sum(p.numel() for p in vit.parameters())
    names = {name: name for name in vit.state_dict()}
    vit.report = LoadReport(str(folder), "regard", count, (), names, (), (), {}, ())
    if resize is not None:
        vit.config = dataclasses.replace(vit.config, position_resize=resize)
    return vit
