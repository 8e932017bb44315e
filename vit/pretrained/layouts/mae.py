"""MAE as its authors published it (He et al., 2022, arXiv:2111.06377): the encoder of a pretraining checkpoint.

Its position table is a fixed sine-cosine one, but is stored, and is read as any other. An encoder without its decoder
is a plain vision transformer of timm's, and opens as one.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.layouts import dino
from regard.vit.pretrained.source import Source

RESIZE = PositionResize("bicubic", antialias=False)


def _recognises(source: Source) -> bool:
    return source.has("decoder_embed.*", "decoder_blocks.#.**", "decoder_pos_embed") and source.has(
        "blocks.#.attn.qkv.weight"
    )


def _describe(source: Source) -> dict[str, Any]:
    return dino.describe_plain(source) | dict(
        hidden_dim=source.shape("blocks.0.mlp.fc1.weight", 2)[0], position_resize=RESIZE
    )


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {"mae": RESIZE, "transformers": RESIZE, "timm": PositionResize()}.get(name)


LAYOUT = Layout(
    name="mae",
    owner="MAE",
    anchor="patch_embed.proj.weight",
    recognises=_recognises,
    describe=_describe,
    rules=dino.RULES,
    unused=(Unused("decoder_**", "decoder of the pretraining"), Unused("mask_token", "mask token of the pretraining")),
    resize=resize,
)
