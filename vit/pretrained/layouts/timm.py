"""timm's `VisionTransformer`: `vit_*`, `deit*`, `deit3_*`, `vit_*_clip_*`, `*_siglip_*`, `*_reg4_gap_*`, `*_dinov2`.

Token order is class token, registers, patches. What differs between its architectures shows in the tensors but for
three things that the architecture's name tells: the activation, eps, and whether there is a final norm at all.
"""

import re
from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors, settings, trunk
from regard.vit.pretrained.layout import Layout
from regard.vit.pretrained.layouts import dino
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.source import Source

RESIZE = PositionResize("bicubic", antialias=True)
# The authors of DINO, and of DINOv2 without registers, resample so; timm does not.
DINOV2_RESIZE = PositionResize("bicubic", antialias=False, offset=0.1)

BLOCK_RULES = (
    Rule("blocks.#.norm1.*", "blocks.#.norm1.*"),
    Rule("blocks.#.attn.qkv.*", "blocks.#.attn.to_{q,k,v}.*"),
    Rule("blocks.#.attn.q_norm.*", "blocks.#.attn.norm_q.*"),
    Rule("blocks.#.attn.k_norm.*", "blocks.#.attn.norm_k.*"),
    Rule("blocks.#.attn.norm.*", "blocks.#.attn.norm_out.*"),
    Rule("blocks.#.attn.proj.*", "blocks.#.attn.out.*"),
    Rule("blocks.#.ls1.gamma", "blocks.#.scale1.gamma"),
    Rule("blocks.#.norm2.*", "blocks.#.norm2.*"),
    Rule("blocks.#.mlp.fc1.*", "blocks.#.mlp.{gate,fc1}.*", when=lambda config: config.activation == "swiglu"),
    Rule("blocks.#.mlp.fc1.*", "blocks.#.mlp.fc1.*", when=lambda config: config.activation != "swiglu"),
    Rule("blocks.#.mlp.fc1_g.*", "blocks.#.mlp.gate.*"),
    Rule("blocks.#.mlp.fc1_x.*", "blocks.#.mlp.fc1.*"),
    Rule("blocks.#.mlp.norm.*", "blocks.#.mlp.norm.*"),
    Rule("blocks.#.mlp.fc2.*", "blocks.#.mlp.fc2.*"),
    Rule("blocks.#.ls2.gamma", "blocks.#.scale2.gamma"),
)
EMBED_RULES = (
    Rule("patch_embed.proj.weight", "tokenizer.proj.weight", CONV),
    Rule("patch_embed.proj.bias", "tokenizer.proj.bias"),
    Rule("cls_token", "cls", TOKEN),
    Rule("reg_token", "registers", ROWS),
    Rule("pos_embed", "positions", ROWS),
    Rule("norm_pre.*", "pre_norm.*"),
)
HEAD_RULES = (
    Rule("norm.*", "norm.*"),
    Rule("fc_norm.*", "pool.norm.*"),
    Rule("attn_pool.latent", "pool.asker.latent", TOKEN),
    Rule("attn_pool.q.*", "pool.asker.attn.to_q.*"),
    Rule("attn_pool.kv.*", "pool.asker.attn.to_{k,v}.*"),
    Rule("attn_pool.proj.*", "pool.asker.attn.out.*"),
    Rule("attn_pool.norm.*", "pool.asker.norm.*"),
    Rule("attn_pool.mlp.fc1.*", "pool.asker.mlp.fc1.*"),
    Rule("attn_pool.mlp.fc2.*", "pool.asker.mlp.fc2.*"),
)
# DeiT's distillation token has a row in the position table as a register has, and is one here.
RULES = (*EMBED_RULES, Rule("dist_token", "registers", ROWS), *BLOCK_RULES, *HEAD_RULES)

# Of other families that have these names too.
_FOREIGN = (
    "mask_token", "register_tokens", "storage_tokens", "rope_embed.periods", "blocks.#.attn.qkv.bias_mask",
    "decoder_**", "blocks.#.mlp.w12.*", "blocks.#.gamma_1", "blocks.#.attn.q_bias", "blocks.#.attn.q_proj.weight",
)  # fmt: skip
# SigLIP's towers whose MLP has the tanh form of GELU in timm, by name and by what their tensors tell.
_TANH = re.compile(r"patch32_siglip|so400m_patch16_siglip|giantopt_patch16_siglip|large_patch16_siglip_(gap_)?512")
_TANH_SIZES = {(768, 32), (1152, 16), (1536, 16)}  # width, patch size; and ViT-L/16 at 512 px
_HEADS = {"vit_base_patch16_gap_224": {768: 16}}
_UNNORMED = re.compile(r"vit_\w+_radio_v\d|vit_intern300m_")  # without a final norm


