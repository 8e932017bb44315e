"""`regard look`: where the class token of a ViT looks, head by head; without one, its registers or patches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard import figures
from regard.datasets import open_image
from regard.models import DEMO, open_vit
from regard.vit import AttentionRows, attention_rows
from regard.vit.errors import InputError
from regard.vit.files import typed_path
from regard.vit.pretrained.report import LoadReport


@dataclass(frozen=True)
class Looked:
    """What `look` found: one token's rows in one layer, and the PNG with a panel per head.

    `query` says whose: `cls`, or in a model without a class token `registers` (the first) or `patches` (their mean).
    `loaded` tells how a model of another library was opened.
    """

    image: Path
    model: str
    layer: int
    query: str
    rows: AttentionRows
    picture: Path
    loaded: LoadReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a program to read: per head the map, and the mass on the class token and registers."""
        rows = self.rows
        heads = range(rows.patches.shape[2])
        return {
            "image": str(self.image),
            "model": self.model,
            "layer": self.layer,
            "query": self.query,
            "layout": None if self.loaded is None else self.loaded.layout,
            "picture": str(self.picture),
            "heads": [
                {
                    "map": rows.patches[0, 0, h, 0].tolist(),
                    "cls": None if rows.cls is None else rows.cls[0, 0, h, 0].item(),
                    "registers": rows.registers[0, 0, h, 0].tolist(),
                }
                for h in heads
            ],
        }

    def __str__(self) -> str:
        lines = [] if self.loaded is None or self.loaded.layout == "regard" else [str(self.loaded)]
        lines.append(f"layer {self.layer}, {_WHOSE[self.query]}, {self.rows.patches.shape[2]} heads")
        for h, head in enumerate(self.as_dict()["heads"]):
            share, cls, registers = sum(map(sum, head["map"])), head["cls"] or 0.0, sum(head["registers"])
            lines.append(f"  head {h}: patches {share:.1%}, class token {cls:.1%}, registers {registers:.1%}")
        return "\n".join([*lines, f"maps: {self.picture}"])


_WHOSE = {"cls": "class token", "registers": "first register", "patches": "mean of the patches"}


@torch.inference_mode()
def look(
    image: str | Path, *, model: str | Path = DEMO, layer: int = -1, out: str | Path | None = None, device: str = "auto"
) -> Looked:
    """Draw where the class token looks in a picture, one panel per head.

    Args:
        image: picture file.
        model: any ViT or ImageQA: folder, run, file (.safetensors, .pth, .npz, .ckpt), hub name, timm name; default:
            what `regard demo` trained.
        layer: layer counted from 0, or from the end if negative.
        out: PNG; default: IMAGE-look.png in the current folder.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: an unreadable picture or model, a layer that does not exist, an unwritable place.
    """
    image = typed_path(image)
    picture = open_image(image)
    vit = open_vit(model, device)
    if not isinstance(layer, int):
        raise InputError(f"layer is {layer!r}; look draws one layer, given by its number")
    (number,) = vit.layer_numbers(layer)
    images = vit.preprocess(picture).to(next(vit.parameters()).device)
    query = "cls" if vit.config.class_token else "registers" if vit.config.registers else "patches"
    rows = attention_rows(vit, images, query, number)
    path = Path(f"{image.stem}-look.png") if out is None else typed_path(out)
    title = f"{image.name}, layer {number}, {_WHOSE[query]}"
    saved = figures.save(figures.head_figure(picture, vit.preprocess, rows, title), path)
    return Looked(image, str(model), number, query, rows, saved, vit.report)
