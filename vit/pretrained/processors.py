"""The preprocessing that a source states, as a `Preprocess`.

Each function takes what the layout's family does where the source states nothing; its size is the model's native one.
What the caller asks for wins: a whole `preprocess=` is taken as it is, an `image_size=` changes the size alone. What
cannot be expressed is an InputError, for another picture gives other numbers.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from regard.vit.errors import InputError
from regard.vit.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from regard.vit.pretrained.settings import pair
from regard.vit.pretrained.source import Source
from regard.vit.values import changed

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_IMAGENET = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
_OPENAI = {"image_mean": OPENAI_MEAN, "image_std": OPENAI_STD}
_HALF = {"image_mean": HALF, "image_std": HALF}
_CLIP = {"size": 224, "crop_size": 224, "do_center_crop": True, "default_to_square": False, "resample": 3, **_OPENAI}
# What an image processor of transformers does where its file does not say.
_KINDS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "resample": 2, **_HALF},
    "DeiT": {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3, **_HALF},
    "Beit": {"size": 224, "crop_size": 224, "resample": 3, **_HALF},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Siglip": {"size": {"height": 224, "width": 224}, "default_to_square": False, "resample": 3, **_HALF},
    "DINOv3ViT": {"size": 224, "resample": 2, **_IMAGENET},
    "Blip": {"size": 384, "resample": 3, **_OPENAI},
}
# Old files do not name their kind; then transformers goes by the model.
_KIND_OF_MODEL = {
    "vit": "ViT", "vit_mae": "ViT", "vit_msn": "ViT", "ijepa": "ViT", "deit": "DeiT", "beit": "Beit",
    "data2vec-vision": "Beit", "dinov2": "Bit", "dinov2_with_registers": "Bit", "dinov3_vit": "DINOv3ViT",
    "clip": "CLIP", "clip_vision_model": "CLIP", "siglip": "Siglip", "siglip_vision_model": "Siglip", "blip": "Blip",
}  # fmt: skip
# Settings of a kind that is not listed above may ask for anything; these are understood.
_PLAIN = {
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_convert_rgb", "default_to_square", "image_processor_type", "feature_extractor_type",
    "processor_class", "data_format", "input_data_format", "return_tensors", "disable_grouping", "device", "auto_map",
}  # fmt: skip
_OUT = "; pass preprocess=regard.Preprocess(...) to say what to do instead"


def timm(source: Source, default: Preprocess) -> Preprocess:
    """What timm's `pretrained_cfg` says; else `open_clip_config.json` or a processor of transformers that lie beside.

    Raises InputError for a setting that no `Preprocess` expresses.
    """
    return _stated(source, default, _timm, _open_clip, _transformers)


def transformers(source: Source, default: Preprocess) -> Preprocess:
    """What `preprocessor_config.json` or `processor_config.json` says; else what the others say. See `timm`."""
    return _stated(source, replace(default, crop_offset="floor"), _transformers, _timm, _open_clip)


def open_clip(source: Source, default: Preprocess) -> Preprocess:
    """What `open_clip_config.json` says; else what the others say. See `timm`."""
    return _stated(source, default, _open_clip, _timm, _transformers)


def grey(preprocess: Preprocess) -> Preprocess:
    """For one channel, where three are stated: the mean of each."""
    mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=(mean,), std=(std,))


def crop_ratio(cut: int, resized: int) -> float:
    """The ratio by which `Preprocess` resizes to exactly `resized` pixels and keeps `cut` of them."""
    ratio = cut / resized
    return ratio if int(cut / ratio) >= resized else math.nextafter(ratio, 0)


def _stated(
    source: Source, default: Preprocess, *readers: Callable[[Source, Preprocess], Preprocess | None]
) -> Preprocess:
    own = source.changes.get("preprocess")
    if isinstance(own, Preprocess):
        return own
    found = default
    try:
        stated = next((read for reader in readers if (read := reader(source, default)) is not None), None)
        if stated is None:
            source.tell("preprocess: as the family does, for nothing beside the tensors states it")
        found = stated or default
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"its preprocessing cannot be read ({error!r}){_OUT}") from error
    size = pair(source.changes.get("image_size"))
    return found if size is None else replace(found, size=size)


def _timm(source: Source, default: Preprocess) -> Preprocess | None:
    settings = source.settings
    flat = settings if "architecture" in settings and "input_size" in settings else {}  # as timm once wrote it
    cfg = source.processor if "input_size" in source.processor else settings.get("pretrained_cfg") or flat
    if not cfg:
        return None
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise InputError(f"timm's crop_mode {mode!r} is not known{_OUT}")
    # timm's models take one size, the native one, unless they were built for any.
    anywhere = (settings.get("model_args") or {}).get("dynamic_img_size")
    size = pair(cfg.get("input_size")) if anywhere else None
    return changed(
        default,
        {
            "size": size or default.size,
            "fit": "squash" if mode == "squash" else "crop",
            "crop_ratio": cfg.get("crop_pct") or 0.875,
            "interpolation": cfg.get("interpolation") or "bicubic",
            "mean": tuple(cfg.get("mean") or IMAGENET_MEAN),
            "std": tuple(cfg.get("std") or IMAGENET_STD),
            "crop_offset": "even",
            "resampler": "pillow",
        },
    )


def _open_clip(source: Source, default: Preprocess) -> Preprocess | None:
    if "open_clip" not in source.settings:
        return None
    cfg = source.settings["open_clip"].get("preprocess_cfg") or {}
    mode = cfg.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise InputError(f"open_clip's resize_mode {mode!r} is not known{_OUT}")
    return changed(
        default,
        {
            "fit": "squash" if mode == "squash" else "crop",
            "crop_ratio": 1.0,
            # "random" is for training; open_clip then evaluates with bicubic.
            "interpolation": "bilinear" if cfg.get("interpolation") == "bilinear" else "bicubic",
            "mean": _per_channel(cfg.get("mean") or OPENAI_MEAN),
            "std": _per_channel(cfg.get("std") or OPENAI_STD),
            "crop_offset": "even",
            "resampler": "pillow",
        },
    )


def _transformers(source: Source, default: Preprocess) -> Preprocess | None:
    said = source.processor
    if not said or "input_size" in said:
        return None
    kind, is_fast = _kind(source, said)
    if kind == "TimmWrapper":
        return None
    cfg = {
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        **_KINDS.get(kind, {}), **{name: value for name, value in said.items() if value is not None},
    }  # fmt: skip
    if kind not in _KINDS:
        odd = sorted({name for name, value in cfg.items() if value} - _PLAIN)
        odd += [f"{name} missing" for name in ("size", "resample", "image_mean", "image_std") if name not in cfg]
        if odd:
            raise InputError(f"the image processor {kind or 'without a name'} is not known ({', '.join(odd)}){_OUT}")
        source.assumed.append(f"preprocess as {kind or 'a processor without a name'} of transformers states it")
    if cfg.get("do_pad"):
        raise InputError(f"an image processor with do_pad is not known{_OUT}")
    size, fit, ratio = _geometry(cfg)
    resample = cfg["resample"]
    if resample not in list(Image.Resampling):
        raise InputError(f"resample {resample!r} is none of Pillow's filters 0..5{_OUT}")
    interpolation = Image.Resampling(resample).name.lower()
    tensors = "torch_float" if kind == "DINOv3ViT" else "torch" if is_fast else "pillow"
    if tensors == "torch_float" and interpolation == "bicubic":
        source.assumed.append("preprocess keeps values in 0..255; DINOv3's processor lets bicubic run beyond them")
    mean, std = _mean_and_std(cfg)
    return changed(
        default,
        {
            "size": size,
            "fit": fit,
            "crop_ratio": ratio,
            "interpolation": interpolation,
            "mean": mean,
            "std": std,
            "crop_offset": "floor",
            "resampler": tensors if interpolation in ("bilinear", "bicubic") else "pillow",
        },
    )


def _kind(source: Source, said: Mapping[str, Any]) -> tuple[str, bool]:
    """The kind, and whether it works on tensors: `ViT`, True for a ViTImageProcessorFast.

    From version 5 on all do by default and are named as those on pictures were before.
    """
    name = said.get("image_processor_type") or said.get("feature_extractor_type") or ""
    found = re.fullmatch(r"(\w+?)(?:ImageProcessor|FeatureExtractor)(Fast|Pil)?", name)
    kind, suffix = found.groups() if found else (name, None)
    version = re.match(r"\d+", str(source.settings.get("transformers_version", "")))
    is_fast = suffix == "Fast" or (suffix is None and version is not None and int(version[0]) >= 5)
    return kind or _KIND_OF_MODEL.get(source.settings.get("model_type", ""), ""), is_fast


def _geometry(cfg: Mapping[str, Any]) -> tuple[tuple[int, int] | None, str, float]:
    cut = _box(cfg.get("crop_size"), "crop_size", square=True) if cfg.get("do_center_crop") else None
    if not cfg["do_resize"]:
        if cut is not None:
            raise InputError(f"an image processor that crops without resizing is not known{_OUT}")
        return None, "squash", 1.0
    resized = _box(cfg["size"], "size", square=cfg.get("default_to_square", True))
    if isinstance(resized, int):
        if not isinstance(cut, tuple) or cut[0] != cut[1]:
            what = "without a crop" if cut is None else f"and a crop of {cut[0]} x {cut[1]}"
            raise InputError(f"an image processor with a shortest_edge {what} is not known{_OUT}")
        return cut, "crop", crop_ratio(cut[0], resized)
    if cut is None:
        return resized, "squash", 1.0
    ratio = min(crop_ratio(c, r) for c, r in zip(cut, resized, strict=True))
    if tuple(int(side / ratio) for side in cut) != resized:
        raise InputError(f"an image processor that resizes to {resized} and crops {cut} is not known{_OUT}")
    return cut, "squash", ratio


def _box(value: Any, name: str, *, square: bool) -> Any:
    """(height, width), or the short side alone as one number."""
    if isinstance(value, Mapping):
        value = {side: length for side, length in value.items() if length is not None}
        if set(value) == {"shortest_edge"}:
            return int(value["shortest_edge"])
        if set(value) != {"height", "width"}:
            raise InputError(f"an image processor with {name} {value} is not known{_OUT}")
        value = (value["height"], value["width"])
    if isinstance(value, int) and not square:
        return value
    box = pair(value)
    if box is None:
        raise InputError(f"an image processor with {name} {value!r} is not known{_OUT}")
    return box


def _mean_and_std(cfg: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Both for pixel values in 0..1, whatever range the processor brings them to first."""
    scale = 255 * float(cfg["rescale_factor"]) if cfg["do_rescale"] else 255.0
    mean, std = _per_channel(cfg["image_mean"]), _per_channel(cfg["image_std"])
    if not cfg["do_normalize"]:
        mean, std = (0.0,) * len(mean), (1.0,) * len(mean)
    if math.isclose(scale, 1.0, rel_tol=1e-9):
        return mean, std
    return tuple(m / scale for m in mean), tuple(s / scale for s in std)


def _per_channel(values: Any) -> tuple[float, ...]:
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(values)