def _recognises(source: Source) -> bool:
    if "class" in source.settings:
        return source.settings["class"] == "VisionTransformer"
    if source.has(*_FOREIGN) or dino.recognises(source):
        return False
    return source.has("blocks.#.attn.qkv.weight", "blocks.#.in_proj.weight", "blocks.#.attns.#.attn.qkv.weight")


def _describe(source: Source) -> dict[str, Any]:
    trunk.refuse(source)
    if source.fact("positions") != "none":
        source.need("pos_embed")
    if _UNNORMED.match(trunk.architecture(source)):
        source.stated.setdefault("norm_place", "none")
    heads = {} if "cls_token" in source.tensors else {1536: 16}  # SigLIP's giantopt
    if trunk.architecture(source):  # widths that tell nothing in a file alone
        heads |= {64: 2, 96: 3, 256: 4, **_HEADS.get(trunk.architecture(source), {})}
    fields = trunk.facts(source, heads, (14, 14), ("reg_token", "dist_token"))
    scaled = source.has("blocks.#.ls1.gamma", "blocks.#.ls2.gamma")
    fields |= dict(
        positions=source.fact("positions", "learned"),
        qkv_bias=source.has("blocks.#.attn.qkv.bias"),
        layer_scale=1e-5 if scaled else None,
        norm_eps=_eps(source, fields),
    )
    _refuse(source, fields)
    dinov2 = _is_dinov2(source, fields)
    plain = fields["position_rows"] == "cls+patches" and not scaled and not fields["pre_norm"]
    if plain and not trunk.architecture(source):
        source.tell("position_resize as timm's: DINO's own files have the same tensors; for them pass 'dino'")
    if fields["activation"] != "swiglu":
        fields["activation"] = _activation(source, fields)
    deit = "dist_token" in source.tensors or (scaled and fields["class_token"] and fields["position_rows"] == "patches")
    if "dist_token" in source.tensors:
        source.folded.append("dist_token is register 0")
    trunk.guessed_preprocess(source)
    authors = (dinov2 and not fields["registers"]) or trunk.tag(source) == "dino"
    return fields | dict(
        position_resize=DINOV2_RESIZE if authors else RESIZE,
        preprocess=processors.timm(source, _default_preprocess(fields, dinov2, deit)),
    )


def _is_dinov2(source: Source, fields: dict[str, Any]) -> bool:
    """Whether these are DINOv2's weights: by name, or by their position table of 37 x 37 patches of 14 px."""
    alike = fields["patch_size"] == 14 and fields["layer_scale"] is not None
    named = "dinov2" in trunk.architecture(source)
    return alike and (named or fields["image_size"] == (518, 518))


def _refuse(source: Source, fields: dict[str, Any]) -> None:
    """Raise InputError for tensors whose names fit but that mean another architecture, or a part of one."""
    has_cls, registers, scaled = fields["class_token"], fields["registers"], fields["layer_scale"] is not None
    if "head_dist.weight" in source.tensors and source.changes.get("classes"):
        raise trunk.unbuilt(
            source,
            f"{source.own_name('head_dist.weight')}: the mean of two classifiers, on two tokens of a distilled DeiT",
        )
    if source.settings.get("class"):  # of a live module
        return
    if trunk.architecture(source) == "test_vit3" or trunk.arguments(source).get("pool_include_prefix"):
        raise trunk.unbuilt(source, "pooling over class token and registers too (pool_include_prefix)")
    plain = not has_cls and not registers and not scaled
    if "_rpn_" in trunk.architecture(source) or (plain and not fields["qkv_bias"] and source.has("fc_norm.*")):
        raise trunk.unbuilt(
            source, "its tensors are those of timm's vit_base_patch16_rpn_224: norms after attention and MLP"
        )
    if fields["pre_norm"] and (fields["pooling"] == "map" or not source.has("norm.*", "fc_norm.*")):
        raise trunk.unbuilt(
            source, "its tensors are those of a Perception Encoder (norm_pre), with rotary positions of its own"
        )
    unscaled_gap = not scaled or not fields["qkv_bias"] or source.has("fc_norm.*", "attn_pool.**")
    if source.fact("class_token") is None and not has_cls and not unscaled_gap:
        raise trunk.lost(source, "cls_token", "where a model never had one, pass class_token=False")
    bare_patches = has_cls and not registers and fields["position_rows"] == "patches"
    if source.fact("registers") is None and bare_patches and _is_dinov2(source, fields):
        raise trunk.lost(source, "reg_token", "this position table is of a DINOv2 with registers")
    size = fields["image_size"], fields["patch_size"]
    if has_cls and not (scaled or fields["pre_norm"] or trunk.architecture(source)) and size == ((518, 518), 14):
        raise trunk.lost(source, "blocks.0.ls1.gamma", "this position table is of a DINOv2, which has layer scale")
    trunk.need_norm(source, fields)


