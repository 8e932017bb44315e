"""Pixels to tokens: patch tokenizer, ViT with registers, preprocessing, attention maps. Pure torch.

May import: torch, numpy, Pillow, safetensors, huggingface_hub. Never Lightning, never another room of the house.
"""

from regard.vit.attention import Attention, KeysValues, look_up
from regard.vit.config import PositionResize, RopeRecipe, ViTConfig
from regard.vit.errors import InputError
from regard.vit.images import to_rgb
from regard.vit.maps import AttentionRows, attention_rows
from regard.vit.model import ViT
from regard.vit.patches import PatchTokenizer
from regard.vit.preprocess import Preprocess
from regard.vit.tokens import Tokens

__all__ = [
    "Attention",
    "AttentionRows",
    "InputError",
    "KeysValues",
    "PatchTokenizer",
    "PositionResize",
    "Preprocess",
    "RopeRecipe",
    "Tokens",
    "ViT",
    "ViTConfig",
    "attention_rows",
    "look_up",
    "to_rgb",
]
