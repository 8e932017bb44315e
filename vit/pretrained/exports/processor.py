"""A `Preprocess` as an image processor of transformers, for `AutoImageProcessor.from_pretrained(FOLDER)`."""

from typing import Any

from PIL import Image

from regard.vit.preprocess import Preprocess


def processor(preprocess: Preprocess, size: tuple[int, int]) -> tuple[dict[str, Any], list[str]]:
    """`preprocessor_config.json` for a model of this native size, and what it cannot say."""
    told = []
    height, width = preprocess.size or size
    tall, wide = int(height / preprocess.crop_ratio), int(width / preprocess.crop_ratio)
    cut: dict[str, Any] = {"crop_size": {"height": height, "width": width}, "do_center_crop": True}
    shape: dict[str, Any]
    if preprocess.size is None:
        kind, shape = "ViT", {"size": {"height": height, "width": width}}  # not resized to
    elif preprocess.fit == "crop" and height == width:
        kind, shape = "Bit", {"size": {"shortest_edge": tall}, **cut}
    elif preprocess.crop_ratio != 1.0 and preprocess.fit == "squash":
        kind, shape = "DeiT", {"size": {"height": tall, "width": wide}, **cut}
    else:
        kind, shape = "ViT", {"size": {"height": height, "width": width}}
        if preprocess.fit == "crop":
            told.append(f"transformers does not cut a picture to {height} x {width}: its processor squashes it")
    if preprocess.resampler == "torch_float":
        kind = "DINOv3ViT"
    elif preprocess.resampler == "pillow":
        told.append("AutoImageProcessor resizes on tensors, a few levels of 255 away; backend='pil' does it as here")
    if "crop_size" in shape and preprocess.crop_offset == "even":
        told.append("its processor cuts a pixel further up or left where an odd number is left over")
    fast = "" if preprocess.resampler == "pillow" else "Fast"
    return {
        "image_processor_type": f"{kind}ImageProcessor{fast}",
        "do_resize": preprocess.size is not None,
        **shape,
        "resample": int(Image.Resampling[preprocess.interpolation.upper()]),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "do_convert_rgb": len(preprocess.mean) == 3,
    }, told