def _eps(source: Source, fields: dict[str, Any]) -> float:
    """1e-5 for CLIP's and BEiT-3's towers, 1e-6 for all others."""
    named = trunk.architecture(source)
    if named:
        return float(source.fact("norm_eps", 1e-5 if "_clip_" in named or named.startswith("beit3_") else 1e-6))
    if fields["attn_norm"] and fields["mlp_norm"]:
        return float(source.assume("norm_eps", 1e-5, "as BEiT-3, which has norms inside attention and MLP too"))
    return float(source.fact("norm_eps", 1e-5 if fields["pre_norm"] else 1e-6))


def _activation(source: Source, fields: dict[str, Any]) -> str:
    """Raises InputError for a CLIP tower whose GELU nothing tells."""
    named, made = trunk.architecture(source), trunk.arguments(source).get("act_layer")
    if source.fact("activation"):
        return str(source.fact("activation"))
    if isinstance(made, str):
        return settings.activation(made)
    if named:
        return "quick_gelu" if "quickgelu" in named else "gelu_tanh" if _TANH.search(named) else "gelu"
    if fields["pre_norm"]:
        raise InputError(
            f"{source.where}: CLIP's towers have GELU or QuickGELU, and their tensors do not tell which; pass"
            " activation='gelu', or activation='quick_gelu' for timm's *_quickgelu_* (OpenAI, DFN, MetaCLIP)"
        )
    if fields["class_token"] or fields["registers"] or fields["layer_scale"] is not None or not source.has("norm.*"):
        return "gelu"
    tanh = (fields["dim"], fields["patch_size"]) in _TANH_SIZES
    tanh |= (fields["dim"], fields["patch_size"], fields["image_size"]) == (1024, 16, (512, 512))
    guess = "gelu_tanh" if tanh else "gelu"
    return str(
        source.assume("activation", guess, "as timm's SigLIP of this size; some of its towers have the other GELU")
    )


def _default_preprocess(fields: dict[str, Any], dinov2: bool, deit: bool) -> Preprocess:
    size, half = fields["image_size"], processors.HALF
    crop_ratio = 1.0 if dinov2 or fields["pre_norm"] or min(size) >= 384 else 0.9
    if fields["pre_norm"]:
        return Preprocess(size, "crop", crop_ratio, "bicubic", processors.OPENAI_MEAN, processors.OPENAI_STD)
    if fields["pooling"] == "map":
        return Preprocess(size, "squash", 1.0, "bicubic", half, half)
    if dinov2 or deit:
        return Preprocess(size, "crop", crop_ratio, "bicubic")
    return Preprocess(size, "crop", crop_ratio, "bicubic", half, half)


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    """Recipes by library: timm resamples every table alike; the authors of DINOv2 do not, nor does transformers."""
    return {
        "timm": RESIZE,
        "transformers": PositionResize("bicubic", antialias=bool(config.registers)),
        "dinov2": RESIZE if config.registers else DINOV2_RESIZE,
        "dino": DINOV2_RESIZE,
    }.get(name)


LAYOUT = Layout(
    name="timm",
    owner="timm",
    anchor="patch_embed.proj.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    classifiers=(Rule("head.*", "head.*"), Rule("head_dist.*", "head_dist.*")),
    resize=resize,
)
