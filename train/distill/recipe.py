"""`DistillRecipe`: every setting of self-distillation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from regard.train.distill.clip import ClipMode
from regard.train.recipe import check_settings
from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import check_size


@dataclass(frozen=True)
class DistillRecipe:
    """Training a ViT on pictures without labels, by self-distillation (DINO).

    What is null is derived from the number of images, and printed before the start.

    Attributes:
        about: what the recipe reaches, how long it takes and on what machine, as measured.
        data: pictures: a folder in any arrangement, a table, tar shards, or a name such as `fashion-mnist`. Labels,
            where there are any, are looked at by the k-NN alone.
        model: preset of `ViT`: tiny, small, base, large, so400m, giant.
        vit: changed fields of the preset's `ViTConfig`, such as registers, or of the pretrained one's.
        pretrained: a ViT to start from instead: folder, file, hub name or timm name.
        local_crops: small crops per picture, beside the two global ones.
        global_size: (height, width) of a global crop in pixels; null for the model's native size.
        local_size: (height, width) of a local crop in pixels; null for 3/7 of a global one (96 of 224).
        global_scale: lowest and highest share of the picture's area in a global crop.
        local_scale: the same for a local crop.
        flip: probability of a horizontal flip.
        color_jitter: largest change of brightness, contrast, saturation and hue.
        jitter: probability of that change.
        grayscale: probability of a picture without colour.
        blur: `v1`, DINO's; or `v2`, that of DINOv2, whose first global crop is never blurred.
        blur_chances: probabilities of blur for the first global crop, the second, and a local one; null for those of
            `blur`.
        solarize: probability of solarizing the second global crop.
        prototypes: K, outputs of the head; null for auto.
        hidden: inner width of the head.
        bottleneck: width of what the head normalises.
        fixed_norm: keep the rows of the head's last layer at norm 1. Steadier; false was better for a ViT-S.
        tau_student: temperature of the student.
        tau_teacher: temperature of the teacher after its warm-up; null for auto.
        tau_teacher_start: temperature of the teacher at the start; null for auto.
        tau_warmup_epochs: epochs from the one temperature to the other; null for auto.
        tau_per: whether the temperature moves per `epoch` (DINO) or per `step` (DINOv2).
        centre_momentum: of the centre of the teacher's outputs.
        sinkhorn: Sinkhorn-Knopp (three iterations) instead of the centre, for both losses.
        momentum: of the teacher at the start; it rises to 1 by a cosine; null for auto.
        freeze_epochs: how long the head's last layer stays as it began; null for auto.
        koleo: weight of the KoLeo loss on each global crop (DINOv2: 0.1); 0 for none.
        ibot: weight of the iBOT loss on masked patches (DINOv2: 1); 0 for none.
        ibot_head: whether patches have their `own` head or the `shared` one.
        mask_share: share of the global crops that are masked for iBOT.
        mask_ratio: lowest and highest share of masked patches in one of them.
        drop_path: stochastic depth of the student's last block, less in earlier ones.
        drop_path_uniform: the same rate in all blocks (DINOv2).
        drop_path_subset: where the rate is above 0.1, compute a branch only for the samples that keep it (DINOv2).
        epochs: passes over the pictures.
        batch: pictures per step and device.
        lr: peak learning rate (DINO: 0.0005 per 256 pictures of a step).
        min_lr: learning rate at the end of the cosine.
        warmup_epochs: epochs of linear warm-up from 0; null for auto.
        weight_decay: at the start.
        weight_decay_end: at the end of a cosine from there.
        beta2: AdamW's second decay rate.
        clip_norm: largest gradient norm; null for no limit.
        clip_mode: whose norm that is: `per_parameter` (DINO), `per_module` (DINOv2) or `global`.
        bad_images: `error`, or `replace` a picture that cannot be read by another one.
        knn_every: epochs between two k-NN scores, where there are labels; 0 for never. The best epoch is chosen by it;
            without it the last one is the model.
        knn_images: labelled pictures for the k-NN: four fifths are looked up in, the rest is asked.
        gradient_checkpointing: compute each block's inside again for the gradient: less memory, more time.
        compile: compile each block.
        seed: of weights, data order, augmentation, masks and drop path.
        workers: processes that read pictures; 0 does it in the training process.
        save_every_steps: optimizer steps between two checkpoints; one is also written after every epoch.
        trainer: any argument of Lightning's Trainer, such as devices, strategy, precision, accumulate_grad_batches.
    """

    task: ClassVar[str] = "distill"

    about: str = ""
    data: str = "fashion-mnist"
    model: str = "small"
    vit: dict[str, Any] = field(default_factory=dict)
    pretrained: str | None = None
    local_crops: int = 8
    global_size: tuple[int, int] | None = None
    local_size: tuple[int, int] | None = None
    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    flip: float = 0.5
    color_jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter: float = 0.8
    grayscale: float = 0.2
    blur: Literal["v1", "v2"] = "v1"
    blur_chances: tuple[float, float, float] | None = None
    solarize: float = 0.2
    prototypes: int | None = None
    hidden: int = 2048
    bottleneck: int = 256
    fixed_norm: bool = True
    tau_student: float = 0.1
    tau_teacher: float | None = None
    tau_teacher_start: float | None = None
    tau_warmup_epochs: float | None = None
    tau_per: Literal["epoch", "step"] = "epoch"
    centre_momentum: float = 0.9
    sinkhorn: bool = False
    momentum: float | None = None
    freeze_epochs: float | None = None
    koleo: float = 0.0
    ibot: float = 0.0
    ibot_head: Literal["own", "shared"] = "own"
    mask_share: float = 0.5
    mask_ratio: tuple[float, float] = (0.1, 0.5)
    drop_path: float = 0.1
    drop_path_uniform: bool = False
    drop_path_subset: bool = False
    epochs: int = 100
    batch: int = 64
    lr: float = 5e-4
    min_lr: float = 1e-6
    warmup_epochs: float | None = None
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4
    beta2: float = 0.999
    clip_norm: float | None = 3.0
    clip_mode: ClipMode = "per_parameter"
    bad_images: Literal["error", "replace"] = "error"
    knn_every: int = 1
    knn_images: int = 5000
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    workers: int = 0
    save_every_steps: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self, "blur", "tau_per", "ibot_head", "clip_mode", "bad_images")
        check_settings(
            self, {"batch": 1, "local_crops": 0, "hidden": 1, "bottleneck": 1, "knn_every": 0, "knn_images": 2}
        )
        for name in ("tau_student", "tau_teacher", "tau_teacher_start"):
            self._require(name, 0.0, float("inf"), above=True)
        for name in ("koleo", "ibot", "freeze_epochs", "warmup_epochs", "tau_warmup_epochs", "min_lr"):
            self._require(name, 0.0, float("inf"))
        for name in ("centre_momentum", "momentum", "mask_share", "flip", "jitter", "grayscale", "solarize"):
            self._require(name, 0.0, 1.0)
        self._require("weight_decay_end", 0.0, float("inf"))
        if self.prototypes is not None and self.prototypes < 2:
            raise InputError(f"prototypes is {self.prototypes}; there must be at least 2")
        for name in ("global_scale", "local_scale", "mask_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise InputError(f"{name} is ({low}, {high}); it must hold 0 < lowest <= highest <= 1")
        if any(not 0 <= chance <= 1 for chance in self.blur_chances or ()):
            raise InputError(f"blur_chances is {self.blur_chances}; probabilities lie in [0, 1]")
        if self.local_size is not None:
            check_size("local_size", self.local_size)
        if self.global_size is not None:
            check_size("global_size", self.global_size)
        if self.koleo and self.batch < 2:
            raise InputError("koleo compares pictures of a batch; take a batch of at least 2")
        if not 0 <= self.drop_path < 1:
            raise InputError(f"drop_path is {self.drop_path}; it must lie in [0, 1)")

    def _require(self, name: str, least: float, most: float, above: bool = False) -> None:
        value = getattr(self, name)
        if value is not None and not (least <= value <= most and not (above and value == least)):
            end = "" if most == float("inf") else f" and at most {most:g}"
            raise InputError(f"{name} is {value}; it must be {'above' if above else 'at least'} {least:g}{end}")
