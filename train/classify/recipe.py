"""`ClassifyRecipe`: every setting of a run that trains a ViT with labels."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from regard.train.recipe import check_settings
from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import Interpolation


@dataclass(frozen=True)
class ClassifyRecipe:
    """Training a ViT on pictures with labels, from random weights or from pretrained ones.

    Attributes:
        about: what the recipe reaches, how long it takes and on what machine, as measured.
        data: pictures with labels: a folder with one folder per class, a table (CSV, JSONL), tar shards, or a name such
            as `fashion-mnist`.
        split: which split of them is trained on.
        held_out: share of it kept out of training, stratified by class, to choose the best epoch by; 0 takes the split
            `val` for that, and null does where there is one, else a tenth. The split `test` is never read.
        model: preset of `ViT`, for random weights.
        pretrained: weights to start from, instead of the preset's random ones: folder, file, hub name or timm name of
            any ViT. A head for another number of classes gives way to a new one.
        vit: changed fields of the preset's `ViTConfig`; of pretrained weights those that keep the meaning of the
            tensors, such as `image_size` and `preprocess`.
        freeze_vit: train the head alone and keep all else as it is: a linear probe by gradient.
        epochs: passes over the training pictures.
        batch: pictures per step and device.
        lr: peak learning rate of AdamW.
        lr_scale: how `lr` follows the pictures per optimizer step, B (batch x devices x accumulated batches): `none`
            takes it as it stands, `linear` times B / lr_batch, `sqrt` times the root of that.
        lr_batch: pictures per optimizer step for which `lr` is stated, where `lr_scale` is not `none`.
        optimizer: `adamw`, or `muon`, which takes the matrices inside the blocks and leaves the rest to AdamW.
        muon_lr: peak learning rate of Muon, scaled as `lr` is.
        weight_decay: on weight matrices only, times the learning rate of each.
        beta1: AdamW's first decay rate.
        beta2: AdamW's second decay rate.
        warmup_steps: optimizer steps of linear warm-up, at most a tenth of the run; a cosine to 0 follows.
        warmup_epochs: the same in epochs; give one of the two.
        clip_norm: largest gradient norm; null for no limit.
        layer_decay: factor on the learning rate from each block to the one before it; 1 for the same rate everywhere.
        drop_path: stochastic depth rate of the last block; earlier blocks get less, linearly.
        loss: `ce` (softmax, one class is right) or `bce` (a sigmoid for each class, their mean).
        label_smoothing: share of each target that is spread over all classes.
        mixup: alpha of the Beta distribution two pictures are blended by; 0 for none.
        cutmix: the same for the area that one picture is pasted over another by. With both, each batch draws one.
        crop_scale: share of the picture's area that a random crop has; null for the whole picture.
        crop_ratio: width / height of a random crop.
        interpolation: filter that crops are resized with.
        flip: probability of mirroring left to right.
        shift: largest random shift in pixels, edges repeated.
        rand_augment: RandAugment in timm's spelling, such as `rand-m9-n2-mstd0.5-inc1`; null for none.
        three_augment: one of grayscale, solarize and blur for each picture, and a light jitter (DeiT III).
        color_jitter: strength of random brightness, contrast and saturation; null for none.
        erase: probability of erasing a random box.
        ema: decay of the running average of the weights, which is then scored, chosen by and saved; null for none.
            Early on it averages over fewer steps.
        bad_images: what a picture that cannot be read does: `error` ends the run, `skip` leaves its place blank and
            uncounted, `replace` takes another picture. Each is named once.
        reduced: decode large JPEGs at a reduced scale, near the size that is needed: faster, not the same pixels.
        compile: compile each block; worth its minute of waiting on a GPU.
        seed: of weights, data order, augmentation and drop path.
        workers: processes that open and augment pictures; 0 does it in the training process.
        save_every_steps: optimizer steps between two checkpoints; one is also written after every epoch.
        trainer: any argument of Lightning's Trainer, such as devices, strategy, precision, accumulate_grad_batches.
    """

    task: ClassVar[str] = "classify"

    about: str = ""
    data: str = "fashion-mnist"
    split: str = "train"
    held_out: float | None = None
    model: str = "small"
    pretrained: str | None = None
    vit: dict[str, Any] = field(default_factory=dict)
    freeze_vit: bool = False
    epochs: int = 10
    batch: int = 128
    lr: float = 1e-3
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    lr_batch: int = 1024
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: float = 0.02
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.999
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    clip_norm: float | None = 1.0
    layer_decay: float = 1.0
    drop_path: float = 0.0
    loss: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    interpolation: Interpolation = "bicubic"
    flip: float = 0.5
    shift: int = 0
    rand_augment: str | None = None
    three_augment: bool = False
    color_jitter: float | None = None
    erase: float = 0.0
    ema: float | None = None
    bad_images: Literal["error", "skip", "replace"] = "error"
    reduced: bool = False
    compile: bool = False
    seed: int = 0
    workers: int = 0
    save_every_steps: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self, {"batch": 1, "lr_batch": 1, "shift": 0})
        check_choices(self, "lr_scale", "optimizer", "loss", "interpolation", "bad_images")
        for name in ("held_out", "flip", "erase", "drop_path"):
            value, below = getattr(self, name), name in ("held_out", "drop_path")
            if value is not None and not (0 <= value < 1 if below else 0 <= value <= 1):
                raise InputError(f"{name} is {value}; it must lie in {'[0, 1)' if below else '[0, 1]'}")
        for name in ("mixup", "cutmix", "warmup_epochs"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 < self.muon_lr < float("inf"):
            raise InputError(f"muon_lr is {self.muon_lr}; it must be above 0")
        if not 0 <= self.beta1 < 1:
            raise InputError(f"beta1 is {self.beta1}; it must lie in [0, 1)")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise InputError(f"ema is {self.ema}; the decay must lie in [0, 1), or null for no average")
        if self.warmup_steps and self.warmup_epochs:
            raise InputError("warmup_steps and warmup_epochs say the same; give one of them")
        if self.color_jitter is not None and not self.color_jitter >= 0:
            raise InputError(f"color_jitter is {self.color_jitter}; it must be 0 or more, or null for none")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise InputError(f"crop_scale is {self.crop_scale}; it must be two shares in (0, 1], the smaller first")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < float("inf"):
            raise InputError(f"crop_ratio is {self.crop_ratio}; it must be two numbers above 0, the smaller first")
        if self.split == "test":
            raise InputError("split is test, which is kept for the one score after training; train on another")
        if self.split == "val" and self.held_out == 0:
            raise InputError("split is val, which would also choose the best epoch; set held_out to a share of it")
        if self.freeze_vit and (self.layer_decay != 1 or self.drop_path):
            raise InputError("freeze_vit keeps the blocks as they are; leave layer_decay and drop_path out")
        if self.freeze_vit and self.optimizer == "muon":
            raise InputError("freeze_vit keeps the blocks as they are, and muon trains those alone; choose adamw")
