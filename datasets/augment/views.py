"""What a task sees of a picture: its centre when it is scored, one augmented crop, or the many crops of DINO.

A view takes the pictures of a batch (`regard.datasets.raws.Raws`) and its dice; it returns uint8 on the CPU. What a
sample becomes depends on nothing else: neither on the rest of its batch, nor on its place in it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regard.datasets.augment import colour
from regard.datasets.augment.blur import Kernel, blur
from regard.datasets.augment.dice import Dice
from regard.datasets.augment.geometry import crop_boxes, erase, erase_boxes, flip, shift, whole_boxes
from regard.datasets.augment.rand_augment import fill_of, parse_rand_augment, rand_augment
from regard.datasets.augment.three_augment import three_augment
from regard.datasets.raws import Raws
from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import Interpolation, Preprocess, check_size

Range = tuple[float, float]


@dataclass(frozen=True)
class CentreView:
    """The picture as its model sees it outside of training.

    Attributes:
        preprocess: the model's.
    """

    preprocess: Preprocess

    def __call__(self, raws: Raws, dice: Dice) -> Tensor:
        """B pictures to uint8 `(B, C, height, width)`; nothing is random."""
        return raws.fitted(self.preprocess)


@dataclass(frozen=True)
class TrainView:
    """One augmented crop of a picture, for supervised training; timm's order: crop, flip, colours, erasing.

    Attributes:
        size: (height, width) of the crop, in pixels.
        crop_scale: the share of the picture's area that a random crop has; None squashes the whole picture to `size`.
        crop_ratio: width / height of a random crop.
        interpolation: of the crop, and (bilinear or bicubic) of what RandAugment rotates and shears.
        flip: the probability of a mirrored picture.
        shift: by how many pixels at most a picture is moved in each direction; its edge is repeated.
        color_jitter: brightness, contrast, saturation and, as a fourth number, hue; one number stands for the first
            three (timm's). None leaves colours alone.
        rand_augment: RandAugment in timm's spelling, such as `rand-m9-n2-mstd0.5-inc1`.
        three_augment: DeiT III's gray, solarize or blur, with its jitter of 0.3.
        erase: the probability of a rectangle to be erased.
        erase_area: its share of the picture.
        erase_ratio: its height / width.
        erase_with: `noise`, uniform over the levels, or the colour `fill`.
        fill: what an erased rectangle has, and what comes in where RandAugment moves a picture: by default the mean
            colour of ImageNet. Of a gray picture it is the mean of the three.
    """

    size: tuple[int, int]
    crop_scale: Range | None = (0.08, 1.0)
    crop_ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"
    flip: float = 0.5
    shift: int = 0
    color_jitter: float | tuple[float, ...] | None = None
    rand_augment: str | None = None
    three_augment: bool = False
    erase: float = 0.0
    erase_area: Range = (0.02, 1 / 3)
    erase_ratio: Range = (0.3, 1 / 0.3)
    erase_with: Literal["noise", "fill"] = "noise"
    fill: tuple[int, ...] = (124, 116, 104)

    def __post_init__(self) -> None:
        check_size("TrainView.size", self.size)
        check_choices(self, "interpolation", "erase_with")
        _check_ranges(self, "crop_scale", "crop_ratio", "erase_area", "erase_ratio")
        _check_probabilities(self, "flip", "erase")
        if self.shift < 0:
            raise InputError(f"TrainView.shift is {self.shift}; it must be at least 0")
        if len(self.fill) not in (1, 3) or not all(0 <= level <= 255 for level in self.fill):
            raise InputError(f"TrainView.fill is {self.fill}; give one or three levels in 0 … 255")
        if self.rand_augment is not None:
            parse_rand_augment(self.rand_augment)
        self._strengths()

    def __call__(self, raws: Raws, dice: Dice) -> Tensor:
        """B pictures to uint8 `(B, C, *size)`."""
        boxes = whole_boxes(raws.sizes)
        if self.crop_scale is not None:
            boxes = crop_boxes(raws.sizes, dice, "crop", self.crop_scale, self.crop_ratio)
        pixels = raws.cut(boxes, self.size, self.interpolation)
        if self.flip:
            pixels = flip(pixels, dice.happens("flip", self.flip))
        if self.shift:
            steps = dice.integers("shift", 2 * self.shift + 1, 2) - self.shift
            pixels = shift(pixels, steps[:, 0], steps[:, 1])
        if self.three_augment:
            pixels = three_augment(pixels, dice)
        if self.rand_augment is not None:
            smooth = self.interpolation if self.interpolation in ("bilinear", "bicubic") else "bicubic"
            pixels = rand_augment(pixels, dice, self.rand_augment, fill=self.fill, interpolation=smooth)
        if any(self._strengths()):
            pixels = colour.jitter(pixels, dice, "color jitter", self._strengths())
        return self._erased(pixels, dice) if self.erase else pixels

    def _strengths(self) -> tuple[float, float, float, float]:
        given = self.color_jitter
        if given is None:
            return 0.0, 0.0, 0.0, 0.0
        strengths = (given,) * 3 if isinstance(given, (int, float)) else tuple(given)
        return _jitter_of("TrainView.color_jitter", strengths)

    def _erased(self, pixels: Tensor, dice: Dice) -> Tensor:
        rows = dice.happens("erase", self.erase).nonzero()[:, 0]
        own = dice.rows(rows)
        boxes = erase_boxes(self.size, own, "erase", self.erase_area, self.erase_ratio)
        chosen = pixels[rows]
        if self.erase_with == "noise":
            fill = own.levels("erase noise", chosen[:1].numel()).reshape(chosen.shape) if len(rows) else chosen
        else:
            fill = torch.tensor(fill_of(self.fill, pixels.shape[1]), dtype=torch.uint8)[:, None, None]
        erased = pixels.clone()
        erased[rows] = erase(chosen, boxes, fill)
        return erased


@dataclass(frozen=True)
class CropsView:
    """The crops of DINO: two large ones that both networks see, and small ones for the student alone.

    Every choice is drawn for each crop apart. As published with DINO v1 (Caron et al., 2021, arXiv:2104.14294):
    crop, flip, colour jitter, grayscale, blur, and solarize on the second large crop.

    Attributes:
        global_size, local_size: (height, width) of the large and the small crops, in pixels.
        local_crops: how many small ones.
        global_scale, local_scale: the share of the picture's area that they have.
        crop_ratio: width / height of all crops.
        interpolation: of all crops.
        flip: the probability of a mirrored crop.
        color_jitter: strengths of brightness, contrast, saturation and hue.
        jitter: the probability of the colour jitter.
        grayscale: the probability of a gray crop.
        blur: `v1` blurs as Pillow does, with probability 1.0 on the first large crop, 0.1 on the second and 0.5 on
            small ones. `v2` is what the code released with DINOv2 and DINOv3 does: a kernel of nine taps, and, since
            it inverts the probabilities, 0.0, 0.9 and 0.5.
        blur_first, blur_second, blur_local: other probabilities than those; None keeps them.
        blur_sigma: the range of the blur's sigma, in pixels.
        solarize: the probability of a solarized second large crop.
    """

    global_size: tuple[int, int] = (224, 224)
    local_size: tuple[int, int] = (96, 96)
    local_crops: int = 8
    global_scale: Range = (0.4, 1.0)
    local_scale: Range = (0.05, 0.4)
    crop_ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"
    flip: float = 0.5
    color_jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter: float = 0.8
    grayscale: float = 0.2
    blur: Literal["v1", "v2"] = "v1"
    blur_first: float | None = None
    blur_second: float | None = None
    blur_local: float | None = None
    blur_sigma: Range = (0.1, 2.0)
    solarize: float = 0.2

    def __post_init__(self) -> None:
        check_size("CropsView.global_size", self.global_size)
        check_size("CropsView.local_size", self.local_size)
        check_choices(self, "interpolation", "blur")
        _check_ranges(self, "global_scale", "local_scale", "crop_ratio", "blur_sigma")
        _check_probabilities(self, "flip", "jitter", "grayscale", "blur_first", "blur_second", "blur_local", "solarize")
        _jitter_of("CropsView.color_jitter", tuple(self.color_jitter))
        if self.local_crops < 0:
            raise InputError(f"CropsView.local_crops is {self.local_crops}; it must be at least 0")

    @property
    def blurs(self) -> tuple[float, float, float]:
        """The probability of a blur: first large crop, second, small ones."""
        published = (1.0, 0.1, 0.5) if self.blur == "v1" else (0.0, 0.9, 0.5)
        own = (self.blur_first, self.blur_second, self.blur_local)
        first, second, local = (was if now is None else now for was, now in zip(published, own, strict=True))
        return first, second, local

    def __call__(self, raws: Raws, dice: Dice) -> list[Tensor]:
        """B pictures to 2 + `local_crops` crops, uint8: two of `(B, C, *global_size)`, then `(B, C, *local_size)`."""
        first, second, local = self.blurs
        crops = self._crops(
            raws,
            dice,
            "global",
            self.global_size,
            self.global_scale,
            blurs=(first, second),
            inverts=(0.0, self.solarize),
        )
        if not self.local_crops:
            return crops
        every = self.local_crops
        return crops + self._crops(
            raws, dice, "local", self.local_size, self.local_scale, blurs=(local,) * every, inverts=(0.0,) * every
        )

    def _crops(
        self,
        raws: Raws,
        dice: Dice,
        kind: str,
        size: tuple[int, int],
        scale: Range,
        *,
        blurs: tuple[float, ...],
        inverts: tuple[float, ...],
    ) -> list[Tensor]:
        """Crops of one size, all worked on as one batch."""
        batch, count = len(raws), len(blurs)
        dice = dice.each([f"{kind} {number}" for number in range(count)])
        boxes = crop_boxes(list(raws.sizes) * count, dice, "crop", scale, self.crop_ratio)
        pixels = raws.cut(boxes, size, self.interpolation, rows=list(range(batch)) * count)
        pixels = flip(pixels, dice.happens("flip", self.flip))
        pixels = colour.jitter(pixels, dice, "jitter", self.color_jitter, dice.happens("jitter", self.jitter))
        pixels = colour.grayscale(pixels, dice.happens("grayscale", self.grayscale))
        kernel: Kernel = "pillow" if self.blur == "v1" else "kernel 9"
        blurred = dice.uniform("blur")[:, 0] < torch.tensor(blurs).double().repeat_interleave(batch)
        pixels = blur(pixels, dice.between("sigma", *self.blur_sigma)[:, 0], blurred, kernel)
        inverted = dice.uniform("solarize")[:, 0] < torch.tensor(inverts).double().repeat_interleave(batch)
        return list(colour.solarize(pixels, inverted).split(batch))


def _check_ranges(view: Any, *names: str) -> None:
    for name in names:
        value = getattr(view, name)
        if value is None:
            continue
        if len(value) != 2 or not 0 < value[0] <= value[1]:
            raise InputError(f"{type(view).__name__}.{name} is {value}; it must be (least, most), both above 0")
        if name.endswith(("scale", "area")) and value[1] > 1:
            raise InputError(f"{type(view).__name__}.{name} is {value}; a share of the picture is at most 1")


def _check_probabilities(view: Any, *names: str) -> None:
    for name in names:
        value = getattr(view, name)
        if value is not None and not 0 <= value <= 1:
            raise InputError(f"{type(view).__name__}.{name} is {value}; a probability lies in 0 … 1")


def _jitter_of(name: str, strengths: tuple[float, ...]) -> tuple[float, float, float, float]:
    if len(strengths) not in (3, 4) or min(strengths) < 0 or (len(strengths) == 4 and strengths[3] > 0.5):
        raise InputError(
            f"{name} is {strengths}; give brightness, contrast, saturation (each at least 0) and hue (0 … 0.5)"
        )
    brightness, contrast, saturation, hue = (*strengths, 0.0)[:4]
    return brightness, contrast, saturation, hue
