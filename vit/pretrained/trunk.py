"""What timm's two vision transformers share: the facts that their tensors tell, and what neither may hold."""

import re
from collections.abc import Mapping
from typing import Any

from regard.vit.errors import InputError
from regard.vit.pretrained import settings
from regard.vit.pretrained.source import Source, first_match, fitting_sizes, pair

# Parts that our blocks do not have. Left out, each would change every number.
_UNKNOWN = {
    "blocks.#.in_proj.weight": "attention and MLP side by side",
    "blocks.#.attns.#.**": "several attentions side by side",
    "rope.freqs": "rotary frequencies that each layer learns (rope_type 'mixed')",
    "blocks.#.attn.gate.*": "a gate on what the heads put out",
    "blocks.#.attn.lambda**": "differential attention",
    "patch_embed.norm.*": "a norm on the patch projection",
}
_SQUARES = {side * side for side in range(1, 1025)}  # the grids a table may be of where nothing tells


def refuse(source: Source) -> None:
    """Raise InputError naming the tensor for an architecture of timm's that Regard does not build."""
    for pattern, what in _UNKNOWN.items():
        name = first_match(source.tensors, pattern)
        if name is not None:
            raise unbuilt(source, f"{source.own_name(name)}: {what}")
    norm = first_match(source.tensors, "blocks.#.norm1.weight")
    if norm is not None and not source.has("blocks.#.norm1.bias"):
        raise unbuilt(source, f"{source.own_name(norm)} and its like have no bias: RMSNorm")


def unbuilt(source: Source, what: str) -> InputError:
    return InputError(f"{source.where}: {what}, which Regard does not build")


def lost(source: Source, name: str, why: str) -> InputError:
    """A tensor that must have been there once, for no published model is without it."""
    return InputError(f"{source.where}: tensor {source.own_name(name)!r} is missing: {why}")


def architecture(source: Source) -> str:
    """What timm calls the architecture, where a module, a `config.json`, open_clip's, or a run of timm's tells it."""
    said = source.settings.get("architecture") or _open_clip(source).get("timm_model_name")
    if not said:
        run = _mapping(source.settings.get("run")).get("arch")
        said = run if isinstance(run, str) and re.match(r"[a-z0-9]+_\w*patch\d+_", run) else ""
    return str(said).split(".")[0]


def tag(source: Source) -> str:
    """Which of an architecture's weights they are, as timm calls them."""
    return str(_mapping(source.settings.get("pretrained_cfg")).get("tag") or "")


def arguments(source: Source) -> Mapping[str, Any]:
    """What a `config.json` of timm passes to the architecture."""
    return _mapping(source.settings.get("model_args"))


