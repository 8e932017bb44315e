"""The image tower of transformers' `CLIPModel`: a norm before the blocks, patches without bias, QuickGELU.

transformers applies the last norm to the class token alone. Here it is applied to every token, as in timm: the class
token equals their `pooler_output`, and their `last_hidden_state` is our last intermediate without the norm.
"""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import CONV, Rule
from regard.vit.pretrained.settings import hidden_act, transformers_family
from regard.vit.pretrained.source import Source, first_match

RESIZE = PositionResize("bicubic", antialias=False)
FAMILY = "OpenAI's CLIP"
ANCHOR = "embeddings.patch_embedding.weight"
BLOCK = "encoder.layers.#."
BLOCK_RULES = (
    Rule(BLOCK + "layer_norm1.*", "blocks.#.norm1.*"),
    Rule(BLOCK + "self_attn.q_proj.*", "blocks.#.attn.to_q.*"),
    Rule(BLOCK + "self_attn.k_proj.*", "blocks.#.attn.to_k.*"),
    Rule(BLOCK + "self_attn.v_proj.*", "blocks.#.attn.to_v.*"),
    Rule(BLOCK + "self_attn.out_proj.*", "blocks.#.attn.out.*"),
    Rule(BLOCK + "layer_norm2.*", "blocks.#.norm2.*"),
    Rule(BLOCK + "mlp.fc1.*", "blocks.#.mlp.fc1.*"),
    Rule(BLOCK + "mlp.fc2.*", "blocks.#.mlp.fc2.*"),
)
RULES = (
    Rule(ANCHOR, "tokenizer.proj.weight", CONV),
    Rule("embeddings.class_embedding", "cls"),
    Rule("embeddings.position_embedding.weight", "positions"),
    Rule("pre_layrnorm.*", "pre_norm.*"),
    *BLOCK_RULES,
    Rule("post_layernorm.*", "norm.*"),
)
POSITION_IDS = Unused("embeddings.position_ids", "numbers of the rows, from 0")


def tower(source: Source) -> bool:
    """Whether the blocks are those that CLIP and SigLIP share in transformers."""
    return source.has(*(BLOCK + f"self_attn.{name}_proj.*" for name in "qkv"))


def clip_parts(source: Source) -> bool:
    """Whether what CLIP has and SigLIP has not is there."""
    return source.has("embeddings.class_embedding", "pre_layrnorm.*")


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape(ANCHOR, 4)
    size = source.image_size(source.shape("embeddings.position_embedding.weight", 2)[0] - 1, patch_size)
    classifier = first_match(source.beside, "classifier.weight", "**.classifier.weight")
    if source.fact("classes") and classifier:
        raise InputError(
            f"{source.where}: {source.own_name(classifier)} takes the mean of the patches without a norm, which Regard"
            " does not give; open it without classes="
        )
    crop = Preprocess(size, "crop", 1.0, "bicubic", processors.OPENAI_MEAN, processors.OPENAI_STD)
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        hidden_dim=source.shape(BLOCK.replace("#", "0") + "mlp.fc1.weight", 2)[0],
        position_rows="cls+patches",
        position_resize=RESIZE,
        activation=hidden_act(source, FAMILY, "quick_gelu"),
        pre_norm=True,
        preprocess=processors.transformers(source, crop),
        **transformers_family(source, FAMILY, dim, BLOCK, eps=1e-5),
    )


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {"transformers": RESIZE, "timm": PositionResize("bicubic", antialias=True)}.get(name)


LAYOUT = Layout(
    name="transformers_clip",
    owner="transformers",
    anchor=ANCHOR,
    recognises=lambda source: tower(source) and clip_parts(source),
    describe=_describe,
    rules=RULES,
    unused=(POSITION_IDS,),
    resize=resize,
)
