"""Regard turns pictures into tokens, lets words question them, and shows where every head looked.

The front door: every `regard` command is a function here. Nothing is imported until it is used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_HOMES = {
    "ask": "regard.verbs.ask",
    "look": "regard.verbs.look",
    "evaluate_answer": "regard.verbs.evaluate",
    "evaluate_classify": "regard.verbs.evaluate",
    "evaluate_knn": "regard.verbs.evaluate",
    "evaluate_linear": "regard.verbs.evaluate",
    "train_answer": "regard.train.answer",
    "train_classify": "regard.train.classify.task",
    "train_distill": "regard.train.distill.task",
    "check": "regard.verbs.check",
    "shard": "regard.verbs.shard",
    "demo": "regard.verbs.demo",
    "doctor": "regard.verbs.doctor",
    "export": "regard.verbs.export",
    "open_image": "regard.datasets",
    "load_pictures": "regard.datasets",
    "load_questions": "regard.datasets",
    "attention_rows": "regard.vit",
    "InputError": "regard.vit",
    "Preprocess": "regard.vit",
    "Tokens": "regard.vit",
    "ViT": "regard.vit",
    "ViTConfig": "regard.vit",
    "Answer": "regard.crossattn",
    "ImageQA": "regard.crossattn",
    "Memory": "regard.crossattn",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("regard")
    if name not in _HOMES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "__version__"])
