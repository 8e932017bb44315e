"""A live module of timm: what its classes and attributes say and its tensors do not. timm itself is never imported."""

from typing import Any

from torch import nn

from regard.vit.config import RopeRecipe
from regard.vit.pretrained import settings
from regard.vit.pretrained.source import Source, pair
from regard.vit.pretrained.trunk import unbuilt

_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
_BLOCKS, _ATTENTIONS, _MLPS = (
    ("Block", "EvaBlock"),
    ("Attention", "EvaAttention", "AttentionRope"),
    ("Mlp", "GluMlp", "SwiGLU"),
)


def is_timm(module: nn.Module) -> bool:
    """Whether a module is a model of timm's, or of a class that inherits from one; not one of its blocks or layers."""
    theirs = any(base.__module__.startswith("timm.") for base in type(module).__mro__)
    return theirs and (hasattr(module, "pretrained_cfg") or _family(module) is not None)


def _family(module: nn.Module) -> str | None:
    return next(
        (
            base.__name__
            for base in type(module).__mro__
            if base.__module__.startswith("timm.models.") and base.__name__ in ("VisionTransformer", "Eva")
        ),
        None,
    )


def describe(source: Source, model: Any) -> None:
    """Fill in what a `VisionTransformer` or `Eva` states. Raises InputError for a part that Regard cannot build."""
    family = _family(model)
    if family is None:
        raise unbuilt(source, f"{type(model).__name__}, which is neither timm's VisionTransformer nor its Eva")
    cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    source.settings = {"class": family, "architecture": str(cfg.get("architecture", "")), "pretrained_cfg": cfg}
    source.processor = cfg
    for block in model.blocks:
        _check_block(source, block)
    attn = model.blocks[0].attn
    source.stated = {
        "heads": attn.num_heads,
        "norm_eps": _eps(source, model),
        "activation": _activation(source, model.blocks[0].mlp),
        "class_token": model.cls_token is not None,
        "positions": _positions(model),
    }
    size = pair(getattr(model.patch_embed, "img_size", None))
    if size is not None:
        source.stated["image_size"] = size
    if not any(isinstance(norm, nn.LayerNorm) for norm in (model.norm, model.fc_norm)):
        source.stated["norm_place"] = "none"
    _pooling(source, model)
    if getattr(model, "rope", None) is not None:
        source.stated["rope"] = _rope(source, model.rope, attn)


def _check_block(source: Source, block: Any) -> None:
    if type(block).__name__ not in _BLOCKS:
        raise unbuilt(source, f"blocks of the kind {type(block).__name__}")
    attn, mlp = block.attn, block.mlp
    for part, known in ((attn, _ATTENTIONS), (mlp, _MLPS)):
        if type(part).__name__ not in known:
            raise unbuilt(source, f"{type(part).__name__} in its blocks")
    if getattr(attn, "gate", None) is not None:
        raise unbuilt(source, "attn.gate, a gate on what the heads put out")
    if getattr(attn, "num_kv_heads", attn.num_heads) != attn.num_heads:
        raise unbuilt(source, f"{attn.num_kv_heads} heads of keys for {attn.num_heads} of queries")


def _eps(source: Source, model: nn.Module) -> float:
    """Every LayerNorm's, which must be one."""
    for part in model.modules():
        other = "norm" in type(part).__name__.lower() and not isinstance(part, nn.LayerNorm)
        if other and list(part.parameters(recurse=False)):
            raise unbuilt(source, f"norms of the kind {type(part).__name__}")
    found = sorted({part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)})
    if len(found) > 1:
        raise unbuilt(source, f"norms with different eps ({', '.join(map(str, found))})")
    return float(found[0])


def _activation(source: Source, mlp: Any) -> str:
    kind, gated = type(mlp.act).__name__, type(mlp).__name__ in ("GluMlp", "SwiGLU")
    if gated and kind == "SiLU" and not getattr(mlp, "gate_last", False):
        return "swiglu"
    if gated or kind not in _ACTIVATIONS:
        raise unbuilt(source, f"{kind} in a {type(mlp).__name__}{' with the gate last' if gated else ''}")
    return "gelu_tanh" if getattr(mlp.act, "approximate", "none") == "tanh" else _ACTIVATIONS[kind]


def _pooling(source: Source, model: Any) -> None:
    if not model.global_pool:
        return
    if model.global_pool not in settings.POOLINGS:
        raise unbuilt(source, f"global_pool {model.global_pool!r}")
    source.stated["pooling"] = settings.POOLINGS[model.global_pool]
    pool = model.attn_pool
    # An Eva asks every token; a VisionTransformer the patches, unless told otherwise.
    everything = getattr(model, "pool_include_prefix", pool is not None)
    if everything and model.num_prefix_tokens and model.global_pool != "token":
        raise unbuilt(source, f"global_pool {model.global_pool!r} over class token and registers too")
    if pool is None:
        return
    if pool.num_heads != model.blocks[0].attn.num_heads or pool.latent_len != 1 or pool.pos_embed is not None:
        raise unbuilt(source, f"attn_pool with {pool.num_heads} heads and {pool.latent_len} queries")
    if _activation(source, pool.mlp) != source.stated["activation"]:
        raise unbuilt(source, "attn_pool with another activation than the blocks")


def _positions(model: Any) -> str:
    table, rope = model.pos_embed is not None, getattr(model, "rope", None) is not None
    return {(True, True): "learned+rope", (True, False): "learned", (False, True): "rope"}.get((table, rope), "none")


def _rope(source: Source, rope: Any, attn: Any) -> RopeRecipe:
    """What it turns by; `settings` then also say which axis comes first."""
    kind, half = type(rope).__name__, bool(getattr(rope, "rotate_half", False))
    axes, offset = getattr(rope, "grid_indexing", "ij"), getattr(rope, "grid_offset", 0)
    if kind == "RotaryEmbeddingMixed":
        raise unbuilt(source, "rope.freqs: rotary frequencies that each layer learns (rope_type 'mixed')")
    if offset:
        raise unbuilt(source, f"rotary positions counted from {offset:g} (rope_grid_offset)")
    source.settings["rope_axes"] = axes
    if rope.dim == attn.head_dim:
        if kind == "RotaryEmbeddingDinoV3" and half and axes == "ij" and rope.normalize_coords == "separate":
            if rope.min_period is not None and rope.max_period is not None:
                return RopeRecipe("centred", periods=tuple(rope.periods.tolist()))
            return RopeRecipe("centred", float(rope.temperature))
        if (
            kind == "RotaryEmbeddingCat"
            and not half
            and getattr(rope, "grid_type", "index") == "index"
            and not rope.in_pixels
        ):
            return RopeRecipe("index", float(rope.temperature), pair(rope.ref_feat_shape))
    raise unbuilt(source, f"{kind} with pairs {'i, i + K/2' if half else '2i, 2i + 1'} and axes {axes!r}")
