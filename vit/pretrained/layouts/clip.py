"""CLIP's image tower as OpenAI and open_clip publish it (Radford et al., 2021, arXiv:2103.00020).

OpenAI's own files hold half precision, and their activation is QuickGELU; so is that of some later weights, of which
only `open_clip_config.json` tells. Token order is class token, patches, and the table has rows for both.
"""

from collections.abc import Mapping
from typing import Any

import torch

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import CONV, Rule
from regard.vit.pretrained.source import Source

RESIZE = PositionResize("bicubic", antialias=True)
_BLOCK = "transformer.resblocks.#."
_FIRST = "transformer.resblocks.0."
_NAMES = (
    ("ln_1.*", "norm1.*"),
    ("attn.in_proj_weight", "attn.to_{q,k,v}.weight"),
    ("attn.in_proj_bias", "attn.to_{q,k,v}.bias"),
    ("attn.out_proj.*", "attn.out.*"),
    ("ls_1.gamma", "scale1.gamma"),
    ("ln_2.*", "norm2.*"),
    ("mlp.c_fc.*", "mlp.fc1.*"),
    ("mlp.c_proj.*", "mlp.fc2.*"),
    ("ls_2.gamma", "scale2.gamma"),
)
RULES = (
    Rule("conv1.weight", "tokenizer.proj.weight", CONV),
    Rule("class_embedding", "cls"),
    Rule("positional_embedding", "positions"),
    Rule("ln_pre.*", "pre_norm.*"),
    *(Rule(_BLOCK + theirs, f"blocks.#.{ours}") for theirs, ours in _NAMES),
    Rule("ln_post.*", "norm.*", when=lambda config: config.norm_place == "tokens"),
    Rule("ln_post.*", "pool.norm.*", when=lambda config: config.norm_place == "pooled"),
)


def _recognises(source: Source) -> bool:
    return source.has(_BLOCK + "attn.in_proj_weight") and "conv1.weight" in source.tensors


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape("conv1.weight", 4)
    source.need("class_embedding")
    size = source.image_size(source.shape("positional_embedding", 2)[0] - 1, patch_size)
    said = _vision(source)
    width = said.get("head_width", 64 if said else None)
    openai = Preprocess(size, "crop", 1.0, "bicubic", processors.OPENAI_MEAN, processors.OPENAI_STD)
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=source.depth(_BLOCK),
        heads=source.heads(dim, width if isinstance(width, int) else None),
        hidden_dim=source.shape(_FIRST + "mlp.c_fc.weight", 2)[0],
        position_rows="cls+patches",
        position_resize=RESIZE,
        activation=_activation(source, said),
        norm_eps=source.fact("norm_eps", float((said.get("norm_kwargs") or {}).get("eps", 1e-5))),
        layer_scale=1e-5 if source.has(_BLOCK + "ls_1.gamma", _BLOCK + "ls_2.gamma") else None,
        pre_norm=True,
        norm_place="pooled" if said.get("final_ln_after_pool") else "tokens",
        pooling="mean" if said.get("pool_type") == "avg" else "cls",
        preprocess=processors.open_clip(source, openai),
    )


def _config(source: Source) -> Mapping[str, Any]:
    """The model's part of `open_clip_config.json`, where it lies beside the weights."""
    config = source.settings.get("open_clip") or {}
    model = config.get("model_cfg", config)
    return model if isinstance(model, Mapping) else {}


def _vision(source: Source) -> Mapping[str, Any]:
    vision = _config(source).get("vision_cfg")
    return vision if isinstance(vision, Mapping) else {}


def _activation(source: Source, said: Mapping[str, Any]) -> str:
    if said and source.fact("activation") is None:
        if _config(source).get("quick_gelu"):
            return "quick_gelu"
        return "gelu_tanh" if (said.get("act_kwargs") or {}).get("approximate") == "tanh" else "gelu"
    half = source.need("conv1.weight").dtype == torch.float16
    why = "as OpenAI's files, which are in half precision" if half else "as OpenAI's; other CLIPs have the same tensors"
    return str(source.assume("activation", "quick_gelu", why))


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {"open_clip": RESIZE, "timm": RESIZE, "transformers": PositionResize("bicubic", antialias=False)}.get(name)


LAYOUT = Layout(
    name="openai-clip",
    owner="open_clip",
    anchor="conv1.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    unused=(Unused("proj", "projection into the space that images and texts share"),),
    resize=resize,
)
