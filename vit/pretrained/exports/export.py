"""`export`: a ViT in the format asked for, or one line on which setting it cannot hold and who could."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from regard.vit.errors import InputError
from regard.vit.files import typed_path
from regard.vit.pretrained.exports import dinov2, graph, timm, torchvision, transformers
from regard.vit.pretrained.exports.target import Target
from regard.vit.pretrained.exports.tensors import native
from regard.vit.pretrained.report import ExportReport
from regard.vit.surgery import regridded

if TYPE_CHECKING:
    from regard.vit.model import ViT

_TARGETS: dict[str, Target] = {
    target.name: target for target in (timm.TARGET, transformers.TARGET, torchvision.TARGET, dinov2.TARGET)
}
_GRAPHS: dict[str, Callable[["ViT", Path, tuple[int, int]], ExportReport]] = {
    "onnx": graph.write_onnx,
    "torch": graph.write_torch,
}
LAYOUTS = (*_TARGETS, *_GRAPHS)


def export(
    vit: "ViT", path: str | Path, layout: str, image_size: tuple[int, int] | None = None, overwrite: bool = False
) -> ExportReport:
    """What `ViT.export` does; see there."""
    if layout not in LAYOUTS:
        raise InputError(f"no export is called {layout!r}; choose one of {', '.join(LAYOUTS)}")
    path = typed_path(path)
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path}: exists already; choose another place, or pass overwrite=True")
    if any(tensor.is_meta for tensor in vit.state_dict().values()):
        raise InputError("this ViT lies on the meta device and has no values; load its weights first")
    if layout in _GRAPHS:
        return _GRAPHS[layout](vit, path, native(vit.config) if image_size is None else image_size)
    if image_size is not None:
        vit = regridded(vit, image_size)
    target = _TARGETS[layout]
    form = target.form(vit.config)
    if form is None:
        others = [name for name, other in _TARGETS.items() if other.form(vit.config) is not None]
        raise InputError(
            f"{layout} cannot hold this model: {target.lacks(vit.config)}; {', '.join([*others, *_GRAPHS])} can"
        )
    return target.write(vit, path, form)
