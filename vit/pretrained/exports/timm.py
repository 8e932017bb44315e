"""timm: a folder of its hub form, opened by `timm.create_model("local-dir:FOLDER", pretrained=True)`.

A `config.json` of timm cannot name a class of layers, so what has one of its own (eps, SwiGLU, kinds of rope) comes
from an architecture of timm's that has it; all the rest is arguments.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.vit.config import ViTConfig
from regard.vit.pretrained.exports import notes, place
from regard.vit.pretrained.exports.target import Allowed, Form, Target, anything, own_periods, pools
from regard.vit.pretrained.exports.tensors import laid_out, native, ratio, renamed
from regard.vit.pretrained.layouts import eva, timm
from regard.vit.pretrained.report import ExportReport
from regard.vit.pretrained.rules import Rule

if TYPE_CHECKING:
    from regard.vit.model import ViT

_POOLINGS = {"cls": "token", "mean": "avg", "map": "map"}
_BOTH = (True, False)
_SHARED: dict[str, Allowed] = {
    "registers": anything,
    "attn_norm": _BOTH,
    "mlp_norm": _BOTH,
    "qk_norm": _BOTH,
    "layer_scale": anything,
    "norm_place": ("tokens", "pooled"),
    "pooling": pools("cls", "mean"),
}
_VIT: dict[str, Allowed] = {
    **_SHARED,
    "class_token": _BOTH,
    "activation": ("gelu", "gelu_tanh", "quick_gelu"),
    "pre_norm": _BOTH,
    "norm_place": ("tokens", "pooled", "none"),
    "pooling": pools(*_POOLINGS),
}
_EVA: dict[str, Allowed] = {
    **_SHARED,
    "activation": ("gelu", "swiglu"),
    "key_bias": lambda config: not (config.key_bias and config.qkv_bias),
}
# The name of DINOv2's architecture tells that its positions are not resampled as timm does.
_DINOV2: dict[str, Allowed] = {
    "patch_size": (14,),
    "layer_scale": lambda config: config.layer_scale is not None,
    "position_resize": (timm.DINOV2_RESIZE,),
}
_GATED: dict[str, Allowed] = {**_VIT, "activation": ("swiglu",), "pooling": pools("cls", "mean")}
VIT = Form("vit_base_patch16_224", _VIT)
DINOV2 = Form("vit_small_patch14_dinov2", {**_VIT, **_DINOV2})
CLIP = Form("vit_base_patch16_clip_224", {**_VIT, "norm_eps": (1e-5,)})
QUICK = Form("vit_base_patch16_clip_quickgelu_224", {**CLIP.allows, "activation": ("quick_gelu",)})
GATED = Form("vit_giant_patch14_reg1_tipsv2", _GATED)
GATED_DINOV2 = Form("vit_giant_patch14_dinov2", {**_GATED, **_DINOV2})
DINOV3 = Form(
    "vit_small_patch16_dinov3",
    {
        **_EVA,
        "positions": ("rope",),
        "rope": lambda config: (
            (config.rope.coordinates, config.rope.base) == ("centred", 100) and not own_periods(config)
        ),
        "norm_eps": (1e-5,),
    },
)
EVA02 = Form(
    "eva02_tiny_patch14_224",
    {
        **_EVA,
        "class_token": _BOTH,
        # As its own models have it: of others the tensors would not tell that there is a rope, and which.
        "positions": lambda config: (
            (config.positions, config.activation) == ("learned+rope", "swiglu")
            or (config.positions, config.class_token) == ("rope", False)
        ),
        "rope": lambda config: config.rope == eva.EVA02,
    },
)


def _write(vit: "ViT", path: Path, form: Form) -> ExportReport:
    config, is_eva = vit.config, form in (DINOV3, EVA02)
    rows = _rows(config)
    biases = "" if is_eva or not config.qkv_bias else "qkv"
    # What would not be known for an Eva by a bias is known by its layer scales.
    scales = form in (GATED, GATED_DINOV2, DINOV3) or (form is EVA02 and not config.qkv_bias)
    tensors, laid = laid_out(vit, rows, biases=biases, scales=scales)
    table = [rule for rule in eva.RULES if "{gate" not in rule.ours] if is_eva else timm.RULES
    arguments = _shared(config, rows) | (_eva(config) if is_eva else _vit(config))
    if scales or config.layer_scale is not None:
        arguments["init_values"] = 1.0 if config.layer_scale is None else config.layer_scale
    place.folder(path, _config(config, form, arguments), renamed((*table, Rule("head.*", "head.*")), tensors, laid))
    told = [
        *notes.scales(config, scales),
        *notes.resize(config, timm.RESIZE, "timm"),
        *notes.pool(config, tuple(_POOLINGS), "the class token leaves the model"),
    ]
    if config.preprocess.size is None:
        told.append("timm keeps no picture at its own size: it resizes to the native one")
    return ExportReport(
        path=str(path),
        layout="timm",
        model=f"{'Eva' if is_eva else 'VisionTransformer'}, as {form.name} with arguments",
        code=f"model = timm.create_model({'local-dir:' + str(path)!r}, pretrained=True)",
        notes=tuple(told),
    )


def _rows(config: ViTConfig) -> str:
    """Rows of the position table there: for all special tokens, or for none."""
    if not config.has_table:
        return config.position_rows
    if config.registers:
        # Where registers have none, the class token's row goes into the token, as timm reads DINOv2 with registers.
        return "patches" if config.position_rows == "cls+patches" else config.position_rows
    # Without a row a DINOv2 would look like one that has lost its registers.
    like_dinov2 = config.patch_size == 14 and config.layer_scale is not None
    return "cls+patches" if config.class_token and (like_dinov2 or config.position_rows != "patches") else "patches"


def _shared(config: ViTConfig, rows: str) -> dict[str, Any]:
    return {
        "img_size": list(native(config)),
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "class_token": config.class_token,
        "no_embed_class": rows == "patches",
        "global_pool": _POOLINGS.get(config.pooling, "token"),
        "drop_path_rate": config.drop_path,
        "dynamic_img_size": True,
    }


def _vit(config: ViTConfig) -> dict[str, Any]:
    hidden, gated = config.hidden_dim or 4 * config.dim, config.activation == "swiglu"
    return {
        "mlp_ratio": ratio(2 * hidden if gated else hidden, config.dim),
        **({} if gated else {"act_layer": config.activation}),
        "scale_attn_norm": config.attn_norm,
        "scale_mlp_norm": config.mlp_norm,
        "reg_tokens": config.registers,
        "pre_norm": config.pre_norm,
        "fc_norm": config.norm_place == "pooled",
        "final_norm": config.norm_place != "none",
    }


def _eva(config: ViTConfig) -> dict[str, Any]:
    return {
        "mlp_ratio": ratio(config.hidden_dim or 4 * config.dim, config.dim),
        "swiglu_mlp": config.activation == "swiglu",
        "swiglu_align_to": 1,  # gate and inner layer apart, of exactly this width
        "scale_attn_inner": config.attn_norm,
        "scale_mlp": config.mlp_norm,
        "num_reg_tokens": config.registers,
        "use_abs_pos_emb": config.has_table,
        "use_fc_norm": config.norm_place == "pooled",
        "use_post_transformer_norm": config.norm_place == "tokens",
    }


def _config(config: ViTConfig, form: Form, arguments: dict[str, Any]) -> dict[str, Any]:
    preprocess = config.preprocess
    return {
        "architecture": form.name,
        "num_classes": config.classes,
        "num_features": config.dim,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [config.channels, *(preprocess.size or native(config))],
            "fixed_input_size": False,
            "pool_size": None,
            "interpolation": preprocess.interpolation,
            "crop_pct": preprocess.crop_ratio,
            "crop_mode": "squash" if preprocess.fit == "squash" else "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "num_classes": config.classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


TARGET = Target("timm", (DINOV2, VIT, QUICK, CLIP, GATED_DINOV2, GATED, DINOV3, EVA02), _write)
