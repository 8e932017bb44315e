"""A recipe: every setting of a training run as one frozen dataclass, read from YAML by name or path.

A flag of the command, a line of the YAML and an argument of the Python call are the same field. Each task has its own
dataclass (`AnswerRecipe` here, the others beside their task) and its own folder of recipes that come with the library.
"""

import difflib
import re
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, overload

import yaml

from regard.vit.errors import InputError
from regard.vit.files import typed_path, write_atomically
from regard.vit.values import from_json, merged, to_json

RECIPE = "recipe.yaml"
"""What a run's own recipe is called in its folder."""


class Recipe(Protocol):
    """What the recipes of all tasks share; `task` names the folder of those that come with the library."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    task: ClassVar[str]


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def check_settings(recipe: Recipe, least: dict[str, int]) -> None:
    """Raise InputError for a field below its smallest value in `least`, or an impossible setting that tasks share."""
    values = vars(recipe)
    for name, smallest in {"epochs": 1, "workers": 0, "warmup_steps": 0, **least}.items():
        if name in values and values[name] < smallest:
            raise InputError(f"{name} is {values[name]}; it must be at least {smallest}")
    if not 0 < values["lr"] < float("inf"):
        raise InputError(f"lr is {values['lr']}; it must be above 0")
    if not 0 <= values["weight_decay"] < float("inf"):
        raise InputError(f"weight_decay is {values['weight_decay']}; it must be 0 or more")
    if not 0 <= values["beta2"] < 1:
        raise InputError(f"beta2 is {values['beta2']}; it must lie in [0, 1)")
    if values.get("clip_norm") is not None and not values["clip_norm"] > 0:
        raise InputError(f"clip_norm is {values['clip_norm']}; it must be above 0, or null for no limit")
    if not 0 <= values.get("label_smoothing", 0) < 1:
        raise InputError(f"label_smoothing is {values['label_smoothing']}; it must lie in [0, 1)")
    if not 0 < values.get("layer_decay", 1) <= 1:
        raise InputError(f"layer_decay is {values['layer_decay']}; it must lie in (0, 1], and 1 is for none")
    if not -(2**63) <= values["seed"] < 2**63:
        raise InputError(f"seed is {values['seed']}; it must fit into 64 bits")


@dataclass(frozen=True)
class AnswerRecipe:
    """Training an `ImageQA` on a question set.

    Attributes:
        about: what the recipe reaches, how long it takes and on what machine, as measured.
        data: question set: `easy-vqa`, a folder, or a table (JSONL, CSV).
        held_out: share of the training images kept out of training, to choose the best epoch by.
        model: preset of `ImageQA`, or a whole model to go on from: a folder, a run, a hub name, public BLIP weights.
            Its tokenizer and head come with it, and the answers of a vocabulary; a decoder learns any answer.
        pretrained: image side to start from, instead of the preset's: folder, file, hub name or timm name of any ViT.
        freeze_vit: keep the image side as it is, without gradients; null does so if it comes from `pretrained`.
        pretrained_text: text side to start from, beside `pretrained`: folder, file or hub name of a BERT. The
            cross-attention between the two is new, behind gates at 0.
        freeze_text: keep what `pretrained_text` brought as it is; null does so.
        vit: changed fields of the preset's `ViTConfig`, or of the pretrained one's.
        text: changed fields of the preset's `TextConfig`; of a pretrained text side `cross_every` and `gate` alone.
        head: `vocabulary` (scores a list of answers), `generate` (a decoder writes) or `rank` (the decoder compares the
            list); null for the model's own, `vocabulary` for a preset. The two with a decoder are trained alike.
        decoder: changed fields of the preset's `DecoderConfig`.
        score: of a vocabulary: `softmax` (one right answer) or `sigmoid` (several may be right); null for the model's
            own, `softmax` for a preset.
        label_smoothing: share of each token's target that is spread over all tokens, for a head with a decoder.
        epochs: passes over the training images.
        batch_images: images per step and device; each is encoded once, however many questions it has.
        questions_per_image: questions drawn per image and step; null for all.
        shift: largest random shift in pixels, edges repeated; images are never flipped (left and right have words).
        lr: peak learning rate.
        weight_decay: on weight matrices only.
        beta2: AdamW's second decay rate.
        warmup_steps: optimizer steps of linear warm-up, at most a tenth of the run; a cosine to 0 follows.
        clip_norm: largest gradient norm; null for no limit.
        layer_decay: factor on the learning rate from each layer to the one before it; 1 for the same rate everywhere.
        lora_rank: train adapters of this rank (LoRA) and keep the pretrained weights as they are; 0 trains the weights.
            What is not pretrained, and the head of a vocabulary, is trained too. The saved model has them merged.
        lora_alpha: the adapters' output is scaled by lora_alpha / lora_rank.
        lora_targets: linear layers that get adapters: names (`to_q`), ends or patterns of dotted names (`vit.*.fc1`).
        gradient_checkpointing: keep only each layer's input and compute its inside again for the gradient: less memory,
            more time.
        seed: of weights, data order, augmentation and dropout.
        workers: processes that open images; 0 does it in the training process and keeps a small set in memory.
        save_every_steps: optimizer steps between two checkpoints; one is also written after every epoch.
        trainer: any argument of Lightning's Trainer, such as devices, strategy, precision, accumulate_grad_batches.
    """

    task: ClassVar[str] = "answer"

    about: str = ""
    data: str = "easy-vqa"
    held_out: float = 0.1
    model: str = "demo"
    pretrained: str | None = None
    freeze_vit: bool | None = None
    pretrained_text: str | None = None
    freeze_text: bool | None = None
    vit: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    head: Literal["vocabulary", "generate", "rank"] | None = None
    decoder: dict[str, Any] = field(default_factory=dict)
    score: Literal["softmax", "sigmoid"] | None = None
    label_smoothing: float = 0.0
    epochs: int = 10
    batch_images: int = 32
    questions_per_image: int | None = None
    shift: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.05
    beta2: float = 0.98
    warmup_steps: int = 100
    clip_norm: float | None = 1.0
    layer_decay: float = 1.0
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("to_q", "to_v")
    gradient_checkpointing: bool = False
    seed: int = 0
    workers: int = 0
    save_every_steps: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self, {"batch_images": 1, "shift": 0, "lora_rank": 0})
        if self.questions_per_image is not None and self.questions_per_image < 1:
            raise InputError(
                f"questions_per_image is {self.questions_per_image}; it must be at least 1, or null for all"
            )
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out is {self.held_out}; it must lie between 0 and 1")


class _Yaml(yaml.SafeLoader):
    """Plain values alone, and 1e-3 as the number that everyone means by it: YAML 1.1 wants 1.0e-3."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def names(kind: type[Recipe] = AnswerRecipe) -> list[str]:
    """The recipes of a task that come with the library."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder(kind).iterdir() if f.name.endswith(".yaml"))


def _folder(kind: type[Recipe]) -> Any:
    return files("regard.train") / "recipes" / kind.task


@overload
def load_recipe(source: str | Path | None = ..., /, **changes: Any) -> AnswerRecipe: ...


@overload
def load_recipe(source: str | Path | None, kind: type[AnyRecipe], /, **changes: Any) -> AnyRecipe: ...


def load_recipe(source: str | Path | None = "easy_vqa", kind: type[Any] = AnswerRecipe, /, **changes: Any) -> Any:
    """A recipe of the task `kind` by name, or from a YAML file, with any field changed.

    None is the recipe of defaults. Fields that are mappings, such as `vit` and `trainer`, are merged key by key; every
    other field is replaced.
    Raises InputError for an unknown recipe or field, or a value of the wrong kind.
    """
    known = names(kind)
    path = Path() if source is None else typed_path(source)
    if source is None:
        text, where = "", f"train {kind.task}"
    elif path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"{path}: no such recipe file")
        try:
            text, where = path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text; a recipe is a YAML file") from error
    elif str(source) in known:
        text, where = (_folder(kind) / f"{source}.yaml").read_text(encoding="utf-8"), f"recipe {source}"
    else:
        raise InputError(f"no recipe is called {str(source)!r}; choose one of {', '.join(known)}, or give a .yaml file")
    try:
        values = yaml.load(text, _Yaml) or {}
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: a recipe is a mapping from fields to values")
    defaults = to_json(kind())
    for name in (*values, *changes):
        if name not in defaults:
            near = difflib.get_close_matches(str(name), defaults, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{where}: a recipe has no field {name!r}{hint}")
    changes = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    if changes:
        values["about"] = ""  # what was measured, was measured without the changes
    return from_json(merged({**defaults, **values}, changes), kind, where)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe as YAML, every field stated."""
    text = yaml.safe_dump(to_json(recipe), sort_keys=False, allow_unicode=True)
    write_atomically(path, lambda file: file.write(text.encode()))


def run_recipe(
    kind: type[AnyRecipe],
    default: str | None,
    recipe: str | Path | None,
    out: Path,
    resume: bool,
    changes: dict[str, Any],
) -> AnyRecipe:
    """What a run in `out` follows: a new one the recipe asked for, a resumed one its own, kept in its folder.

    `default` is for a new one that asks for none; None means the defaults of the fields.
    """
    if not resume:
        return load_recipe(default if recipe is None else recipe, kind, **changes)
    if recipe is not None:
        raise InputError(f"a resumed run follows its own {out / RECIPE}; leave the recipe out")
    if not (out / RECIPE).is_file():
        raise InputError(f"nothing to resume: there is no {out / RECIPE}; check --out")
    return load_recipe(out / RECIPE, kind, **changes)


def default_recipe(kind: type[AnyRecipe], name: str, changes: dict[str, Any]) -> str | None:
    """`name` on the data that it is made for, which are the kind's default; None, the defaults, on other data."""
    own = kind().data  # type: ignore[attr-defined]
    return name if changes.get("data", own) == own else None
