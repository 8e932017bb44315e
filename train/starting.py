"""Training that starts from weights: what a recipe may change of them, and the model that comes out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.vit import ViT, checkpoint
from regard.vit.config import changed_vit
from regard.vit.errors import InputError, reason
from regard.vit.surgery import regridded

# What a trained model may be changed in: the blocks and tokens keep their tensors and what these mean.
_OPEN = ("preprocess", "pooling", "drop_path", "size_policy", "position_resize")


def parted(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """A recipe's `vit` as (what opening the weights is told, what is changed afterwards, the image size or None)."""
    opening = dict(changes)
    kept = {name: opening.pop(name) for name in _OPEN if name in opening}
    return opening, kept, opening.pop("image_size", None)


def started(source: str, changes: Mapping[str, Any], **more: Any) -> ViT:
    """Any pretrained ViT with the changed fields of a recipe and `more` of them.

    Raises InputError for weights that cannot be read, and settings that these weights do not allow.
    """
    opening, kept, image_size = parted(changes)
    return with_settings(ViT.from_pretrained(source, **opening), {**kept, **more}, image_size)


def with_settings(vit: ViT, changes: Mapping[str, Any], image_size: Any = None) -> ViT:
    """The same weights under a changed configuration; a head that is not there or does not fit begins at 0.

    (Dosovitskiy et al., 2021, section 3.2: a head of zeros lets fine-tuning begin at the pretrained features.)
    """
    if image_size is not None:
        given = changes.get("preprocess", {})
        changes = {**changes, "preprocess": {"size": image_size, **given}}
        vit = regridded(vit, tuple(image_size) if isinstance(image_size, (list, tuple)) else image_size)
    config = changed_vit(vit.config, changes)
    tensors: dict[str, Tensor] = dict(vit.state_dict())
    try:
        with torch.device("meta"):
            made = ViT(config)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"vit: no model can be built from these settings ({reason(error)})") from error
    expected = made.state_dict()
    head = {name: torch.zeros(t.shape, dtype=vit.dtype) for name, t in expected.items() if name.startswith("head.")}
    if not all(name in tensors and tensors[name].shape == t.shape for name, t in head.items()):
        tensors |= head
    tensors = {name: t for name, t in tensors.items() if not name.startswith("head.") or name in expected}
    checkpoint.account("the pretrained weights under the settings in vit", expected, tensors)
    made.load_state_dict(tensors, assign=True)
    made.requires_grad_(True)
    made.report = vit.report
    return made
