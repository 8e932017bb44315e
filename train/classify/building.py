"""The ViT that a recipe trains: a preset, or pretrained weights with a head for the classes at hand."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.train.classify.recipe import ClassifyRecipe
from regard.train.starting import parted, with_settings
from regard.vit import ViT, checkpoint
from regard.vit.errors import InputError
from regard.vit.files import write_atomically
from regard.vit.pretrained.files import locate
from regard.vit.pretrained.opening import is_own

CLASSES = "classes.json"
"""The names of a classifier's outputs, in order, beside its weights."""


def build(recipe: ClassifyRecipe, classes: Sequence[str]) -> tuple[ViT, str]:
    """The ViT with a head of so many classes, and a line about where its weights come from.

    Raises InputError for fewer than two classes, an unknown preset, weights that cannot be read, and settings that
    these weights do not allow.
    """
    if len(classes) < 2:
        raise InputError(f"a classifier needs two classes at least; {recipe.data} has {len(classes)}")
    if own := next((name for name in ("classes", "drop_path") if name in recipe.vit), None):
        hint = "is given by the data" if own == "classes" else "is a field of the recipe itself"
        raise InputError(f"vit.{own} {hint}; leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.pretrained is None:
            changes = {**recipe.vit, "classes": len(classes), "drop_path": recipe.drop_path}
            vit, told = ViT.preset(recipe.model, **changes), f"a new ViT {recipe.model!r} with random weights"
        else:
            vit, told = _pretrained(recipe, recipe.pretrained, classes)
    if vit.preprocess.size is None:
        raise InputError("training needs pictures of one size: set vit.preprocess.size")
    if recipe.freeze_vit:
        if recipe.pretrained is None:
            raise InputError("freeze_vit keeps pretrained weights as they are; give pretrained")
        assert vit.head is not None
        vit.requires_grad_(False)
        vit.head.requires_grad_(True)
    return vit, told


def save_classifier(folder: Path, vit: ViT, classes: Sequence[str]) -> None:
    """Write the ViT as a model folder with its class names in `classes.json`. Raises InputError as `ViT.save` does."""
    text = json.dumps(list(classes), indent=1, ensure_ascii=False) + "\n"
    names = {CLASSES: lambda path: write_atomically(path, lambda file: file.write(text.encode()))}
    checkpoint.save(folder, vit.config, vit, names)


def class_names(source: str | Path) -> tuple[str, ...] | None:
    """The class names beside a saved model; None where there are none. Raises InputError for an unreadable file."""
    try:
        path = locate(source) / CLASSES
    except InputError:
        return None
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: must hold a list of class names")
    return tuple(names)


def _pretrained(recipe: ClassifyRecipe, source: str, classes: Sequence[str]) -> tuple[ViT, str]:
    opening, kept, image_size = parted(recipe.vit)
    vit, told = _opened(source, len(classes), opening)
    known = class_names(source)
    if vit.head is not None and known is not None and known != tuple(classes):
        told = f"its head is of other classes ({_few(known)}); a new one of {len(classes)} takes its place"
        vit = with_settings(vit, {"classes": 0})
    before = vit.pool.width
    vit = with_settings(vit, {**kept, "drop_path": recipe.drop_path, "classes": len(classes)}, image_size)
    if vit.pool.width != before:
        told = f"a new head of {len(classes)} classes on what is pooled now"
    return vit, f"weights of {source}: {told}"


def _opened(source: str, count: int, changes: dict[str, Any]) -> tuple[ViT, str]:
    """The weights, with their own head where it is of `count` classes, and what became of the head."""
    new = f"a new head of {count} classes takes its place"
    if is_own(locate(source)):
        vit = ViT.from_pretrained(source, **changes)
        own = vit.config.classes
        if own == count:
            return vit, f"its head of {count} classes is trained on"
        vit = with_settings(vit, {"classes": 0})
        return vit, f"its head is of {own} classes; {new}" if own else f"a new head of {count} classes on it"
    try:
        return ViT.from_pretrained(source, classes=count, **changes), f"its head of {count} classes is trained on"
    except InputError as error:
        other = re.search(r"it has (a classifier of \d+ classes|no classifier)", str(error))
        if other is None:
            raise
    vit = ViT.from_pretrained(source, **changes)
    if other[1] == "no classifier":
        return vit, f"a new head of {count} classes on it"
    return vit, f"it has {other[1]}; {new}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
