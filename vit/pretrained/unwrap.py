"""Finding the vision transformer in a checkpoint: wrappers, prefixes and chunked blocks come off.

Nothing here looks at a file's name. The vision transformer is where its patch projection is, and a layout knows it.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.pretrained.layout import Layout, layouts
from regard.vit.pretrained.source import Source, pattern_of

# Averaged weights are what the authors evaluate: they come first.
_WRAPPERS = (
    "model_ema", "state_dict_ema", "ema_state_dict", "ema", "teacher",
    "state_dict", "model_state_dict", "model", "module", "net", "student", "params", "encoder",
)  # fmt: skip
_AVERAGED = ("teacher", "model_ema", "ema_model", "ema")
_COMPILED = re.compile(r"(?:^|\.)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
_CHUNKED = re.compile(r"^(blocks)\.\d+\.(\d+)\.")
_OPTIMIZER = re.compile(r"^(opt|optimizer|optimizer_states?|opt_state)[./]|exp_avg|param_groups")
# Tensors by which a network shows that it is another kind than a vision transformer of ours.
_OTHER_KINDS = (
    (r"(^|\.)layers\.\d+\.blocks\.\d+\..*relative_position_bias_table$", "a Swin transformer, whose windows shift"),
    (r"relative_position_bias|rel_pos_bias|\.rel_pos_[hw]$", "a BEiT or its kin: its attention has relative positions"),
    (r"(^|\.)layer1\.0\.(conv1|bn1)\.weight$|running_mean$", "a convolutional network"),
    (r"(^|\.)stages\.\d+\.", "a network of stages, which is no vision transformer of one width"),
    (r"(word_embeddings|token_embedding|embed_tokens|wte|shared)\.weight$", "a text model"),
    (
        r"(^|\.)tokenizer\.proj\.weight$",
        "a model of Regard's own without its settings; name the folder of its finished run",
    ),
    (_OPTIMIZER.pattern, "the state of an optimizer"),
)


def tensors_of(
    content: Any, where: str, part: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """The tensors of a loaded checkpoint, what else it holds, and which wrappers came off.

    `part` chooses among several sets of weights, `student` rather than `teacher`.
    Raises InputError for a checkpoint without tensors.
    """
    notes: list[str] = []
    beside: dict[str, Any] = {}
    while isinstance(content, Mapping):
        choices = [part] if _holds_tensors(content.get(part)) else _wrappers(content)
        if not choices:
            break
        beside.update({name: value for name, value in content.items() if name not in choices})
        others = f" (also there: {', '.join(map(str, choices[1:]))})" if len(choices) > 1 else ""
        notes.append(f"wrapper {choices[0]!r}{others}")
        content = content[choices[0]]
    tensors = {str(n): t for n, t in content.items() if isinstance(t, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        kinds = ", ".join(map(str, content)) if isinstance(content, Mapping) else _kind(content)
        raise InputError(
            f"{where}: no tensors by name are in it, only {kinds[:200] or 'nothing'}; what is needed is a state_dict:"
            " torch.save(model.state_dict(), path)"
        )
    return tensors, beside, notes


def _wrappers(content: Mapping[Any, Any]) -> list[str]:
    """The names under which whole sets of weights stand; a set itself holds tensors and no mapping of them."""
    known = [name for name in _WRAPPERS if _holds_tensors(content.get(name))]
    if known or any(isinstance(value, Tensor) for value in content.values()):
        return known
    others = [n for n, v in content.items() if _holds_tensors(v) and not _OPTIMIZER.search(f"{n}.")]
    return others if len(others) == 1 and isinstance(others[0], str) else []


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Whether it is a mapping of names to tensors, or of names to such."""
    if not isinstance(value, Mapping) or not depth:
        return False
    return any(
        isinstance(name, str) and (isinstance(inner, Tensor) or _holds_tensors(inner, depth - 1))
        for name, inner in value.items()
    )


def _kind(content: Any) -> str:
    return getattr(type(content), "stands_for", type(content).__name__)


def unwrapped(source: Source, part: str | None = None) -> tuple[Source, Layout]:
    """The vision transformer's tensors without prefixes, and their layout.

    Raises InputError where there is none, where there are several, and where no layout fits.
    """
    names = {name: _COMPILED.sub("", name).lstrip(".") for name in source.tensors}
    if any(name != plain for name, plain in names.items()):
        source.unwrapped.append("prefixes of torch.compile or of a parallel wrapper")
    plain = {names[name]: tensor for name, tensor in source.tensors.items()}
    if len(plain) < len(names):
        raise InputError(f"{source.where}: the same tensors stand there twice, with and without a wrapper's prefix")
    source.own = {plain_name: name for name, plain_name in names.items()}
    places = _places(plain)
    if not places:
        raise InputError(f"{source.where}: {_what_instead(plain)}")
    fitting = {place: found for place in places if (found := _fitting(_inside(source, plain, place)))}
    if not fitting:
        known = ", ".join(layouts())
        raise InputError(f"{source.where}: the layout of its tensors is not known{_seems(plain)}; Regard reads {known}")
    chosen = _chosen(source, list(fitting), part)
    found = fitting[chosen]
    if len(found) > 1:
        known = ", ".join(layout.name for layout in found)
        raise InputError(f"{source.where}: its tensors fit several layouts: {known}")
    if chosen:
        source.unwrapped.append(f"prefix {chosen!r}")
    inside = _inside(source, plain, chosen)
    if any(map(_CHUNKED.match, (name.removeprefix(chosen) for name in plain))) and inside.has("blocks.#.attn.**"):
        inside.unwrapped.append("chunks of blocks")
    return inside, found[0]


