"""timm's `Eva`: EVA, EVA-02, DINOv3 (`vit_*_dinov3`), `vit_*_rope_reg*_gap_*`, `vit_*_rope_*`; DeiT-III's own files.

Token order is class token, registers, patches. Nothing is stored of rotary positions: what they turn by follows from
which tensors there are, or has to be stated. EVA-02 and its kin turn neighbouring channels (2i, 2i + 1); the rows of
their queries and keys are put in another order, so that turning (i, i + K/2) gives the same scores.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.vit.config import PositionResize, RopeRecipe, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors, trunk
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts.timm import EMBED_RULES, HEAD_RULES, RESIZE
from regard.vit.pretrained.rules import Rule, turned_pairs
from regard.vit.pretrained.source import Source, pattern_of
from regard.vit.values import changed

DINOV3 = RopeRecipe("centred", 100.0)
EVA02 = RopeRecipe("index", 10000.0, (16, 16))
ROPE_VIT = RopeRecipe("index", 100.0)  # Heo et al., 2024, arXiv:2403.13298, axial

# Fused and split projections are two dialects; biases of queries and values alone are the usual ones.
RULES = (
    *EMBED_RULES,
    Rule("blocks.#.norm1.*", "blocks.#.norm1.*"),
    Rule("blocks.#.attn.qkv.weight", "blocks.#.attn.to_{q,k,v}.weight", turned_pairs(2)),
    Rule("blocks.#.attn.q_bias", "blocks.#.attn.to_q.bias", turned_pairs(1), when=lambda config: not config.key_bias),
    Rule("blocks.#.attn.v_bias", "blocks.#.attn.to_v.bias", when=lambda config: not config.key_bias),
    Rule(
        "blocks.#.attn.qkv.bias", "blocks.#.attn.to_{q,k,v}.bias", turned_pairs(2), when=lambda config: config.key_bias
    ),
    Rule("blocks.#.attn.q_proj.*", "blocks.#.attn.to_q.*", turned_pairs(1)),
    Rule("blocks.#.attn.k_proj.*", "blocks.#.attn.to_k.*", turned_pairs(1)),
    Rule("blocks.#.attn.v_proj.*", "blocks.#.attn.to_v.*"),
    Rule("blocks.#.attn.q_norm.*", "blocks.#.attn.norm_q.*", turned_pairs(0)),
    Rule("blocks.#.attn.k_norm.*", "blocks.#.attn.norm_k.*", turned_pairs(0)),
    Rule("blocks.#.attn.norm.*", "blocks.#.attn.norm_out.*"),
    Rule("blocks.#.attn.proj.*", "blocks.#.attn.out.*"),
    Rule("blocks.#.gamma_1", "blocks.#.scale1.gamma"),
    Rule("blocks.#.norm2.*", "blocks.#.norm2.*"),
    Rule("blocks.#.mlp.fc1.*", "blocks.#.mlp.{gate,fc1}.*", when=lambda config: config.activation == "swiglu"),
    Rule("blocks.#.mlp.fc1.*", "blocks.#.mlp.fc1.*", when=lambda config: config.activation != "swiglu"),
    Rule("blocks.#.mlp.fc1_g.*", "blocks.#.mlp.gate.*"),
    Rule("blocks.#.mlp.fc1_x.*", "blocks.#.mlp.fc1.*"),
    Rule("blocks.#.mlp.norm.*", "blocks.#.mlp.norm.*"),
    Rule("blocks.#.mlp.fc2.*", "blocks.#.mlp.fc2.*"),
    Rule("blocks.#.gamma_2", "blocks.#.scale2.gamma"),
    *HEAD_RULES,
)
_TURNED = {  # what of queries and keys is turned, and of how many parts it is stacked
    "blocks.#.attn.qkv.*": 3, "blocks.#.attn.q_bias": 1, "blocks.#.attn.q_proj.*": 1, "blocks.#.attn.k_proj.*": 1,
    "blocks.#.attn.q_norm.*": 1, "blocks.#.attn.k_norm.*": 1,
}  # fmt: skip
_OWN = ("blocks.#.gamma_1", "blocks.#.gamma_2", "blocks.#.attn.q_bias", "blocks.#.attn.q_proj.weight")
_FOREIGN = ("register_tokens", "storage_tokens", "rope_embed.periods", "decoder_**", "blocks.#.ls1.gamma")
_BIASES = {"q": ("q_bias", "q_proj.bias", "qkv.bias"), "k": ("k_proj.bias", "qkv.bias"), "v": ("v_bias", "v_proj.bias")}
_ENORMOUS = 1792  # the width of eva02_enormous, the one EVA with its norms after attention and MLP


def _recognises(source: Source) -> bool:
    if "class" in source.settings:
        return source.settings["class"] == "Eva"
    return source.has(*_OWN) and not source.has(*_FOREIGN)


def _prepare(source: Source) -> Source:
    """ROPE-ViT turns by column, then row; half a head's channels further it is by row, then column, as all do here."""
    trunk.refuse(source)
    if not _kind(source)[2]:
        return source
    fields = trunk.facts(source, {}, (14, 14))
    source.stated["heads"] = fields["heads"]
    width = fields["head_dim"] or fields["dim"] // fields["heads"]
    patterns = [(pattern_of(template), stacked) for template, stacked in _TURNED.items()]

    def turned(name: str, t: Tensor) -> Tensor:
        stacked = next((stacked for pattern, stacked in patterns if pattern.fullmatch(name)), 0)
        if not stacked or t.dim() == 0 or len(t) % (stacked * width):  # a wrong shape is found later on
            return t
        parts = t.chunk(stacked)
        rolled = [part.unflatten(0, (-1, width)).roll(width // 2, 1).flatten(0, 1) for part in parts[:2]]
        return torch.cat([*rolled, *parts[2:]])

    source.folded.append("rotary positions by column, then row, became by row, then column")
    return source.with_tensors({name: turned(name, t) for name, t in source.tensors.items()})


def _describe(source: Source) -> dict[str, Any]:
    positions, rope, _ = _kind(source)
    dinov3 = "rope" in positions and rope.coordinates == "centred"
    fields = trunk.facts(source, {1280: 20} if dinov3 else {}, (14, 14) if rope == ROPE_VIT else (16, 16))
    trunk.need_norm(source, fields)
    trunk.guessed_preprocess(source)
    if dinov3 and source.fact("pooling") is None:
        why = "as timm pools DINOv3; its authors take the class token, pooling='cls'"
        fields["pooling"] = source.assume("pooling", "mean", why)
    bias = {part: source.has(*(f"blocks.#.attn.{name}" for name in names)) for part, names in _BIASES.items()}
    return fields | dict(
        positions=positions,
        position_resize=RESIZE,
        rope=rope,
        activation="swiglu" if fields["activation"] == "swiglu" else source.fact("activation", "gelu"),
        norm_eps=source.fact("norm_eps", 1e-5 if dinov3 else 1e-6),
        qkv_bias=any(bias.values()),
        key_bias=bias["k"] or not any(bias.values()),
        layer_scale=1e-5 if source.has("blocks.#.gamma_1", "blocks.#.gamma_2") else None,
        preprocess=processors.timm(source, _default_preprocess(fields["image_size"], positions, rope)),
    )


def _kind(source: Source) -> tuple[str, RopeRecipe, bool]:
    """Kind of positions, what they turn by, and whether by the column first."""
    if source.settings.get("class"):  # of a live module
        rope = source.fact("rope", RopeRecipe())
        return source.stated["positions"], rope, source.settings.get("rope_axes") == "xy"
    by_column = source.has("blocks.#.attn.qkv.bias")  # as the attention of ROPE-ViT and of the Perception Encoder
    asked, rope = source.changes.get("positions"), source.changes.get("rope")
    if source.has("norm_pre.*") and not isinstance(rope, RopeRecipe):
        raise trunk.unbuilt(source, "a Perception Encoder (norm_pre), with rotary positions of its own")
    positions = asked or _positions(source, by_column)
    if "rope" not in positions:
        return positions, RopeRecipe(), False
    dinov3 = "pos_embed" not in source.tensors and "cls_token" in source.tensors
    published = ROPE_VIT if by_column else DINOV3 if dinov3 else EVA02
    if isinstance(rope, RopeRecipe):
        return positions, rope, by_column
    said = [name for name in trunk.arguments(source) if name.startswith("rope_") or name == "ref_feat_shape"]
    if said:
        raise InputError(f"{source.where}: its configuration states {said[0]}; pass rope=regard.vit.RopeRecipe(...)")
    if asked and not by_column and asked != _positions(source, by_column):
        raise InputError(f"{source.where}: no model of timm's has positions {asked!r} and such tensors; pass rope= too")
    return positions, changed(published, rope) if isinstance(rope, Mapping) else published, by_column


def _positions(source: Source, by_column: bool) -> str:
    """The positions of the one published model that has such tensors.

    Raises InputError where none ever had.
    """
    has_cls, has_registers = "cls_token" in source.tensors, "reg_token" in source.tensors
    if "pos_embed" not in source.tensors:
        why = "timm's models with rope and no position table have {}; for another one pass positions= and rope="
        if not source.has("blocks.#.gamma_1", "blocks.#.gamma_2"):
            name = "blocks.0.gamma_1" if has_registers else "pos_embed"
            raise trunk.lost(source, name, why.format("layer scale"))
        if not has_cls and source.has("norm.*"):
            raise trunk.lost(source, "cls_token", why.format("it, or a norm on what is pooled"))
        if not has_registers and not by_column:
            raise trunk.lost(source, "reg_token", why.format("registers"))
        if by_column and (has_registers or not has_cls):
            raise InputError(f"{source.where}: its tensors are those of no model of timm's; pass positions= and rope=")
        return "rope"
    if by_column:
        named = trunk.architecture(source)
        if "rope_ape" in named:
            return "learned+rope"
        if "deit3" not in named:  # timm's come with their name, DeiT-III's authors published bare files
            why = "as in DeiT-III's own files; timm's *_rope_ape_* have the same tensors and need 'learned+rope'"
            source.assume("positions", "learned", why)
        return "learned"
    if trunk.gated(source):
        return "learned+rope"
    if source.shape("patch_embed.proj.weight", 4)[0] == _ENORMOUS:
        raise trunk.unbuilt(source, "eva02_enormous, by its width: its norms come after attention and MLP")
    return "learned"


def _default_preprocess(size: tuple[int, int], positions: str, rope: RopeRecipe) -> Preprocess:
    if positions == "rope" and rope.coordinates == "centred":
        return Preprocess(size, "crop", 1.0, "bicubic")
    if rope == ROPE_VIT:
        return Preprocess(size, "crop", 0.9, "bicubic")
    return Preprocess(size, "crop", 0.9, "bicubic", processors.OPENAI_MEAN, processors.OPENAI_STD)


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    """The only recipe known is timm's own."""
    return {"timm": RESIZE}.get(name)


LAYOUT = Layout(
    name="eva",
    owner="timm",
    anchor="patch_embed.proj.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    prepare=_prepare,
    unused=(Unused("mask_token", "the mask of pretraining"),),
    classifiers=(Rule("head.*", "head.*"),),
    resize=resize,
)
