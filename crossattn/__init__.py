"""Words ask, patches answer: cross-attention, text tokenizer and encoder, `ImageQA`. Pure torch and tokenizers.

May import: `regard.vit`. Never Lightning, never data sets.
"""

from regard.crossattn.answers import Answer
from regard.crossattn.config import ImageQAConfig
from regard.crossattn.cross_attention import CrossAttention
from regard.crossattn.lookup import lookup, mixture, nearest
from regard.crossattn.memory import Memory
from regard.crossattn.model import ImageQA
from regard.crossattn.text import TextConfig, TextEncoder
from regard.crossattn.tokenizer import TextTokenizer
from regard.crossattn.words import WordMaps

__all__ = [
    "Answer",
    "CrossAttention",
    "ImageQA",
    "ImageQAConfig",
    "Memory",
    "TextConfig",
    "TextEncoder",
    "TextTokenizer",
    "WordMaps",
    "lookup",
    "mixture",
    "nearest",
]