def _chosen(source: Source, places: list[str], part: str | None) -> str:
    """The one prefix to read under. Raises InputError where there are several, or none of `part`."""
    named = [
        place
        for place in places
        if part is not None and (place.strip("./") == part.strip("./") or part in re.split(r"[./]", place))
    ]
    averaged = [place for place in places if set(re.split(r"[./]", place)) & set(_AVERAGED)]
    if part is not None and not named and not any(note.startswith(f"wrapper {part!r}") for note in source.unwrapped):
        choices = ", ".join([*(f"prefix {place!r}" for place in sorted(places) if place), *source.unwrapped])
        raise InputError(
            f"{source.where}: no part {part!r} with a vision transformer is in it; it has {choices or 'no parts'}"
        )
    chosen = named or (averaged if len(averaged) == 1 else places)
    if len(chosen) > 1:
        raise InputError(
            f"{source.where}: several vision transformers are in it, under {', '.join(map(repr, sorted(chosen)))};"
            " pass part= with one of these"
        )
    return chosen[0]


def _places(tensors: Mapping[str, Tensor]) -> list[str]:
    """The prefixes under which a patch projection stands."""
    anchors = {layout.anchor for layout in layouts().values()}
    ends = tuple(mark + anchor for anchor in anchors for mark in "./")
    places = {}
    for name in tensors:
        if (name in anchors or name.endswith(ends)) and not _OPTIMIZER.search(name):
            anchor = max((anchor for anchor in anchors if name.endswith(anchor)), key=len)
            places[name[: -len(anchor)]] = True
    return list(places)


def _inside(source: Source, plain: Mapping[str, Tensor], prefix: str) -> Source:
    """The source with only what stands under a prefix as its tensors; the rest is beside."""
    tensors = {name[len(prefix) :]: tensor for name, tensor in plain.items() if name.startswith(prefix)}
    beside = {name: tensor for name, tensor in plain.items() if not name.startswith(prefix)}
    own = {name: source.own[prefix + name] for name in tensors}
    return _without_chunks(dataclasses.replace(source, tensors=tensors, beside=beside, own=own, prefix=prefix))


def _without_chunks(source: Source) -> Source:
    """DINOv2's training keeps `blocks.CHUNK.BLOCK.`, with blocks counted through."""
    blocks = [name for name in source.tensors if name.startswith("blocks.")]
    if not blocks or not all(_CHUNKED.match(name) for name in blocks):
        return source
    names = {name: _CHUNKED.sub(r"\1.\2.", name) for name in source.tensors}
    tensors = {names[name]: tensor for name, tensor in source.tensors.items()}
    if len(tensors) < len(names):
        raise InputError(f"{source.where}: two chunks of blocks hold a block of the same number")
    own = {names.get(name, name): own for name, own in source.own.items()}
    return dataclasses.replace(source, tensors=tensors, own=own)


def _fitting(source: Source) -> list[Layout]:
    if any(re.search(pattern, name) for name in source.tensors for pattern, _ in _OTHER_KINDS[:2]):
        return []
    return [layout for layout in layouts().values() if layout.recognises(source)]


def _what_instead(tensors: Mapping[str, Tensor]) -> str:
    """What a file holds that has no patch projection."""
    name, kind = _other_kind(tensors)
    places = (place for layout in layouts().values() for place in _blocks_of(layout, tensors))
    # The blocks of a text model stand under the prefix of its words.
    counts = Counter(place for place in places if not kind or not name.startswith(place[0]))
    if counts:
        (prefix, anchor), _ = counts.most_common(1)[0]
        return f"tensor {prefix + anchor!r} is missing: the patch projection, of which blocks of its kind are there"
    anchors = ", ".join(sorted({layout.anchor for layout in layouts().values()}))
    held = ", ".join(list(tensors)[:3])
    known = f"none of the patch projections that Regard knows ({anchors})"
    return f"no vision transformer is in it{_seems(tensors)}; it has {known}, but {held}, ..."


def _seems(tensors: Iterable[str]) -> str:
    name, kind = _other_kind(tensors)
    return f"; by {name} it is {kind}" if kind else ""


def _other_kind(tensors: Iterable[str]) -> tuple[str, str]:
    """A tensor that no vision transformer of ours has, and what it is a part of; two empty texts for none."""
    names = list(tensors)
    return next(((n, kind) for pattern, kind in _OTHER_KINDS for n in names if re.search(pattern, n)), ("", ""))


def _blocks_of(layout: Layout, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, str]]:
    """(prefix, patch projection) for each tensor that a rule for blocks would take."""
    rules = [pattern_of(rule.theirs).pattern for rule in layout.rules if "#" in rule.theirs]
    regex = re.compile(rf"(|.*[./])(?:{'|'.join(re.sub(r'[(](?![?])', '(?:', rule) for rule in rules)})")
    return ((found[1], layout.anchor) for name in tensors if (found := regex.fullmatch(name)))
