"""Reading a live module of timm, transformers or torchvision, or one that holds such a module.

None of the three is imported: what they are is read off the module in hand.
"""

from typing import Any

from torch import nn

from regard.vit.errors import InputError
from regard.vit.pretrained import settings, timm_module
from regard.vit.pretrained.source import Source


def read(module: nn.Module) -> Source:
    """The tensors of a module and what its own attributes state. Raises InputError for what Regard cannot build."""
    name = type(module).__name__
    tensors = {str(n): tensor.detach().cpu() for n, tensor in module.state_dict().items()}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError(f"{name}: it lies on the meta device and has no values; load its weights first")
    source = Source(where=f"{type(module).__module__.split('.')[0]} {name}", tensors=tensors)
    for part in module.modules():
        library = type(part).__module__.split(".")[0]
        if library == "transformers" and "patch_size" in settings.vision_part(config := _configuration(part)):
            source.settings, source.stated = config, settings.stated(config)
            break
        if timm_module.is_timm(part):
            timm_module.describe(source, part)
            break
        if library == "torchvision" and type(part).__name__ == "VisionTransformer":
            source.stated = {"heads": part.encoder.layers[0].num_heads, "image_size": settings.pair(part.image_size)}  # type: ignore
            source.stated["norm_eps"] = part.encoder.ln.eps  # type: ignore[union-attr]
            break
    return source


def _configuration(part: nn.Module) -> dict[str, Any]:
    """What a module of transformers was built from; a text model beside the vision transformer has one of its own."""
    config: Any = getattr(part, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}
