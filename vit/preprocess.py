"""From a picture to the tensor a model expects: size, squash or crop, interpolation, mean, std.

Libraries agree on the idea and differ by a pixel or a rounding; what makes the difference is a field here, so that a
picture becomes the numbers that the owner of the weights gets. `regard.vit.pretrained.processors` sets the fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from regard.vit.errors import InputError, check_choices
from regard.vit.images import to_rgb

Picture = Image.Image | np.ndarray | Tensor
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FILTERS = {filter.name.lower(): filter for filter in Image.Resampling}
_MOST_PIXELS = 1 << 28  # of a picture between resize and crop: a gigabyte


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a normalised tensor; part of a checkpoint's passport.

    Attributes:
        size: (height, width) in pixels, or None to keep the picture's own size.
        fit: `squash` resizes to `size` whatever the aspect; `crop` keeps the aspect, so that the picture just covers
            `size`. The centre is cut out of what is left over.
        crop_ratio: the share of the resized picture that is kept, per side (224 of 256 is 0.875). Above 1 the picture
            is smaller than `size`, and black stands around it.
        interpolation: a filter of Pillow's, by name; all but `nearest` are antialiased.
        mean, std: per channel, for pixel values in 0..1.
        background: what transparent pixels are composited on, RGB in 0..255.
        crop_offset: where the cut begins if an odd number of pixels is left over: at the `even` one of the two middle
            offsets, as in torchvision and timm, or at the smaller one (`floor`), as in transformers.
        resampler: what resizes. `pillow`; `torch` on 8-bit values, as torchvision and the processors of transformers
            called Fast do on tensors; or `torch_float`, rounded to 8 bits at the end, as DINOv3's processor there.
            They differ by a level or two of 255, and more where `bicubic` overshoots at hard edges.
    """

    size: tuple[int, int] | None = (224, 224)
    fit: Literal["squash", "crop"] = "squash"
    crop_ratio: float = 1.0
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    background: tuple[int, int, int] = (255, 255, 255)
    crop_offset: Literal["even", "floor"] = "even"
    resampler: Literal["pillow", "torch", "torch_float"] = "pillow"

    def __post_init__(self) -> None:
        if self.size is not None:
            check_size("Preprocess.size", self.size)
        check_choices(self, "fit", "interpolation", "crop_offset", "resampler")
        if not 0 < self.crop_ratio <= 2:
            raise InputError(f"Preprocess.crop_ratio is {self.crop_ratio}; it must lie in (0, 2]")
        if self.resampler != "pillow" and self.interpolation not in ("bilinear", "bicubic"):
            raise InputError(
                f"Preprocess.resampler {self.resampler!r} has bilinear and bicubic, not {self.interpolation!r};"
                " take 'pillow'"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise InputError(
                f"Preprocess.mean and std have {len(self.mean)} and {len(self.std)} values; both need 1 or 3"
            )
        if min(self.std) <= 0:
            raise InputError(f"Preprocess.std is {self.std}; every value must be above 0")

    def __call__(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """One picture or a list of them to `(B, C, height, width)` float32.

        A picture is a PIL image of any mode, or uint8: an array `(height, width, 3)` or a tensor `(3, height, width)`.
        Raises InputError for other kinds, and for a list whose pictures keep different sizes (`size=None`).
        """
        batch: Sequence[Picture] = pictures if isinstance(pictures, (list, tuple)) else [pictures]  # type: ignore
        if not len(batch):
            raise InputError("there is no picture to preprocess; the list is empty")
        pixels = [self.pixels(picture) for picture in batch]
        if len({p.shape for p in pixels}) > 1:
            raise InputError("pictures of different sizes do not make one batch; preprocess them one by one")
        return self.normalize(torch.stack(pixels))

    def at(self, height: int, width: int) -> "Preprocess":
        """The same to another size, which the whole picture is squashed to: for a graph that was exported for it."""
        return replace(self, size=(height, width), fit="squash", crop_ratio=1.0)

    def pixels(self, picture: Picture) -> Tensor:
        """One picture, resized and cut, as uint8 `(C, height, width)`."""
        image = _as_pil(picture, self.background)
        if self.size is not None:
            image = self._cut(image, *self.size)
        if len(self.mean) == 1:
            image = image.convert("L")
        array = torch.from_numpy(np.array(image, dtype=np.uint8))
        return array.permute(2, 0, 1).contiguous() if array.dim() == 3 else array[None]

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 `(B, C, height, width)` to float32 with the model's mean and std, on the same device."""
        mean = torch.tensor(self.mean, device=pixels.device)[:, None, None]
        std = torch.tensor(self.std, device=pixels.device)[:, None, None]
        return pixels.to(torch.float32, copy=True).div_(255).sub_(mean).div_(std)  # a quarter of the memory

    def _cut(self, image: Image.Image, height: int, width: int) -> Image.Image:
        tall, wide = self._resized(image.height, image.width, height, width)
        if image.size != (wide, tall):
            image = self._resize(image, tall, wide)
        if (tall, wide) == (height, width):
            return image
        top, left = self._offset(tall - height), self._offset(wide - width)
        return image.crop((left, top, left + width, top + height))  # black where it reaches beyond the picture

    def window(self, height: int, width: int) -> tuple[float, float, float, float]:
        """(top, left, bottom, right) of what the tensor shows of a picture of this size, in the picture's pixels.

        Edges, not pixels: 0 and `height` where nothing is cut off, and beyond them where black stands around it.
        """
        if self.size is None:
            return 0.0, 0.0, float(height), float(width)
        tall, wide = self._resized(height, width, *self.size)
        top, left = self._offset(tall - self.size[0]), self._offset(wide - self.size[1])
        down, across = height / tall, width / wide
        return top * down, left * across, (top + self.size[0]) * down, (left + self.size[1]) * across

    def _resized(self, tall_before: int, wide_before: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) before the cut. Each rounding is the owners': one pixel more would shift every number."""
        tall, wide = max(1, int(height / self.crop_ratio)), max(1, int(width / self.crop_ratio))
        if self.fit == "crop" and tall == wide:
            short = min(tall_before, wide_before)
            tall, wide = tall * tall_before // short, wide * wide_before // short
        elif self.fit == "crop":  # timm alone has this case
            shrink = min(tall_before / tall, wide_before / wide)
            tall, wide = round(tall_before / shrink), round(wide_before / shrink)
        if tall * wide > _MOST_PIXELS:
            raise InputError(
                f"a picture of {tall_before} x {wide_before} would be resized to {tall} x {wide} before the crop:"
                " it is too thin; cut it first, or set preprocess.fit='squash'"
            )
        return tall, wide

    def _resize(self, image: Image.Image, tall: int, wide: int) -> Image.Image:
        if self.resampler == "pillow":
            return image.resize((wide, tall), _FILTERS[self.interpolation])
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        if self.resampler == "torch_float":
            pixels = pixels.float()
        pixels = functional.interpolate(pixels, (tall, wide), mode=self.interpolation, antialias=True)
        if self.resampler == "torch_float":
            pixels = pixels.round().clamp(0, 255).byte()
        return Image.fromarray(pixels[0].permute(1, 2, 0).contiguous().numpy())

    def _offset(self, spare: int) -> int:
        """Where the cut begins, with so many pixels to spare; below 0 so many are missing."""
        if self.crop_offset == "floor" and self.resampler == "pillow":
            return spare // 2
        if self.crop_offset == "floor" or spare < 0:
            return int(spare / 2)
        return round(spare / 2)


def check_size(name: str, size: object) -> None:
    """Raise InputError where `size` is no (height, width) of at least one pixel."""
    pair = isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(side, int) for side in size)
    if not pair or min(size) < 1:  # type: ignore[call-overload]
        raise InputError(f"{name} is {size!r}; it must be (height, width) in pixels")


def _as_pil(picture: Picture, background: tuple[int, int, int]) -> Image.Image:
    if isinstance(picture, (Tensor, np.ndarray)) and 0 in picture.shape:
        raise InputError(f"a picture of shape {tuple(picture.shape)} has no pixels")
    if isinstance(picture, Image.Image):
        return to_rgb(picture, background)
    if isinstance(picture, Tensor):
        if picture.dtype == torch.uint8 and picture.dim() == 3 and picture.shape[0] == 3:
            return Image.fromarray(picture.permute(1, 2, 0).contiguous().cpu().numpy())
    elif isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3:
        return Image.fromarray(picture)
    kind = f"{getattr(picture, 'dtype', '')} {tuple(getattr(picture, 'shape', ()))} {type(picture).__name__}".strip()
    raise InputError(
        f"a picture must be a PIL image, a uint8 array (height, width, 3) or a uint8 tensor (3, height, width), "
        f"not {kind}; open files with regard.datasets.open_image"
    )
