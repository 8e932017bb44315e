"""From a picture to the tensor a model expects: size, squash or crop, interpolation, mean, std."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.vit.errors import InputError, check_choices
from regard.vit.images import to_rgb

Picture = Image.Image | np.ndarray | Tensor
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a normalised tensor; part of a checkpoint's passport.

    Attributes:
        size: (height, width) in pixels, or None to keep the picture's own size.
        fit: `squash` resizes to `size` whatever the aspect; `crop` resizes the short side and cuts the centre.
        crop_ratio: with `crop`, the share of the resized picture that is kept (224 of 256 is 0.875).
        interpolation: `bilinear` or `bicubic`, antialiased.
        mean, std: per channel, for pixel values in 0..1.
        background: what transparent pixels are composited on, RGB in 0..255.
    """

    size: tuple[int, int] | None = (224, 224)
    fit: Literal["squash", "crop"] = "squash"
    crop_ratio: float = 1.0
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    background: tuple[int, int, int] = (255, 255, 255)

    def __post_init__(self) -> None:
        if self.size is not None:
            check_size("Preprocess.size", self.size)
        check_choices(self, "fit", "interpolation")
        if not 0 < self.crop_ratio <= 1:
            raise InputError(f"Preprocess.crop_ratio is {self.crop_ratio}; it must lie in (0, 1]")
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

    def pixels(self, picture: Picture) -> Tensor:
        """One picture, resized and cut, as uint8 `(C, height, width)`."""
        image = self._cut(_as_pil(picture, self.background))
        if len(self.mean) == 1:
            image = image.convert("L")
        array = torch.from_numpy(np.array(image, dtype=np.uint8))
        return array.permute(2, 0, 1).contiguous() if array.dim() == 3 else array[None]

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 `(B, C, height, width)` to float32 with the model's mean and std, on the same device."""
        mean = torch.tensor(self.mean, device=pixels.device)[:, None, None]
        std = torch.tensor(self.std, device=pixels.device)[:, None, None]
        return (pixels.float() / 255 - mean) / std

    def _cut(self, image: Image.Image) -> Image.Image:
        if self.size is None:
            return image
        height, width = self.size
        filter = _FILTERS[self.interpolation]
        if self.fit == "squash":
            return image if image.size == (width, height) else image.resize((width, height), filter)
        # Rounded down twice, as timm and torchvision do: one pixel more would shift every number.
        tall, wide = int(height / self.crop_ratio), int(width / self.crop_ratio)
        if tall * image.width >= wide * image.height:
            wide = tall * image.width // image.height
        else:
            tall = wide * image.height // image.width
        image = image.resize((wide, tall), filter)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))


def check_size(name: str, size: object) -> None:
    """Raise InputError where `size` is no (height, width) of at least one pixel."""
    pair = isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(side, int) for side in size)
    if not pair or min(size) < 1:  # type: ignore[call-overload]
        raise InputError(f"{name} is {size!r}; it must be (height, width) in pixels")


def _as_pil(picture: Picture, background: tuple[int, int, int]) -> Image.Image:
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
