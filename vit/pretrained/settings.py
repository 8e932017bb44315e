"""What a source's own configuration states, under the names of `ViTConfig`."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.pretrained.source import Source, pair

# The spellings of transformers, timm and open_clip.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "quickgelu": "quick_gelu",
    "silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu",
}  # fmt: skip
POOLINGS = {"token": "cls", "avg": "mean", "map": "map"}
# What transformers calls some counts, and the kinds of what else it states.
_COUNTS = {
    "num_attention_heads": "heads", "head_dim": "head_dim", "num_hidden_layers": "depth",
    "num_register_tokens": "registers",
}  # fmt: skip
_KINDS: dict[str, Any] = {**dict.fromkeys(_COUNTS, int), "layer_norm_eps": (int, float), "hidden_act": str}
_SIZE_NAMES = ("img_size", "image_size", "input_size", "image_shape", "img_shape", "imgsz", "resolution", "size")
_HOLDERS_MOST = 10_000  # a checkpoint's own optimizer state is no place to look for a size in


def stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`ViTConfig` fields out of a `config.json` of transformers or timm."""
    if "architecture" in settings or "pretrained_cfg" in settings:  # also of timm's models that transformers wraps
        return _timm(settings)
    if "model_type" in settings:
        return _transformers(settings)
    return {}


def activation(name: str) -> str:
    """Our name of an activation. Raises InputError for one that no MLP of ours has."""
    if name not in ACTIVATIONS:
        raise InputError(f"activation {name!r} is not known; Regard has {', '.join(sorted(set(ACTIVATIONS.values())))}")
    return ACTIVATIONS[name]


def vision_part(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The vision transformer's own configuration: a composite model of transformers keeps one per part."""
    parts = (settings.get(name) for name in ("vision_config", "image_config", "backbone_config", "encoder"))
    return next((part for part in parts if isinstance(part, Mapping)), settings)


def transformers_family(
    source: Source, family: str, dim: int, block: str, *, eps: float, heads: int | None = None
) -> dict[str, Any]:
    """Depth, heads and eps as `config.json` states them, or as every model of this family of transformers has.

    `block` is the prefix of a block's tensors, `heads` what the family has where others of this width have another
    number. Raises InputError for values of the wrong kind, and for tensors of another number of blocks than stated.
    """
    for name in _KINDS:
        _checked(source, name)
    depth = source.depth(block)
    if source.fact("depth", depth) != depth:
        raise InputError(
            f"{source.where}: {source.fact('depth')} blocks are stated; its tensors are of {depth}, up to"
            f" {source.own_name(block.replace('#', str(depth - 1)))}"
        )
    return dict(
        dim=dim,
        depth=depth,
        heads=source.assume("heads", heads, f"as {family} of width {dim} has") if heads else source.heads(dim),
        head_dim=source.fact("head_dim"),
        norm_eps=source.assume("norm_eps", eps, f"as {family} has"),
    )


def hidden_act(source: Source, family: str, default: str, gated: bool = False) -> str:
    """The activation as the caller or `config.json` states it, or as every model of this family has.

    Raises InputError for one that no MLP of ours has, or that does not go with a `gated` or a plain one.
    """
    name = source.changes.get("activation") or _checked(source, "hidden_act")
    found = source.assume("activation", default, f"as {family} has") if name is None else activation(name)
    if (found == "swiglu") != gated:
        kind = "its MLP has a gate, which takes silu" if gated else "its MLP has no gate, as silu needs here"
        raise InputError(f"{source.where}: activation {name!r} does not fit its tensors; {kind}")
    return found


def _checked(source: Source, name: str) -> Any:
    """What transformers' configuration says of `name`, which must be of its kind."""
    value, kind = vision_part(source.settings).get(name), _KINDS[name]
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise InputError(f"{source.where}: its configuration states {name} {value!r}, which is of the wrong kind")
    return value


def _transformers(settings: Mapping[str, Any]) -> dict[str, Any]:
    own = vision_part(settings)
    fields: dict[str, Any] = {ours: own[theirs] for theirs, ours in _COUNTS.items() if isinstance(own.get(theirs), int)}
    if isinstance(own.get("layer_norm_eps"), (int, float)):
        fields["norm_eps"] = float(own["layer_norm_eps"])
    if pair(own.get("image_size")):
        fields["image_size"] = pair(own["image_size"])
    return fields


def _timm(settings: Mapping[str, Any]) -> dict[str, Any]:
    made = settings.get("model_args") or {}
    cfg = settings.get("pretrained_cfg") or {}
    fields: dict[str, Any] = {}
    if "num_heads" in made:
        fields["heads"] = made["num_heads"]
    size = pair(made.get("img_size")) or pair(cfg.get("input_size"))
    if size:
        fields["image_size"] = size
    pooling = made.get("global_pool", settings.get("global_pool"))
    if pooling in POOLINGS:
        fields["pooling"] = POOLINGS[pooling]
    # What it says it has not, no tensor has been lost of.
    if made.get("class_token") is False:
        fields["class_token"] = False
    if made.get("final_norm") is False:
        fields["norm_place"] = "none"
    return fields


def image_sizes(run: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Every image size among hyper-parameters, (height, width), outermost first, however deep and in whatever holder.

    A holder is a mapping, a list, or an object with attributes: a Namespace, or what stands in for a configuration of
    omegaconf, which keeps its values one step further down.
    """
    found: list[tuple[int, int]] = []
    seen: set[int] = set()
    holders: list[Any] = [run]
    for holder in holders:  # grows while it is walked, which makes it go by depth
        if id(holder) in seen or len(seen) > _HOLDERS_MOST:
            continue
        seen.add(id(holder))
        names = _inside(holder)
        found += [size for name in _SIZE_NAMES if (size := _size(names.get(name))) is not None]
        for name, height in names.items():
            width = names.get(re.sub(r"height$", "width", re.sub(r"(^|_)h$", r"\1w", name)))
            if width is not height and (size := _size([height, width])) is not None:
                found.append(size)
        values = names.values() if names else holder if isinstance(holder, (list, tuple)) else ()
        holders += [value for value in values if not isinstance(value, (str, int, float, Tensor))]
    return list(dict.fromkeys(found))


def _inside(holder: Any) -> dict[str, Any]:
    """What a holder holds, under lower-case names."""
    attributes = getattr(holder, "__dict__", None)
    both = [values for values in (attributes, holder) if isinstance(values, Mapping)]
    return {str(name).lower(): value for values in both for name, value in values.items()}


def _size(value: Any) -> tuple[int, int] | None:
    """A size as people write it: numbers, `384x288`, or omegaconf's nodes around them."""
    plain = _plain(value)
    if isinstance(plain, str):
        plain = [int(side) for side in re.findall(r"\d+", plain)] if re.fullmatch(r"[\d\sx×,()\[\]]+", plain) else None
        plain = plain[0] if plain and len(plain) == 1 else plain
    return pair(plain)


def _plain(value: Any, depth: int = 4) -> Any:
    inner = getattr(value, "__dict__", {})
    kept = next((inner[name] for name in ("_val", "_content") if name in inner), None)
    if kept is not None and depth:
        return _plain(kept, depth - 1)
    return [_plain(item, depth - 1) for item in value] if isinstance(value, (list, tuple)) and depth else value
