"""transformers' `DINOv3ViTModel` and its backbone: registers, rotary positions, a key projection without bias.

A block is `layer.#.` on disk and `model.layer.#.` in memory. Rope turns by patch centres in [-1, 1] and is computed,
never stored. Token order is class token, registers, patches.
"""

from typing import Any

from regard.vit.config import RopeRecipe
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts.transformers_vit import CLASSIFIERS
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.settings import hidden_act, transformers_family, vision_part
from regard.vit.pretrained.source import Source

FAMILY = "DINOv3"
_ANCHOR, _REGISTERS = "embeddings.patch_embeddings.weight", "embeddings.register_tokens"
_DISK, _MEMORY = "layer.#.", "model.layer.#."
_NAMES = (
    ("norm1.*", "norm1.*"),
    ("attention.q_proj.*", "attn.to_q.*"),
    ("attention.k_proj.*", "attn.to_k.*"),
    ("attention.v_proj.*", "attn.to_v.*"),
    ("attention.o_proj.*", "attn.out.*"),
    ("layer_scale1.lambda1", "scale1.gamma"),
    ("norm2.*", "norm2.*"),
    ("mlp.gate_proj.*", "mlp.gate.*"),
    ("mlp.up_proj.*", "mlp.fc1.*"),
    ("mlp.down_proj.*", "mlp.fc2.*"),
    ("layer_scale2.lambda1", "scale2.gamma"),
)
RULES = (
    Rule(_ANCHOR, "tokenizer.proj.weight", CONV),
    Rule("embeddings.patch_embeddings.bias", "tokenizer.proj.bias"),
    Rule("embeddings.cls_token", "cls", TOKEN),
    Rule(_REGISTERS, "registers", ROWS),
    *(Rule(block + theirs, f"blocks.#.{ours}") for block in (_DISK, _MEMORY) for theirs, ours in _NAMES),
    Rule("norm.*", "norm.*"),
)


def _recognises(source: Source) -> bool:
    return source.has(_DISK + "attention.**", _MEMORY + "attention.**")


def _prepare(source: Source) -> Source:
    """A model without registers has an empty tensor of them; one without the tensor has lost them."""
    if source.shape(_REGISTERS, 3)[1]:
        return source
    source.folded.append(f"{_REGISTERS} holds none")
    return source.with_tensors({name: t for name, t in source.tensors.items() if name != _REGISTERS})


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape(_ANCHOR, 4)
    block = _DISK if source.has(_DISK + "**") else _MEMORY
    gated = source.has(block + "mlp.gate_proj.*")
    # Its processor resizes floats rather than 8-bit values.
    processor = Preprocess((224, 224), "squash", 1.0, "bilinear", resampler="torch_float")
    return dict(
        image_size=source.fact("image_size", (224, 224)),
        patch_size=patch_size,
        channels=channels,
        hidden_dim=source.shape(f"{block.replace('#', '0')}mlp.up_proj.weight", 2)[0],
        registers=source.shape(_REGISTERS, 3)[1] if _REGISTERS in source.tensors else 0,
        positions="rope",
        rope=RopeRecipe("centred", _theta(source)),
        activation=hidden_act(source, FAMILY, "swiglu" if gated else "gelu", gated),
        qkv_bias=source.has(block + "attention.q_proj.bias", block + "attention.v_proj.bias"),
        key_bias=source.has(block + "attention.k_proj.bias"),
        layer_scale=1e-5,
        preprocess=processors.transformers(source, processor),
        **transformers_family(source, FAMILY, dim, block, eps=1e-5, heads={1280: 20}.get(dim)),  # ViT-H+
    )


def _theta(source: Source) -> float:
    theta = vision_part(source.settings).get("rope_theta", 100.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise InputError(f"{source.where}: its configuration states rope_theta {theta!r}; a number was expected")
    return float(theta)


LAYOUT = Layout(
    name="transformers_dinov3",
    owner="transformers",
    anchor=_ANCHOR,
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    prepare=_prepare,
    unused=(Unused("embeddings.mask_token", "mask token of the pretraining"),),
    classifiers=CLASSIFIERS,
)
