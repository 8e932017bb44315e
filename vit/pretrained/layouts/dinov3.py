"""DINOv3 as its authors published it (Siméoni et al., 2025, arXiv:2508.10104): registers, rope, no position table.

Three things are stored that others compute or do not have: the periods of the rope, rounded; a mask that takes the
bias off the keys; and norms that only training uses. The mask is folded into the bias.
"""

from typing import Any

import torch
from torch import Tensor

from regard.vit.config import RopeRecipe
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts import dino
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.source import Source, first_match, pair

BASE = 100.0
SIZE = (256, 256)  # what the weights were trained at; there is no table that would tell
_PERIODS, _MASK = "rope_embed.periods", "blocks.#.attn.qkv.bias_mask"
RULES = (
    Rule("patch_embed.proj.weight", "tokenizer.proj.weight", CONV),
    Rule("patch_embed.proj.bias", "tokenizer.proj.bias"),
    Rule("cls_token", "cls", TOKEN),
    Rule("storage_tokens", "registers", ROWS),
    *dino.BLOCK_RULES,
    Rule("blocks.#.ls1.gamma", "blocks.#.scale1.gamma"),
    Rule("blocks.#.ls2.gamma", "blocks.#.scale2.gamma"),
    Rule("blocks.#.mlp.w1.*", "blocks.#.mlp.gate.*"),
    Rule("blocks.#.mlp.w2.*", "blocks.#.mlp.fc1.*"),
    Rule("blocks.#.mlp.w3.*", "blocks.#.mlp.fc2.*"),
    Rule("norm.*", "norm.*"),
)


def _recognises(source: Source) -> bool:
    return source.has("storage_tokens", _PERIODS, _MASK) and source.has("blocks.#.attn.qkv.weight")


def _prepare(source: Source) -> Source:
    """Fold each mask into its bias. The masks stay, to be listed."""
    if norm := first_match(source.tensors, "cls_norm.*"):
        raise InputError(
            f"{source.where}: {source.own_name(norm)}: a final norm of the class token's and registers' own, which"
            " Regard does not build"
        )
    masks = [name for name in source.tensors if name.endswith(".attn.qkv.bias_mask")]
    tensors = dict(source.tensors)
    if masks or source.has("blocks.#.attn.qkv.bias"):
        for block in range(source.depth("blocks.#.")):
            bias, mask = f"blocks.{block}.attn.qkv.bias", f"blocks.{block}.attn.qkv.bias_mask"
            tensors[bias] = _masked(source, bias, mask)
        source.folded.append(f"{len(masks)} masks into the biases of q, k and v")
    return source.with_tensors(tensors)


def _masked(source: Source, bias_name: str, mask_name: str) -> Tensor:
    bias, mask = source.need(bias_name), source.need(mask_name)
    if bias.shape != mask.shape:
        raise InputError(
            f"{source.where}: {source.own_name(bias_name)} has shape {tuple(bias.shape)},"
            f" {source.own_name(mask_name)} {tuple(mask.shape)}; both must have one value per row of q, k and v"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError(f"{source.where}: {source.own_name(mask_name)} holds values other than 0 and 1")
    # What is masked may hold anything, and some files hold NaN there: a product would keep it.
    return torch.where(mask == 0, torch.zeros_like(bias), bias)


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape("patch_embed.proj.weight", 4)
    source.need("cls_token")
    heads, rope = _rope(source, dim)
    gated = source.has("blocks.#.mlp.w1.*", "blocks.#.mlp.w2.*", "blocks.#.mlp.w3.*")
    biases = [t for name, t in source.tensors.items() if name.endswith(".attn.qkv.bias")]
    size = pair(source.fact("image_size")) or SIZE
    if "preprocess" not in source.changes:
        source.tell("preprocess of the weights from the web; those from satellites have another mean and std")
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=source.depth("blocks.#."),
        heads=source.fact("heads", heads),
        hidden_dim=source.shape(f"blocks.0.mlp.{'w1' if gated else 'fc1'}.weight", 2)[0],
        registers=source.shape("storage_tokens", 3)[1],
        positions="rope",
        rope=rope,
        activation="swiglu" if gated else "gelu",
        norm_eps=source.fact("norm_eps", 1e-5),
        # Several releases mask every bias away: then there is none.
        qkv_bias=any(bias.any() for bias in biases),
        key_bias=any(bias.chunk(3)[1].any() for bias in biases),
        layer_scale=1e-5 if source.has("blocks.#.ls1.gamma", "blocks.#.ls2.gamma") else None,
        preprocess=processors.timm(source, Preprocess(size, "squash", 1.0, "bilinear", resampler="torch")),
    )


def _rope(source: Source, dim: int) -> tuple[int, RopeRecipe]:
    """The number of heads, which the number of periods tells, and the recipe."""
    periods, name = source.need(_PERIODS).float(), source.own_name(_PERIODS)
    if periods.dim() != 1 or not len(periods) or dim % (4 * len(periods)):
        raise InputError(
            f"{source.where}: {name} has shape {tuple(periods.shape)}; a quarter of a head's width was expected, and"
            f" heads that make up the width {dim}"
        )
    if not periods.isfinite().all() or not (periods > 0).all():
        raise InputError(f"{source.where}: {name} holds values that are not finite or not above 0")
    exact = BASE ** (torch.arange(len(periods)).float() / len(periods))
    stored = None if torch.equal(periods, exact) else tuple(periods.tolist())
    return dim // (4 * len(periods)), RopeRecipe("centred", BASE, None, stored)


LAYOUT = Layout(
    name="dinov3",
    owner="DINOv3",
    anchor="patch_embed.proj.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    prepare=_prepare,
    unused=(
        Unused("mask_token", "mask token of the pretraining"),
        Unused("local_cls_norm.*", "norm that only training uses"),
        Unused(_PERIODS, "periods of the rope, which the configuration holds"),
        Unused(_MASK, "mask of the biases of q, k and v, folded into them"),
    ),
)
