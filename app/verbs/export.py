"""`regard export`: any ViT in the format of another library, as ONNX, or as a program of torch.export."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from regard.models import open_vit
from regard.vit.pretrained.report import ExportReport, LoadReport


@dataclass(frozen=True)
class Exported:
    """What `export` read and what it wrote."""

    model: str
    loaded: LoadReport | None
    report: ExportReport

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a program to read: what was written, how to open it, and what differs there."""
        layout = None if self.loaded is None else self.loaded.layout
        return {"source": self.model, "source_layout": layout, **asdict(self.report)}

    def __str__(self) -> str:
        read = [str(self.loaded)] if self.loaded is not None else []
        return "\n".join([*read, str(self.report)])


def export(
    model: str | Path,
    *,
    to: Literal["timm", "transformers", "torchvision", "dinov2", "onnx", "torch"],
    out: str | Path,
    image_size: tuple[int, int] | None = None,
    overwrite: bool = False,
    vit: dict[str, Any] | None = None,
) -> Exported:
    """Write a ViT as another library opens it, or as a graph for ONNX runtimes or torch.export.

    Args:
        model: any ViT, or an ImageQA for its image side: folder, run, file, hub name, timm name.
        to: timm, transformers (a folder), torchvision, dinov2 (a .pth), onnx (an .onnx) or torch (a .pt2).
        out: the folder or file to write.
        image_size: H W in pixels, to which the position table is resampled beforehand; default: the native size.
        overwrite: replace what stands at out.
        vit: what a file does not tell of itself: --vit.image_size "[384, 288]", --vit.heads 6, --vit.classes 37.

    Raises:
        InputError: an unreadable model, a setting that the format cannot hold, an unwritable place.
    """
    opened = open_vit(model, "cpu", **(vit or {}))
    return Exported(str(model), opened.report, opened.export(out, to, image_size=image_size, overwrite=overwrite))
