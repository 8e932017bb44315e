"""The image tower of transformers' `SiglipModel`: no class token, attention pooling, tanh GELU."""

import dataclasses
from typing import Any

from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout
from regard.vit.pretrained.layouts.transformers_clip import (
    ANCHOR,
    BLOCK,
    BLOCK_RULES,
    POSITION_IDS,
    RESIZE,
    clip_parts,
    resize,
    tower,
)
from regard.vit.pretrained.layouts.transformers_vit import CLASSIFIERS
from regard.vit.pretrained.rules import CONV, TOKEN, Rule
from regard.vit.pretrained.settings import hidden_act, transformers_family
from regard.vit.pretrained.source import Source, first_match

FAMILY = "SigLIP"
RULES = (
    Rule(ANCHOR, "tokenizer.proj.weight", CONV),
    Rule("embeddings.patch_embedding.bias", "tokenizer.proj.bias"),
    Rule("embeddings.position_embedding.weight", "positions"),
    *BLOCK_RULES,
    Rule("post_layernorm.*", "norm.*"),
    Rule("head.probe", "pool.asker.latent", TOKEN),
    Rule("head.attention.in_proj_*", "pool.asker.attn.to_{q,k,v}.*"),
    Rule("head.attention.out_proj.*", "pool.asker.attn.out.*"),
    Rule("head.layernorm.*", "pool.asker.norm.*"),
    Rule("head.mlp.fc1.*", "pool.asker.mlp.fc1.*"),
    Rule("head.mlp.fc2.*", "pool.asker.mlp.fc2.*"),
)


def _pooling(source: Source) -> str:
    """A classifier of transformers' takes the mean of the patches, whatever pooling the model was trained with."""
    classifier = first_match(source.beside, "classifier.weight", "**.classifier.weight")
    return str(source.fact("pooling", "map" if source.has("head.**") and not classifier else "mean"))


def _prepare(source: Source) -> Source:
    """The attention pooling is set aside where another pooling takes its place."""
    if _pooling(source) == "map":
        return source
    head = {name: tensor for name, tensor in source.tensors.items() if name.startswith("head.")}
    rest = {name: tensor for name, tensor in source.tensors.items() if name not in head}
    return dataclasses.replace(source, tensors=rest, beside={**source.beside, **head})


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape(ANCHOR, 4)
    size = source.image_size(source.shape("embeddings.position_embedding.weight", 2)[0], patch_size)
    squash = Preprocess(size, "squash", 1.0, "bicubic", processors.HALF, processors.HALF)
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        hidden_dim=source.shape(BLOCK.replace("#", "0") + "mlp.fc1.weight", 2)[0],
        class_token=False,
        position_resize=RESIZE,
        activation=hidden_act(source, FAMILY, "gelu_tanh"),
        pooling=_pooling(source),
        preprocess=processors.transformers(source, squash),
        **transformers_family(source, FAMILY, dim, BLOCK, eps=1e-6),
    )


LAYOUT = Layout(
    name="transformers_siglip",
    owner="transformers",
    anchor=ANCHOR,
    recognises=lambda source: tower(source) and not clip_parts(source),
    describe=_describe,
    rules=RULES,
    prepare=_prepare,
    unused=(POSITION_IDS,),
    classifiers=CLASSIFIERS,
    resize=resize,
)
