"""From a recipe to what is trained: the backbone, its module, and the pictures."""

import dataclasses
import sys
from typing import Any

import torch

from regard.datasets.augment.views import CentreView, CropsView
from regard.datasets.pictures import PictureSet, load_pictures
from regard.train.distill.auto import derived
from regard.train.distill.knn import ASKING, KnnScore, looked_at
from regard.train.distill.module import DistillModule
from regard.train.distill.network import initialise_as_dino
from regard.train.distill.recipe import DistillRecipe
from regard.train.pictures import PictureBatch, PictureBatches, PictureData, require_channels
from regard.train.recompute import recompute_layers
from regard.train.starting import started
from regard.vit import ViT
from regard.vit.config import preset_config
from regard.vit.errors import InputError

_LOCAL = 3 / 7  # 96 of 224 px, as in DINO


class DistillData(PictureData):
    """Crops for two networks, and pictures for the k-NN to look at."""

    def __init__(self, view: CropsView, channels: int, **options: Any):
        super().__init__(**options)
        self.view, self.channels = view, channels

    def example(self) -> PictureBatch:
        """A blank training batch, for its shapes."""
        rows = torch.zeros(self.batch, dtype=torch.long)
        sizes = [self.view.global_size] * 2 + [self.view.local_size] * self.view.local_crops
        pixels = [torch.zeros(self.batch, self.channels, *size, dtype=torch.uint8) for size in sizes]
        return PictureBatch(pixels, rows - 1, rows == 0, [""] * self.batch, rows, rows, [])


def prepare(recipe: DistillRecipe) -> tuple[DistillModule, DistillData, list[str]]:
    """The module and the data of a recipe, and the reasons of what was derived for it."""
    pictures = pictures_of(recipe)
    backbone = build(recipe)
    preprocess = backbone.preprocess
    if preprocess.size is None:
        raise InputError("training needs pictures of one size: set vit.preprocess.size")
    require_channels(backbone)
    recipe, reasons = derived(with_sizes(recipe, backbone), len(pictures), pictures_per_step(recipe))
    common: dict[str, Any] = {"channels": backbone.config.channels, "background": preprocess.background}
    knn, held_out = None, None
    known = looked_at(pictures, recipe.knn_images, recipe.seed) if recipe.knn_every else None
    if known is not None:
        knn = KnnScore(len(known))
        bad_images: Any = "error" if recipe.bad_images == "error" else "skip"
        held_out = PictureBatches(
            known, CentreView(preprocess), seed=recipe.seed, bad_images=bad_images, keep=recipe.workers == 0, **common
        )
    view = crops_view(recipe, backbone)
    training = PictureBatches(
        pictures.unlabelled(),
        view,
        seed=recipe.seed,
        bad_images=recipe.bad_images,
        keep=recipe.workers == 0,
        **common,
    )
    data = DistillData(
        view,
        backbone.config.channels,
        training=training,
        held_out=held_out,
        batch=recipe.batch,
        seed=recipe.seed,
        workers=recipe.workers,
    )
    module = DistillModule(backbone, recipe, knn)
    if recipe.gradient_checkpointing:
        recompute_layers(module.student)
    return module, data, reasons


def build(recipe: DistillRecipe) -> ViT:
    """The student's backbone: of a preset with DINO's fresh weights, or pretrained."""
    if recipe.pretrained is not None:
        vit = started(recipe.pretrained, recipe.vit, drop_path=recipe.drop_path, classes=0)
        return vit.as_encoder().train()
    vit = ViT(preset_config(recipe.model, **{**recipe.vit, "drop_path": recipe.drop_path, "classes": 0}))
    initialise_as_dino(vit)
    return vit


def with_sizes(recipe: DistillRecipe, backbone: ViT) -> DistillRecipe:
    """The recipe with both sizes of its crops, in whole patches. Raises InputError for sizes that are not."""
    patch = backbone.config.patch_size
    size = recipe.global_size or backbone.config.image_size
    height, width = (max(1, round(side * _LOCAL / patch)) * patch for side in size)
    local = recipe.local_size or (height, width)
    for name, sides in {"global_size": size, "local_size": local}.items():
        if sides[0] % patch or sides[1] % patch:
            raise InputError(f"{name} is {sides}; it must be a multiple of the patches of {patch} px")
    if local[0] > size[0] or local[1] > size[1]:
        raise InputError(f"local_size {local} is larger than the global crops of {size}; give a smaller one")
    return dataclasses.replace(recipe, global_size=size, local_size=local)


def crops_view(recipe: DistillRecipe, backbone: ViT) -> CropsView:
    """The crops of a recipe whose sizes are known."""
    assert recipe.global_size is not None
    assert recipe.local_size is not None
    first, second, local = recipe.blur_chances or (None, None, None)
    return CropsView(
        global_size=recipe.global_size,
        local_size=recipe.local_size,
        local_crops=recipe.local_crops,
        global_scale=recipe.global_scale,
        local_scale=recipe.local_scale,
        interpolation=backbone.preprocess.interpolation,
        flip=recipe.flip,
        color_jitter=recipe.color_jitter,
        jitter=recipe.jitter,
        grayscale=recipe.grayscale,
        blur=recipe.blur,
        blur_first=first,
        blur_second=second,
        blur_local=local,
        solarize=recipe.solarize,
    )


def pictures_of(recipe: DistillRecipe) -> PictureSet:
    """The training pictures, with the labels that there are."""
    try:
        return load_pictures(recipe.data, "train")
    except InputError as no_labels:
        try:
            return load_pictures(recipe.data, "train", labelled=False)
        except InputError as error:
            raise error from no_labels


def pictures_per_step(recipe: DistillRecipe) -> int:
    """Pictures of an optimizer step on all devices, as far as the recipe says how many there are."""
    devices = recipe.trainer.get("devices", 1)
    accumulated = recipe.trainer.get("accumulate_grad_batches", 1)
    many = devices if isinstance(devices, int) and devices > 0 else 1
    return recipe.batch * many * (accumulated if isinstance(accumulated, int) and accumulated > 0 else 1)


def tell(module: DistillModule, pictures: PictureSet, reasons: list[str]) -> None:
    """Say what was derived and what is looked at, on stderr."""
    for reason in reasons:
        print(f"auto: {reason}", file=sys.stderr)
    looks = "no labels to look at; the last epoch is the model"
    if module.knn is not None:
        count = module.knn.size // ASKING
        looks = f"k-NN of {count} labelled pictures in {module.knn.size - count} others chooses the best epoch"
    print(f"training on {len(pictures)} pictures without their labels; {looks}", file=sys.stderr, flush=True)
