"""3-Augment of DeiT III (Touvron et al., 2022, arXiv:2204.07118): gray, solarized or blurred, then a light jitter."""

from torch import Tensor

from regard.datasets.augment.blur import blur
from regard.datasets.augment.colour import grayscale, jitter, solarize
from regard.datasets.augment.dice import Dice


def three_augment(pixels: Tensor, dice: Dice, name: str = "three augment", strength: float = 0.3) -> Tensor:
    """Each picture gets exactly one of the three, then brightness, contrast and saturation within ± `strength`.

    Args:
        pixels: uint8 `(B, C, height, width)`. Of one channel, gray leaves a picture as it is.
        dice: the random numbers of the batch.
        name: what the draws are for; another name draws others.
        strength: of the jitter.

    Returns a new uint8 tensor.
    """
    which = dice.integers(f"{name} which", 3)[:, 0]
    pixels = grayscale(pixels, which == 0)
    pixels = solarize(pixels, which == 1)
    pixels = blur(pixels, dice.between(f"{name} blur", 0.1, 2.0)[:, 0], which == 2)
    return jitter(pixels, dice, f"{name} jitter", (strength, strength, strength, 0.0))
