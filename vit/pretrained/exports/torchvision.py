"""torchvision: a `.pth` with the state of a `torchvision.models.VisionTransformer`."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regard.vit.pretrained.exports import notes, place
from regard.vit.pretrained.exports.target import Form, Target, anything, square
from regard.vit.pretrained.exports.tensors import laid_out, native, renamed
from regard.vit.pretrained.layouts import torchvision as layout
from regard.vit.pretrained.report import ExportReport

if TYPE_CHECKING:
    from regard.vit.model import ViT

VIT = Form("VisionTransformer", {"image_size": square, "channels": (3,), "norm_eps": anything})


def _write(vit: "ViT", path: Path, form: Form) -> ExportReport:
    config = vit.config
    tensors, laid = laid_out(vit, "cls+patches")
    state = renamed((*layout.RULES, *layout.LAYOUT.classifiers), tensors, laid)
    place.file(path, "torchvision", (".pth", ".pt"), lambda file: torch.save(state, file))
    arguments = {
        "image_size": native(config)[0],
        "patch_size": config.patch_size,
        "num_layers": config.depth,
        "num_heads": config.heads,
        "hidden_dim": config.dim,
        "mlp_dim": config.hidden_dim or 4 * config.dim,
        **({"num_classes": config.classes} if config.classes else {}),
    }
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    lost = []
    if config.norm_eps != 1e-6:  # theirs otherwise
        given += f", norm_layer=functools.partial(torch.nn.LayerNorm, eps={config.norm_eps})"
        lost = [f"the file does not hold norm_eps {config.norm_eps}: it has to be stated, as here"]
    bare = "" if config.classes else "model.heads = torch.nn.Identity(); "
    return ExportReport(
        path=str(path),
        layout="torchvision",
        model="VisionTransformer",
        code=f"model = torchvision.models.VisionTransformer({given}); {bare}"
        f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))",
        notes=(
            *notes.resize(config, layout.RESIZE, "torchvision's interpolate_embeddings"),
            *lost,
            *notes.pool(config, ("cls",), "the class token leaves the model"),
            f"torchvision takes {native(config)[0]} x {native(config)[0]} px and no other size",
            notes.preprocess(config),
        ),
    )


TARGET = Target("torchvision", (VIT,), _write)
