"""Settings that depend on how many images there are, for those left at null.

DINO's own are for 1.28 million images. On small sets they do not descend: more prototypes than the images can fill, a
teacher that hardly moves in the few steps there are, and targets too soft to follow. What worked there is few
prototypes, a faster teacher, sharper targets and a longer freeze of the last layer. Between 20,000 images and ImageNet
temperature and momentum go with the logarithm of the number.
"""

import dataclasses
import math

from regard.train.distill.recipe import DistillRecipe

SMALL, IMAGENET = 20_000, 1_281_167
# Up to so many images, so many prototypes.
_PROTOTYPES = ((20_000, 1024), (50_000, 2048), (100_000, 4096), (200_000, 16_384), (500_000, 32_768))
_MOST_PROTOTYPES = 65_536
_AVERAGES = 20  # of the teacher, in turn, during a run at least
_FREEZE_STEPS = 1250  # an epoch of ImageNet in batches of 1024


def derived(recipe: DistillRecipe, images: int, batch: int) -> tuple[DistillRecipe, list[str]]:
    """`recipe` with a value for every null, and a line of reasons for each.

    `images` are the training images, `batch` those of one optimizer step on all devices.
    """
    steps = max(1, images // batch)  # of an epoch
    place = min(max(math.log(images / SMALL) / math.log(IMAGENET / SMALL), 0.0), 1.0)
    small = f"{images:,} images are {place:.0%} of the way from {SMALL:,} to ImageNet"
    prototypes = next((count for limit, count in _PROTOTYPES if images <= limit), _MOST_PROTOTYPES)
    peak = recipe.tau_teacher if recipe.tau_teacher is not None else round(0.02 + 0.05 * place, 4)
    freeze = min(max(1.0, _FREEZE_STEPS / steps), 0.1 * recipe.epochs)
    momentum = round(0.99 + 0.006 * place, 5)
    why_momentum = f"{small}: the fewer, the faster the teacher follows"
    if (short := 1.0 - _AVERAGES / (steps * recipe.epochs)) < momentum:
        momentum = round(max(short, 0.9), 5)
        why_momentum = f"the teacher averages over a twentieth of the run's {steps * recipe.epochs} steps"
    warmup = min(10.0, 0.1 * recipe.epochs)
    tau_warmup = float(min(30, max(1, round(0.3 * recipe.epochs))))
    made = {
        "prototypes": (prototypes, f"for {images:,} images: so many that each can be some pictures' own"),
        "tau_teacher": (peak, f"{small}: the fewer, the sharper"),
        "tau_teacher_start": (min(peak, 0.04), "sharp at first, at most 0.04"),
        "tau_warmup_epochs": (tau_warmup, "30 % of the run, at most 30"),
        "momentum": (momentum, why_momentum),
        "freeze_epochs": (round(freeze, 4), f"{_FREEZE_STEPS} steps, at least an epoch, at most 10 % of the run"),
        "warmup_epochs": (round(warmup, 4), "10 % of the run, at most 10"),
    }
    open_ = {name: what for name, what in made.items() if getattr(recipe, name) is None}
    reasons = [f"{name} {value}: {why}" for name, (value, why) in open_.items()]
    return dataclasses.replace(recipe, **{name: value for name, (value, _) in open_.items()}), reasons  # type: ignore
