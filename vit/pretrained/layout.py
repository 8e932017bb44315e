"""`Layout`: one family of checkpoints as a table. A layout is added by adding one file to `layouts/`."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.pretrained.rules import Rule
from regard.vit.pretrained.source import Source


@dataclass(frozen=True)
class Unused:
    """Tensors that belong to a checkpoint but to no vision transformer: a pretraining head, a mask token."""

    pattern: str
    what: str


@dataclass(frozen=True)
class Layout:
    """How one family names its tensors, and what it fixes outside of them.

    Attributes:
        name: what the report and `regard export` call it.
        owner: the library whose numbers are to be reproduced.
        anchor: the patch projection's weight, by which a vision transformer is found inside a larger checkpoint.
        recognises: whether the tensors (prefixes gone) are of this layout. Exactly one layout may say so.
        describe: `ViTConfig` fields, read from the tensors, from what the source states, and from what the family
            fixes: eps, activation, position recipe, rope, preprocessing. Raises InputError for what is missing.
        rules: the names, in both directions.
        prepare: brings dialects to the one that `rules` know, and folds what our architecture does not have.
        unused: what is listed and left out.
        classifiers: rules for a classifier, `head.*`, looked for beside the vision transformer too.
        resize: `position_resize` recipes by the name of the library that has them.
    """

    name: str
    owner: str
    anchor: str
    recognises: Callable[[Source], bool]
    describe: Callable[[Source], dict[str, Any]]
    rules: tuple[Rule, ...]
    prepare: Callable[[Source], Source] = lambda source: source
    unused: tuple[Unused, ...] = ()
    classifiers: tuple[Rule, ...] = ()
    resize: Callable[[str, ViTConfig], PositionResize | None] = lambda name, config: None


@functools.cache
def layouts() -> dict[str, Layout]:
    """Every layout by name: each module of `layouts/` holds one as `LAYOUT`."""
    from regard.vit.pretrained import layouts as package

    found = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return {module.LAYOUT.name: module.LAYOUT for module in found}
