"""How BLIP for visual question answering names its tensors (Li et al., 2022, arXiv:2201.12086), in two dialects.

The authors' own files and transformers' `BlipForQuestionAnswering` differ on the image side alone. The text side is
BERT's with a cross-attention in each layer, twice: a reader of questions, and below `bert.` a writer of answers.
"""

from regard.crossattn.pretrained.bert import RULES as BERT
from regard.vit.pretrained.rules import CONV, ROWS, SAME, TOKEN, Rule
from regard.vit.pretrained.source import Source

QUESTION, ANSWER, OUT = "text_encoder.", "text_decoder.bert.", "text_decoder.cls.predictions."
WORDS, PLACES, LAYER = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight", "encoder.layer.#."
OUT_TABLE, OUT_BIAS, OUT_BIAS_AGAIN = OUT + "decoder.weight", OUT + "bias", OUT + "decoder.bias"
COUNTED = "**.position_ids"  # old files count the places and keep the count

# What transformers and the authors call the parts of the image side, and what they are here.
_IMAGE = (
    ("embeddings.class_embedding", "cls_token", "cls", TOKEN),
    ("embeddings.position_embedding", "pos_embed", "positions", ROWS),
    ("embeddings.patch_embedding.weight", "patch_embed.proj.weight", "tokenizer.proj.weight", CONV),
    ("embeddings.patch_embedding.bias", "patch_embed.proj.bias", "tokenizer.proj.bias", SAME),
    ("encoder.layers.#.layer_norm1.*", "blocks.#.norm1.*", "blocks.#.norm1.*", SAME),
    ("encoder.layers.#.self_attn.qkv.*", "blocks.#.attn.qkv.*", "blocks.#.attn.to_{q,k,v}.*", SAME),
    ("encoder.layers.#.self_attn.projection.*", "blocks.#.attn.proj.*", "blocks.#.attn.out.*", SAME),
    ("encoder.layers.#.layer_norm2.*", "blocks.#.norm2.*", "blocks.#.norm2.*", SAME),
    ("encoder.layers.#.mlp.fc1.*", "blocks.#.mlp.fc1.*", "blocks.#.mlp.fc1.*", SAME),
    ("encoder.layers.#.mlp.fc2.*", "blocks.#.mlp.fc2.*", "blocks.#.mlp.fc2.*", SAME),
    ("post_layernorm.*", "norm.*", "norm.*", SAME),
)
_LOOKING = (
    Rule(LAYER + "crossattention.self.query.*", "layers.#.cross.attn.to_q.*"),
    Rule(LAYER + "crossattention.self.key.*", "layers.#.cross.attn.to_k.*"),
    Rule(LAYER + "crossattention.self.value.*", "layers.#.cross.attn.to_v.*"),
    Rule(LAYER + "crossattention.output.dense.*", "layers.#.cross.attn.out.*"),
    Rule(LAYER + "crossattention.output.LayerNorm.*", "layers.#.norm2.*"),
)
_TEXT = (*(rule for rule in BERT if rule.ours != "types"), *_LOOKING)
RULES = (
    *(Rule("vision_model." + theirs, "vit." + ours, shape) for theirs, _, ours, shape in _IMAGE),
    *(Rule("visual_encoder." + authors, "vit." + ours, shape) for _, authors, ours, shape in _IMAGE),
    *(Rule(QUESTION + rule.theirs, "text." + rule.ours) for rule in _TEXT),
    *(Rule(ANSWER + rule.theirs, "decoder.body." + rule.ours) for rule in _TEXT),
    Rule(OUT + "transform.dense.*", "decoder.transform.*"),
    Rule(OUT + "transform.LayerNorm.*", "decoder.norm.*"),
    Rule(OUT_TABLE, "decoder.out.weight"),
    Rule(OUT_BIAS, "decoder.bias"),
)


def recognises(source: Source) -> bool:
    """Whether the tensors are BLIP's: an image side in either dialect, and a text side that asks it."""
    image = source.has("vision_model.encoder.layers.#.self_attn.qkv.*", "visual_encoder.blocks.#.attn.qkv.*")
    return image and source.has(*(side + LAYER + "crossattention.self.query.*" for side in (QUESTION, ANSWER)))


def is_transformers(source: Source) -> bool:
    """Whether the dialect is transformers'."""
    return source.has("vision_model.**")


def rules(source: Source) -> list[Rule]:
    """The rules in the dialect of the source alone."""
    other = "visual_encoder." if is_transformers(source) else "vision_model."
    return [rule for rule in RULES if not rule.theirs.startswith(other)]


def image_block(source: Source) -> str:
    """The prefix of a block of the image side in the dialect of the source."""
    return "vision_model.encoder.layers.#." if is_transformers(source) else "visual_encoder.blocks.#."


def image_name(source: Source, part: str) -> str:
    """The name of a part of the image side, given as it is called here, in the dialect of the source."""
    theirs, authors = next((theirs, authors) for theirs, authors, ours, _ in _IMAGE if ours == part)
    return "vision_model." + theirs if is_transformers(source) else "visual_encoder." + authors
