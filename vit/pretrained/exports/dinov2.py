"""DINOv2: a `.pth` as its authors publish them, for their `DinoVisionTransformer`."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regard.vit.config import ViTConfig
from regard.vit.pretrained.exports import notes, place
from regard.vit.pretrained.exports.target import Form, Target, anything, square
from regard.vit.pretrained.exports.tensors import laid_out, native, ratio, renamed
from regard.vit.pretrained.layouts import dinov2 as layout
from regard.vit.pretrained.report import ExportReport

if TYPE_CHECKING:
    from regard.vit.model import ViT


def _hidden(config: ViTConfig) -> int:
    return config.hidden_dim or 4 * config.dim


VIT = Form(
    "DinoVisionTransformer",
    {
        "image_size": square,
        "registers": anything,
        "activation": ("gelu", "swiglu"),
        "hidden_dim": lambda config: config.activation != "swiglu" or _hidden(config) % 8 == 0,
        "layer_scale": anything,
        "classes": (0,),
    },
)


def _write(vit: "ViT", path: Path, form: Form) -> ExportReport:
    config = vit.config
    biases = "qkv" if config.qkv_bias else ""
    tensors, laid = laid_out(vit, "cls+patches", biases=biases, scales=True)
    state = renamed(layout.RULES, tensors, laid)
    state["mask_token"] = torch.zeros(1, config.dim, dtype=vit.dtype)  # theirs has one, for pretraining alone
    place.file(path, "dinov2", (".pth", ".pt"), lambda file: torch.save(state, file))
    return ExportReport(
        path=str(path),
        layout="dinov2",
        model="DinoVisionTransformer",
        code=f"model = dinov2.models.vision_transformer.DinoVisionTransformer({_arguments(config)});"
        f" model.load_state_dict(torch.load({str(path)!r}, weights_only=True))",
        notes=(
            *notes.scales(config, True),
            *_recipe_notes(config),
            *notes.pool(config, ("cls",), "the class token leaves the model"),
            notes.preprocess(config),
        ),
    )


def _arguments(config: ViTConfig) -> str:
    resize, gated = config.position_resize, config.activation == "swiglu"
    # A gated MLP there is two thirds as wide as it is told, in steps of 8.
    hidden = _hidden(config) * 3 // 2 if gated else _hidden(config)
    arguments = {
        "img_size": native(config)[0],
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio(hidden, config.dim),
        "qkv_bias": config.qkv_bias,
        "ffn_layer": "swiglufused" if gated else "mlp",
        "init_values": config.layer_scale or 1.0,  # of any value; 0 or None would leave the layer scales out
        "block_chunks": 0,
        "num_register_tokens": config.registers,
        "interpolate_antialias": resize.antialias,
        "interpolate_offset": resize.offset,
    }
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _recipe_notes(config: ViTConfig) -> list[str]:
    """Theirs can be told how to resample, but for the filter."""
    resize = config.position_resize
    if resize.mode == "bicubic" and not resize.align_corners:
        return []
    return notes.resize(config, layout.RESIZE, "DINOv2")


TARGET = Target("dinov2", (VIT,), _write)
