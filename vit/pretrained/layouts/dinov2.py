"""DINOv2 as its authors published it (Oquab et al., 2023, arXiv:2304.07193), with registers or without.

The position table has a row for the class token, and none for registers. Self-trained checkpoints hold a teacher, heads
beside it, and blocks in chunks. A file with registers whose tensor was deleted cannot be told from one without.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts import dino
from regard.vit.pretrained.rules import ROWS, Rule
from regard.vit.pretrained.source import Source

# Without registers as in DINO; those with registers came with antialiasing and without the offset.
RESIZE, REGISTERS_RESIZE = dino.RESIZE, PositionResize("bicubic", antialias=True)
RULES = (
    *dino.RULES,
    Rule("register_tokens", "registers", ROWS),
    Rule("blocks.#.ls1.gamma", "blocks.#.scale1.gamma"),
    Rule("blocks.#.ls2.gamma", "blocks.#.scale2.gamma"),
    Rule("blocks.#.mlp.w12.*", "blocks.#.mlp.{gate,fc1}.*"),
    Rule("blocks.#.mlp.w3.*", "blocks.#.mlp.fc2.*"),
)
_FOREIGN = ("storage_tokens", "rope_embed.periods", "blocks.#.attn.qkv.bias_mask", "decoder_**", "blocks.#.gamma_1")


def _recognises(source: Source) -> bool:
    own = source.has("mask_token", "register_tokens", "blocks.#.mlp.w12.*")
    qkv = source.has("blocks.#.attn.qkv.weight") and not source.has("blocks.#.attn.q_bias")
    return own and qkv and not source.has(*_FOREIGN) and "class" not in source.settings


def _describe(source: Source) -> dict[str, Any]:
    fields = dino.describe_plain(source, (224, 224))  # trained at 518 px in the end
    registers = source.shape("register_tokens", 3)[1] if "register_tokens" in source.tensors else 0
    gated = source.has("blocks.#.mlp.w12.*", "blocks.#.mlp.w3.*")
    if not registers:
        source.tell("registers 0: a DINOv2 that lost its register_tokens has the same tensors")
    return fields | dict(
        hidden_dim=_inner(source) if gated else source.shape("blocks.0.mlp.fc1.weight", 2)[0],
        registers=registers,
        position_resize=REGISTERS_RESIZE if registers else RESIZE,
        activation="swiglu" if gated else "gelu",
        layer_scale=1e-5 if source.has("blocks.#.ls1.gamma", "blocks.#.ls2.gamma") else None,
    )


def _inner(source: Source) -> int:
    rows = source.shape("blocks.0.mlp.w12.weight", 2)[0]
    if rows % 2:
        name = source.own_name("blocks.0.mlp.w12.weight")
        raise InputError(f"{source.where}: {name} has {rows} rows; it stacks two projections of one width")
    return rows // 2


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {
        "dinov2": REGISTERS_RESIZE if config.registers else RESIZE,
        "dino": RESIZE,
        "timm": PositionResize(),
        "transformers": PositionResize("bicubic", antialias=bool(config.registers)),
    }.get(name)


LAYOUT = Layout(
    name="dinov2",
    owner="DINOv2",
    anchor="patch_embed.proj.weight",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    unused=(Unused("mask_token", "mask token of the pretraining"),),
    resize=resize,
)
