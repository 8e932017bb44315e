"""transformers' `Dinov2Model` and `Dinov2WithRegistersModel`, their classifiers and backbones.

Names on disk, and in memory before version 5, differ in the attention and in the gated MLP of the giant: there one
tensor holds gate and inner layer, stacked in this order. Token order is class token, registers, patches; registers
have no row in the position table.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts.transformers_vit import CLASSIFIERS
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.settings import hidden_act, transformers_family, vision_part
from regard.vit.pretrained.source import Source, first_match

# The authors resample as DINO does, but for the models with registers; transformers goes its own way with the former.
RESIZE = PositionResize("bicubic", antialias=False, offset=0.1)
REGISTERS_RESIZE = PositionResize("bicubic", antialias=True)
FAMILY = "DINOv2"

_BLOCK = "encoder.layer.#."
_NAMES = (  # there and here; of two names for one thing, the first is the one on disk
    ("norm1.*", "norm1.*"),
    ("attention.attention.query.*", "attn.to_q.*"),
    ("attention.attention.key.*", "attn.to_k.*"),
    ("attention.attention.value.*", "attn.to_v.*"),
    ("attention.output.dense.*", "attn.out.*"),
    ("attention.q_proj.*", "attn.to_q.*"),
    ("attention.k_proj.*", "attn.to_k.*"),
    ("attention.v_proj.*", "attn.to_v.*"),
    ("attention.o_proj.*", "attn.out.*"),
    ("layer_scale1.lambda1", "scale1.gamma"),
    ("norm2.*", "norm2.*"),
    ("layer_scale2.lambda1", "scale2.gamma"),
)
_PLAIN = (("mlp.fc1.*", "mlp.fc1.*"), ("mlp.fc2.*", "mlp.fc2.*"))
_GATED = (
    ("mlp.weights_in.*", "mlp.{gate,fc1}.*"),
    ("mlp.weights_out.*", "mlp.fc2.*"),
    ("mlp.gate_proj.*", "mlp.gate.*"),
    ("mlp.up_proj.*", "mlp.fc1.*"),
    ("mlp.down_proj.*", "mlp.fc2.*"),
)
_QKV_BIASES = [_BLOCK + theirs.replace("*", "bias") for theirs, ours in _NAMES if ours.startswith("attn.to_")]
RULES = (
    Rule("embeddings.patch_embeddings.projection.weight", "tokenizer.proj.weight", CONV),
    Rule("embeddings.patch_embeddings.projection.bias", "tokenizer.proj.bias"),
    Rule("embeddings.cls_token", "cls", TOKEN),
    Rule("embeddings.register_tokens", "registers", ROWS),
    Rule("embeddings.position_embeddings", "positions", ROWS),
    *(Rule(_BLOCK + theirs, f"blocks.#.{ours}") for theirs, ours in _NAMES),
    *(Rule(_BLOCK + theirs, f"blocks.#.{ours}", when=lambda c: c.activation != "swiglu") for theirs, ours in _PLAIN),
    *(Rule(_BLOCK + theirs, f"blocks.#.{ours}", when=lambda c: c.activation == "swiglu") for theirs, ours in _GATED),
    Rule("layernorm.*", "norm.*"),
)


def _recognises(source: Source) -> bool:
    return source.has(_BLOCK + "norm1.*", _BLOCK + "norm2.*") and source.has(_BLOCK + "attention.**")


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape("embeddings.patch_embeddings.projection.weight", 4)
    patches = source.shape("embeddings.position_embeddings", 3)[1] - 1
    registers = _registers(source)
    gated = source.has(_BLOCK + "mlp.weights_**", _BLOCK + "mlp.**_proj.*")
    if not registers:
        source.tell("position_resize: DINOv2's own; transformers' numbers off the native size need 'transformers'")
    crop = Preprocess((224, 224), "crop", 224 / 256, "bicubic", processors.IMAGENET_MEAN, processors.IMAGENET_STD)
    return dict(
        image_size=source.image_size(patches, patch_size),
        patch_size=patch_size,
        channels=channels,
        hidden_dim=_hidden_dim(source),
        registers=registers,
        position_rows="cls+patches",
        position_resize=REGISTERS_RESIZE if registers else RESIZE,
        activation="swiglu" if gated else hidden_act(source, FAMILY, "gelu"),
        qkv_bias=source.has(*_QKV_BIASES),
        layer_scale=1e-5,
        pooling=_pooling(source, dim),
        preprocess=processors.transformers(source, crop),
        **transformers_family(source, FAMILY, dim, _BLOCK, eps=1e-6),
    )


def _registers(source: Source) -> int:
    """How many registers there are. Without them a file that lost them looks like a model that never had any."""
    name = "embeddings.register_tokens"
    if name in source.tensors:
        return source.shape(name, 3)[1]
    family = (source.prefix, vision_part(source.settings).get("model_type"))
    if source.fact("registers") or "with_registers" in str(family):
        raise InputError(f"{source.where}: tensor {source.own_name(name)!r} is missing from a model with registers")
    return 0


def _hidden_dim(source: Source) -> int:
    prefix = _BLOCK.replace("#", "0") + "mlp."
    if source.has(_BLOCK + "mlp.weights_**"):
        return source.shape(f"{prefix}weights_in.weight", 2)[0] // 2
    return source.shape(prefix + ("up_proj.weight" if source.has(_BLOCK + "mlp.**_proj.*") else "fc1.weight"), 2)[0]


def _pooling(source: Source, dim: int) -> str:
    """A classifier that is twice as wide takes the mean of the patches beside the class token."""
    name = first_match(source.beside, "classifier.weight", "**.classifier.weight")
    return "cls+mean" if name and source.beside[name].shape[-1:] == (2 * dim,) else "cls"


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {
        "transformers": PositionResize("bicubic", antialias=bool(config.registers)),
        "dinov2": REGISTERS_RESIZE if config.registers else RESIZE,
        "timm": PositionResize("bicubic", antialias=True),
    }.get(name)


LAYOUT = Layout(
    name="transformers_dinov2",
    owner="transformers",
    anchor="embeddings.patch_embeddings.projection.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    unused=(Unused("embeddings.mask_token", "mask token of the pretraining"),),
    classifiers=CLASSIFIERS,
    resize=resize,
)
