"""transformers: a folder opened by `AutoModel.from_pretrained(FOLDER)`, under the names that every version reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.vit.config import ViTConfig
from regard.vit.pretrained.exports import notes, place
from regard.vit.pretrained.exports.processor import processor
from regard.vit.pretrained.exports.target import Allowed, Form, Target, anything, own_periods, square
from regard.vit.pretrained.exports.tensors import laid_out, native, renamed
from regard.vit.pretrained.layout import Layout
from regard.vit.pretrained.layouts import transformers_clip as clip
from regard.vit.pretrained.layouts import transformers_dinov2 as dinov2
from regard.vit.pretrained.layouts import transformers_dinov3 as dinov3
from regard.vit.pretrained.layouts import transformers_siglip as siglip
from regard.vit.pretrained.layouts import transformers_vit as vit
from regard.vit.pretrained.report import ExportReport

if TYPE_CHECKING:
    from regard.vit.model import ViT

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}


@dataclass(frozen=True)
class Model(Form):
    """One model of transformers.

    Attributes:
        kind: its `model_type`.
        layout: the names of its tensors.
        settings: its configuration beyond what all have.
        classifier: the class that holds it together with a classifier, "" for none.
        prefix: what it is called in there.
        biases: projections that always have one.
        scales: whether it always has layer scales.
        asks: whether sizes other than the native one have to be asked for.
    """

    kind: str
    layout: Layout
    settings: Callable[[ViTConfig], dict[str, Any]]
    classifier: str = ""
    prefix: str = ""
    biases: str = "qkv"
    scales: bool = False
    asks: bool = True


def _hidden(config: ViTConfig) -> int:
    return config.hidden_dim or 4 * config.dim


def _dinov2_ratio(config: ViTConfig) -> int | None:
    """The whole `mlp_ratio` that gives this hidden width; a gated MLP there is two thirds as wide, in steps of 8."""
    gated = config.activation == "swiglu"
    widths = {ratio: config.dim * ratio for ratio in range(1, 33)}
    made = {ratio: (int(width * 2 / 3) + 7) // 8 * 8 if gated else width for ratio, width in widths.items()}
    return next((ratio for ratio, width in made.items() if width == _hidden(config)), None)


def _mlp(config: ViTConfig) -> dict[str, Any]:
    return {"intermediate_size": _hidden(config), "hidden_act": _ACTIVATIONS.get(config.activation, "silu")}


def _vit(config: ViTConfig) -> dict[str, Any]:
    # The pooler, which is none of ours, hands the class token on as it is.
    return {**_mlp(config), "qkv_bias": config.qkv_bias, "pooler_act": "linear", "pooler_output_size": config.dim}


def _residual(config: ViTConfig) -> dict[str, Any]:
    scale = 1.0 if config.layer_scale is None else config.layer_scale
    return {"layerscale_value": scale, "drop_path_rate": config.drop_path}


def _dinov2(config: ViTConfig) -> dict[str, Any]:
    return {
        **_residual(config),
        "mlp_ratio": _dinov2_ratio(config),
        "hidden_act": _ACTIVATIONS.get(config.activation, "gelu"),
        "use_swiglu_ffn": config.activation == "swiglu",
        "qkv_bias": config.qkv_bias,
        **({"num_register_tokens": config.registers} if config.registers else {}),
    }


def _dinov3(config: ViTConfig) -> dict[str, Any]:
    return {
        **_residual(config),
        **_mlp(config),
        "use_gated_mlp": config.activation == "swiglu",
        "query_bias": config.qkv_bias,
        "key_bias": config.qkv_bias and config.key_bias,
        "value_bias": config.qkv_bias,
        "num_register_tokens": config.registers,
        "rope_theta": config.rope.base,
    }


def _siglip(config: ViTConfig) -> dict[str, Any]:
    return {**_mlp(config), "vision_use_head": config.pooling == "map"}


_PLAIN: dict[str, Allowed] = {"norm_eps": anything, "activation": tuple(_ACTIVATIONS)}
_DINOV2: dict[str, Allowed] = {
    "image_size": square,
    "norm_eps": anything,
    "activation": (*_ACTIVATIONS, "swiglu"),
    "hidden_dim": lambda config: _dinov2_ratio(config) is not None,
    "layer_scale": anything,
    "pooling": ("cls", "mean", "cls+mean"),
}
_DINOV2_REGISTERS: dict[str, Allowed] = {**_DINOV2, "registers": lambda config: config.registers > 0}
_DINOV3: dict[str, Allowed] = {
    "norm_eps": anything,
    "activation": (*_ACTIVATIONS, "swiglu"),
    "registers": anything,
    "layer_scale": anything,
    "positions": ("rope",),
    "rope": lambda config: config.rope.coordinates == "centred" and not own_periods(config),
    "classes": (0,),
}
_CLIP: dict[str, Allowed] = {
    **_PLAIN, "image_size": square, "pre_norm": (True,), "norm_place": ("tokens", "pooled"), "classes": (0,),
}  # fmt: skip
_SIGLIP: dict[str, Allowed] = {
    **_PLAIN,
    "image_size": square,
    "class_token": (False,),
    "pooling": lambda config: config.pooling == "mean" or (config.pooling == "map" and not config.classes),
}
MODELS = (
    Model("ViTModel", _PLAIN, "vit", vit.LAYOUT, _vit, "ViTForImageClassification", "vit."),
    Model(
        "Dinov2Model", _DINOV2, "dinov2", dinov2.LAYOUT, _dinov2,
        "Dinov2ForImageClassification", "dinov2.", scales=True, asks=False,
    ),
    Model(
        "Dinov2WithRegistersModel", _DINOV2_REGISTERS, "dinov2_with_registers", dinov2.LAYOUT, _dinov2,
        "Dinov2WithRegistersForImageClassification", "dinov2_with_registers.", scales=True, asks=False,
    ),
    Model("DINOv3ViTModel", _DINOV3, "dinov3_vit", dinov3.LAYOUT, _dinov3, biases="", scales=True, asks=False),
    Model("CLIPVisionModel", _CLIP, "clip_vision_model", clip.LAYOUT, _mlp),
    Model(
        "SiglipVisionModel", _SIGLIP, "siglip_vision_model", siglip.LAYOUT, _siglip,
        "SiglipForImageClassification", "vision_model.",
    ),
)  # fmt: skip


def _write(model: "ViT", path: Path, form: Form) -> ExportReport:
    assert isinstance(form, Model)
    config = model.config
    settings = form.settings(config)
    rows = "cls+patches" if config.class_token else "patches"
    biases = form.biases if settings.get("qkv_bias", True) else ""
    tensors, laid = laid_out(model, rows, biases=biases, scales=form.scales)
    # Where the norm is the pooled vector's alone, theirs is applied to it alone too.
    ours = {name.replace("pool.norm.", "norm."): t for name, t in tensors.items() if not name.startswith("head.")}
    head = {name: t for name, t in tensors.items() if name.startswith("head.")}
    prefix = form.prefix if head else ""
    theirs = {prefix + name: tensor for name, tensor in renamed(form.layout.rules, ours, laid).items()}
    theirs |= {prefix + name: tensor for name, tensor in _unused(config, form, model.dtype).items()}
    if head:
        theirs |= {"classifier.weight": _classifier(config, form, head["head.weight"])}
        theirs |= {"classifier.bias": head["head.bias"]}
    pictures, lost = processor(config.preprocess, native(config))
    place.folder(path, _config(config, form, settings, model.dtype), theirs, preprocessor_config=pictures)
    opener = "AutoModelForImageClassification" if head else "AutoModel"
    return ExportReport(
        path=str(path),
        layout="transformers",
        model=form.classifier if head else form.name,
        code=f"model = transformers.{opener}.from_pretrained({str(path)!r})",
        notes=(*_notes(config, form), *lost),
    )


def _unused(config: ViTConfig, form: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """What their model has beside ours, and nothing comes of."""
    if form.kind == "vit" and not config.classes:
        return {
            "pooler.dense.weight": torch.eye(config.dim, dtype=dtype),
            "pooler.dense.bias": torch.zeros(config.dim, dtype=dtype),
        }
    unused = {}
    if form.kind == "dinov3_vit":
        unused["embeddings.mask_token"] = torch.zeros(1, 1, config.dim, dtype=dtype)
        if not config.registers:
            unused["embeddings.register_tokens"] = torch.zeros(1, 0, config.dim, dtype=dtype)
    elif form.kind.startswith("dinov2"):
        unused["embeddings.mask_token"] = torch.zeros(1, config.dim, dtype=dtype)
    return unused


def _classifier(config: ViTConfig, form: Model, weight: Tensor) -> Tensor:
    if not form.kind.startswith("dinov2") or config.pooling == "cls+mean":
        return weight
    # Theirs reads the class token and the mean of the patches; what ours does not read weighs 0.
    unread = torch.zeros_like(weight)
    return torch.cat((weight, unread) if config.pooling == "cls" else (unread, weight), dim=1)


def _config(config: ViTConfig, form: Model, settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    height, width = native(config)
    own = {
        "model_type": form.kind,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_channels": config.channels,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "layer_norm_eps": config.norm_eps,
        **settings,
    }
    if config.classes:
        if form.kind == "siglip_vision_model":  # its classifier stands in the model of both towers
            own = {"model_type": "siglip", "vision_config": own}
        labels = {str(number): f"LABEL_{number}" for number in range(config.classes)}
        own |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    name = form.classifier if config.classes else form.name
    return {"architectures": [name], **own, "torch_dtype": str(dtype).removeprefix("torch.")}


def _notes(config: ViTConfig, form: Model) -> list[str]:
    theirs, (height, width) = form.layout.resize("transformers", config), native(config)
    told = notes.scales(config, form.scales)
    told += [] if theirs is None else notes.resize(config, theirs, "transformers")
    if form.asks:
        ask = "ask for interpolate_pos_encoding=True" if height == width else "are not possible"
        told.append(f"sizes other than {height} x {width} px {ask} there")
    if form.kind == "clip_vision_model" and config.norm_place == "tokens":
        told.append("last_hidden_state there is before the last norm; post_layernorm of it gives these tokens")
    if not config.classes:
        kinds = ("map",) if form.kind == "siglip_vision_model" else ("cls",)
        instead = "pooler_output is the class token" if config.class_token else "pooler_output is None"
        told += notes.pool(config, kinds, instead)
    return told


TARGET = Target("transformers", MODELS, _write)