def _open_clip(source: Source) -> Mapping[str, Any]:
    return _mapping(_mapping(_mapping(source.settings.get("open_clip")).get("model_cfg")).get("vision_cfg"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def facts(
    source: Source, heads: Mapping[int, int], grid: tuple[int, int], registers: tuple[str, ...] = ("reg_token",)
) -> dict[str, Any]:
    """`ViTConfig` fields that both read alike off their tensors; the activation is only right where it is `swiglu`.

    Args:
        heads: numbers of heads by width, where this family departs from most.
        grid: native grid of a model without a position table.
        registers: names that register tokens may have.
    """
    dim, channels, *sides = source.shape("patch_embed.proj.weight", 4)
    if sides[0] != sides[1]:
        name = source.own_name("patch_embed.proj.weight")
        raise InputError(f"{source.where}: {name} has patches of {sides[0]} x {sides[1]} px; they must be square")
    patch_size, has_cls = sides[0], "cls_token" in source.tensors
    count = sum(source.shape(name, 3)[1] for name in registers if name in source.tensors)
    fields: dict[str, Any] = dict(position_rows="patches")
    if "pos_embed" in source.tensors:
        fields["position_rows"], size = _table(source, has_cls, count, patch_size)
    else:
        size = pair(source.fact("image_size")) or (grid[0] * patch_size, grid[1] * patch_size)
    pooled = source.has("fc_norm.*")
    fields |= dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=source.depth("blocks.#."),
        **_heads(source, dim, heads),
        hidden_dim=_hidden_dim(source),
        class_token=has_cls,
        registers=count,
        activation="swiglu" if gated(source) else "gelu",
        qk_norm=source.has("blocks.#.attn.q_norm.*", "blocks.#.attn.k_norm.*"),
        attn_norm=source.has("blocks.#.attn.norm.*"),
        mlp_norm=source.has("blocks.#.mlp.norm.*"),
        pre_norm=source.has("norm_pre.*"),
        norm_place=source.fact("norm_place") or ("pooled" if pooled else "tokens"),
        pooling=_pooling(source, pooled, has_cls),
        # A convolution leaves out what does not make a whole patch.
        size_policy="crop" if size[0] % patch_size or size[1] % patch_size else "resize",
    )
    return fields


def need_norm(source: Source, fields: Mapping[str, Any]) -> None:
    """Raise InputError for a file without a final norm where the model is not known to have none."""
    if fields["norm_place"] != "none" and not source.has("norm.*", "fc_norm.*"):
        raise lost(source, "norm.weight", "a model that never had a final norm is opened with norm_place='none'")


def guessed_preprocess(source: Source) -> None:
    """Have the report say that a file alone does not tell how to preprocess."""
    if not architecture(source) and not source.processor and "open_clip" not in source.settings:
        source.tell("preprocess: as timm's models with such tensors mostly have; the file does not say")


def _heads(source: Source, dim: int, published: Mapping[int, int]) -> dict[str, Any]:
    """`heads` and `head_dim`, the latter where it is not the width divided by the heads."""
    fused = "blocks.0.attn.qkv.weight"
    name = fused if fused in source.tensors or source.has("blocks.#.attn.qkv.weight") else "blocks.0.attn.q_proj.weight"
    rows = source.shape(name, 2)[0] // (3 if name == fused else 1)
    heads = source.fact("heads")
    if heads is None and dim in published:
        heads = source.assume("heads", published[dim], f"as published models of width {dim} and this kind have")
    heads = source.heads(dim) if heads is None else heads
    if not isinstance(heads, int) or heads < 1 or rows % heads:
        raise InputError(f"{source.where}: heads={heads!r} do not divide the {rows} rows of {source.own_name(name)}")
    return {"heads": heads, "head_dim": None if rows == dim else rows // heads}


def gated(source: Source) -> bool:
    """Whether a third projection gates the MLP: one of its own, or one stacked on `fc1`, the gate first."""
    if source.has("blocks.#.mlp.fc1_g.*", "blocks.#.mlp.fc1_x.*"):
        return True
    rows, inner = source.shape("blocks.0.mlp.fc1.weight", 2)[0], source.shape("blocks.0.mlp.fc2.weight", 2)[1]
    return rows == 2 * inner


def _hidden_dim(source: Source) -> int:
    if source.has("blocks.#.mlp.fc1_g.*", "blocks.#.mlp.fc1_x.*"):
        return source.shape("blocks.0.mlp.fc1_g.weight", 2)[0]
    return source.shape("blocks.0.mlp.fc1.weight", 2)[0] // (2 if gated(source) else 1)


def _pooling(source: Source, pooled: bool, has_cls: bool) -> str:
    said = arguments(source).get("global_pool", source.settings.get("global_pool"))
    said = str(said or _open_clip(source).get("timm_pool") or "")
    if said and said not in settings.POOLINGS and "pooling" not in source.changes:
        raise unbuilt(source, f"its configuration states global_pool {said!r}")
    guess = "map" if source.has("attn_pool.**") else "mean" if pooled or not has_cls else "cls"
    return str(source.fact("pooling") or settings.POOLINGS.get(said, guess))


def _table(source: Source, has_cls: bool, registers: int, patch_size: int) -> tuple[str, tuple[int, int]]:
    """Which tokens the position table has rows for, and its image size.

    Raises InputError where a rectangle, or one of two squares, has to be stated.
    """
    rows = source.shape("pos_embed", 3)[1]
    kinds: dict[int, str] = {0: "patches"}
    kinds.setdefault(int(has_cls), "cls+patches")
    kinds.setdefault(has_cls + registers, "cls+registers+patches")
    counts = {rows - lead: kind for lead, kind in kinds.items() if rows > lead}
    for count, kind in counts.items():
        if source.size_of(count, patch_size) is not None:
            return kind, source.image_size(count, patch_size)
    squares = {count: kind for count, kind in counts.items() if count in _SQUARES}
    given = source.changes.get("image_size")
    if len(squares) == 1 and given is None:
        ((count, kind),) = squares.items()
        return kind, source.image_size(count, patch_size)
    what = f"{source.own_name('pos_embed')} has {rows} rows, for {' or '.join(map(str, counts))} patches"
    if given is not None:
        height, width = pair(given) or (0, 0)
        raise InputError(
            f"{source.where}: image_size {given} has {height // patch_size} x {width // patch_size} patches of"
            f" {patch_size} px; {what}"
        )
    if squares:
        raise InputError(f"{source.where}: {what}, and both make a square; pass image_size=(height, width)")
    tokens = [source.own_name(name) for name in ("cls_token", "reg_token", "dist_token") if name not in source.tensors]
    raise InputError(
        f"{source.where}: {what}, which make no square; pass image_size=(height, width)"
        f"{fitting_sizes(min(counts), patch_size)}, unless the file has lost a token: {' or '.join(tokens)}"
    )
