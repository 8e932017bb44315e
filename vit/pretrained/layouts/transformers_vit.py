"""transformers' `ViTModel` and those with its names: `ViTFor...`, `ViTMSN`, the encoder of `ViTMAE`, `DeiT`.

On disk, and in memory before version 5, a block is `encoder.layer.#.`; in memory since then it is `layers.#.`. Token
order is class token, DeiT's distillation token, patches, and the position table has rows for all of them.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.settings import hidden_act, transformers_family, vision_part
from regard.vit.pretrained.source import Source

RESIZE = PositionResize("bicubic", antialias=False)
TIMM_RESIZE = PositionResize("bicubic", antialias=True)
FAMILY = "transformers' ViT"

_DISK, _MEMORY = "encoder.layer.#.", "layers.#."
_BLOCK = (  # on disk, in memory, here
    ("layernorm_before.*", "layernorm_before.*", "norm1.*"),
    ("attention.attention.query.*", "attention.q_proj.*", "attn.to_q.*"),
    ("attention.attention.key.*", "attention.k_proj.*", "attn.to_k.*"),
    ("attention.attention.value.*", "attention.v_proj.*", "attn.to_v.*"),
    ("attention.output.dense.*", "attention.o_proj.*", "attn.out.*"),
    ("layernorm_after.*", "layernorm_after.*", "norm2.*"),
    ("intermediate.dense.*", "mlp.fc1.*", "mlp.fc1.*"),
    ("output.dense.*", "mlp.fc2.*", "mlp.fc2.*"),
)
_QKV_BIASES = [name.replace("*", "bias") for row in _BLOCK[1:4] for name in row[:2]]
RULES = (
    Rule("embeddings.patch_embeddings.projection.weight", "tokenizer.proj.weight", CONV),
    Rule("embeddings.patch_embeddings.projection.bias", "tokenizer.proj.bias"),
    Rule("embeddings.cls_token", "cls", TOKEN),
    Rule("embeddings.distillation_token", "registers", ROWS),
    Rule("embeddings.position_embeddings", "positions", ROWS),
    *(Rule(_DISK + disk, f"blocks.#.{ours}") for disk, _, ours in _BLOCK),
    *(Rule(_MEMORY + memory, f"blocks.#.{ours}") for _, memory, ours in _BLOCK),
    Rule("layernorm.*", "norm.*"),
)
# Found beside the model as well, where a program of one's own holds both.
CLASSIFIERS = (Rule("classifier.*", "head.*"), Rule("**.classifier.*", "head.*"))


def _recognises(source: Source) -> bool:
    beit = ("encoder.layer.#.lambda_1", "layers.#.lambda_1")
    return source.has(_DISK + "layernorm_**", _MEMORY + "layernorm_**") and not source.has(*beit)


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape("embeddings.patch_embeddings.projection.weight", 4)
    block, inner = (_DISK, "intermediate.dense") if source.has(_DISK + "**") else (_MEMORY, "mlp.fc1")
    source.need("embeddings.cls_token")
    registers = 0
    if "embeddings.distillation_token" in source.tensors or vision_part(source.settings).get("model_type") == "deit":
        registers = source.shape("embeddings.distillation_token", 3)[1]
    patches = source.shape("embeddings.position_embeddings", 3)[1] - 1 - registers
    size = source.image_size(patches, patch_size)
    preprocess = Preprocess(size, "squash", 1.0, "bilinear", processors.HALF, processors.HALF)
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        hidden_dim=source.shape(f"{block.replace('#', '0')}{inner}.weight", 2)[0],
        registers=registers,
        position_rows="cls+registers+patches" if registers else "cls+patches",
        position_resize=RESIZE,
        qkv_bias=source.has(*(block + name for name in _QKV_BIASES)),
        activation=hidden_act(source, FAMILY, "gelu"),
        preprocess=processors.transformers(source, preprocess),
        **transformers_family(source, FAMILY, dim, block, eps=1e-12),
    )


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {"transformers": RESIZE, "timm": TIMM_RESIZE}.get(name)


LAYOUT = Layout(
    name="transformers_vit",
    owner="transformers",
    anchor="embeddings.patch_embeddings.projection.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    unused=(
        Unused("pooler.dense.*", "pooler, which no task but the first pretraining has"),
        Unused("embeddings.mask_token", "mask token of the pretraining"),
    ),
    classifiers=CLASSIFIERS,
    resize=resize,
)
