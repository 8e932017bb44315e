"""DINO as its authors published it (Caron et al., 2021, arXiv:2104.14294): `.pth` files and full training checkpoints.

The tensors are named as timm's are. What tells the two apart is what stands around them: a teacher beside its student,
or the head of self-distillation. A file without either opens in the timm layout, whose report says so;
`position_resize="dino"` gives DINO's recipe there too.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.source import Source

RESIZE = PositionResize("bicubic", antialias=False, offset=0.1)
BLOCK_RULES = (
    Rule("blocks.#.norm1.*", "blocks.#.norm1.*"),
    Rule("blocks.#.attn.qkv.*", "blocks.#.attn.to_{q,k,v}.*"),
    Rule("blocks.#.attn.proj.*", "blocks.#.attn.out.*"),
    Rule("blocks.#.norm2.*", "blocks.#.norm2.*"),
    # A gated MLP has names of its own in each family.
    Rule("blocks.#.mlp.fc1.*", "blocks.#.mlp.fc1.*", when=lambda config: config.activation != "swiglu"),
    Rule("blocks.#.mlp.fc2.*", "blocks.#.mlp.fc2.*", when=lambda config: config.activation != "swiglu"),
)
RULES = (
    Rule("patch_embed.proj.weight", "tokenizer.proj.weight", CONV),
    Rule("patch_embed.proj.bias", "tokenizer.proj.bias"),
    Rule("cls_token", "cls", TOKEN),
    Rule("pos_embed", "positions", ROWS),
    *BLOCK_RULES,
    Rule("norm.*", "norm.*"),
)
# Of DINO's younger kin and of MAE, which are trained beside a teacher or under the same names too.
_FOREIGN = (
    "mask_token", "register_tokens", "storage_tokens", "rope_embed.periods", "reg_token", "decoder_**",
    "blocks.#.ls1.gamma", "blocks.#.gamma_1", "blocks.#.attn.q_**", "blocks.#.mlp.w12.*", "fc_norm.*", "dist_token",
)  # fmt: skip


def recognises(source: Source) -> bool:
    """Where this says no, tensors of these names are timm's."""
    alike = source.has("blocks.#.attn.qkv.weight") and not source.has(*_FOREIGN) and "class" not in source.settings
    return alike and source.self_distilled


def describe_plain(source: Source, evaluated_at: tuple[int, int] | None = None) -> dict[str, Any]:
    """What DINO, DINOv2 and MAE have in common: a class token with a row in a learned table, and an MLP of any kind.

    All evaluate on 224 of 256 pixels; the size is `evaluated_at`, or the native one.
    """
    dim, channels, patch_size, _ = source.shape("patch_embed.proj.weight", 4)
    source.need("cls_token")
    size = source.image_size(source.shape("pos_embed", 3)[1] - 1, patch_size)
    default = Preprocess(evaluated_at or size, "crop", processors.crop_ratio(224, 256), "bicubic")
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=source.depth("blocks.#."),
        heads=source.heads(dim),
        position_rows="cls+patches",
        norm_eps=source.fact("norm_eps", 1e-6),
        qkv_bias=source.has("blocks.#.attn.qkv.bias"),
        preprocess=processors.timm(source, default),
    )


def _describe(source: Source) -> dict[str, Any]:
    return describe_plain(source) | dict(
        hidden_dim=source.shape("blocks.0.mlp.fc1.weight", 2)[0], position_resize=RESIZE
    )


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {
        "dino": RESIZE,
        "dinov2": RESIZE,
        "timm": PositionResize(),
        "transformers": PositionResize("bicubic", antialias=False),
    }.get(name)


LAYOUT = Layout(
    name="dino",
    owner="DINO",
    anchor="patch_embed.proj.weight",
    recognises=recognises,
    describe=_describe,
    rules=RULES,
    unused=(Unused("head.**", "head of the self-distillation"),),
    resize=resize,
)
