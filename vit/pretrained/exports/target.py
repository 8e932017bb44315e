"""What an architecture of another library can express."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.vit.config import ViTConfig
from regard.vit.pretrained.report import ExportReport

if TYPE_CHECKING:
    from regard.vit.model import ViT

Check = Callable[[ViTConfig], bool]
Allowed = tuple[Any, ...] | Check  # values of a field, or a question to the configuration


def anything(config: ViTConfig) -> bool:
    return True


def _of_width(config: ViTConfig) -> bool:
    return config.width_of_head * config.heads == config.dim


def square(config: ViTConfig) -> bool:
    return config.grid[0] == config.grid[1]


def pools(*kinds: str) -> Check:
    """Whether the target pools in this way, or has nothing to pool for: no classifier, no weights of the pooling."""
    return lambda config: (
        config.pooling in kinds or not (config.classes or config.pooling == "map" or config.norm_place == "pooled")
    )


def own_periods(config: ViTConfig) -> bool:
    """Whether the periods of a rope are stated, and are not the ones that its base gives."""
    count = config.width_of_head // 4
    given = config.rope.periods or ()
    return any(abs(period / config.rope.base ** (i / count) - 1) > 1e-6 for i, period in enumerate(given))


# What a plain ViT can express. A form states what differs; every field of ViTConfig stands here, so that a new one is
# a decision. Rows that a table lacks, missing biases and layer scales are written as numbers that change nothing.
PLAIN: Mapping[str, Allowed] = {
    "image_size": anything,
    "patch_size": anything,
    "channels": anything,
    "dim": anything,
    "depth": anything,
    "heads": anything,
    "head_dim": _of_width,
    "hidden_dim": anything,
    "class_token": (True,),
    "registers": (0,),
    "registers_place": lambda config: not config.registers or config.registers_place == "after_cls",
    "positions": ("learned",),
    "position_rows": anything,
    "position_resize": anything,
    "rope": anything,
    "activation": ("gelu",),
    "norm_eps": (1e-6,),
    "qkv_bias": anything,
    "key_bias": anything,
    "qk_norm": (False,),
    "attn_norm": (False,),
    "mlp_norm": (False,),
    "sink": (False,),
    "layer_scale": (None,),
    "drop_path": anything,
    "pre_norm": (False,),
    "norm_place": ("tokens",),
    "pooling": pools("cls"),
    "classes": anything,
    "size_policy": anything,
    "preprocess": anything,
}


def _told(config: ViTConfig) -> str:
    if own_periods(config):
        return (
            "rope with stated periods (to take those of its base instead, open the model with rope={'periods': None})"
        )
    return f"rope by {config.rope.coordinates!r} coordinates, base {config.rope.base:g}"


@dataclass(frozen=True)
class Form:
    """One architecture of another library: its name there, and where it differs from `PLAIN` in what it can express."""

    name: str
    allows: Mapping[str, Allowed]

    def lacks(self, config: ViTConfig) -> list[str]:
        """The settings of a configuration that it cannot express, with their values."""
        missing = []
        for name, allowed in {**PLAIN, **self.allows}.items():
            value = getattr(config, name)
            if not (allowed(config) if callable(allowed) else value in allowed):
                missing.append(_told(config) if name == "rope" else f"{name} {value!r}")
        return missing


@dataclass(frozen=True)
class Target:
    """One library to write for.

    Attributes:
        name: as it is asked for.
        forms: its architectures; the first that fits is written.
        write: puts a ViT that the form can express at a path and tells how to open it.
    """

    name: str
    forms: tuple[Form, ...]
    write: Callable[["ViT", Path, Form], ExportReport]

    def form(self, config: ViTConfig) -> Form | None:
        return next((form for form in self.forms if not form.lacks(config)), None)

    def lacks(self, config: ViTConfig) -> str:
        """What its nearest architectures cannot express."""
        lacking = {form.name: form.lacks(config) for form in self.forms}
        fewest = min(map(len, lacking.values()))
        nearest: dict[str, str] = {}
        for name, missing in lacking.items():
            if len(missing) == fewest:
                nearest.setdefault(" and no ".join(missing), name)
        return ", ".join(f"{name} has no {missing}" for missing, name in nearest.items())
