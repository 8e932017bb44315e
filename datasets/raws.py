"""A batch of pictures not yet cut to one size: how a view gets its pixels, wherever they come from."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from regard.datasets.decode import decode, decode_reduced, plain_jpeg_size, reduction
from regard.vit import Preprocess
from regard.vit.errors import InputError
from regard.vit.images import to_rgb

RawPicture = Image.Image | np.ndarray | bytes | InputError


class Raws(Protocol):
    """B pictures of any sizes, each with `channels` channels.

    Attributes:
        sizes: (height, width) of each, in pixels, upright.
        channels: of what `cut` and `fitted` return.
    """

    sizes: list[tuple[int, int]]
    channels: int

    def __len__(self) -> int: ...

    def cut(
        self, boxes: Tensor, size: tuple[int, int], interpolation: str = "bicubic", rows: Sequence[int] | None = None
    ) -> Tensor:
        """Cut one box out of each picture and resize it, antialiased, as Pillow's `resize(size, filter, box)` does.

        Args:
            boxes: float64 `(B, 4)`: top, left, height, width, in pixels of each picture.
            size: (height, width) of what comes out.
            interpolation: a filter of Pillow's, by name.
            rows: which pictures the boxes belong to; by default all, in order.

        Returns uint8 `(B, C, *size)`.
        """

    def fitted(self, preprocess: Preprocess) -> Tensor:
        """Exactly `preprocess.pixels` of each picture: uint8 `(B, C, height, width)`."""


class ArrayRaws:
    """Pictures of one size, as a tensor; they are cut a whole batch at a time.

    Args:
        pixels: uint8 `(B, C, height, width)` with one or three channels.
        channels: 1 or 3; by default those of `pixels`. Grey becomes three equal channels, RGB the grey of Pillow's `L`.
    """

    def __init__(self, pixels: Tensor, channels: int | None = None) -> None:
        self.pixels = pixels
        self.sizes = [(pixels.shape[2], pixels.shape[3])] * len(pixels)
        self.channels = pixels.shape[1] if channels is None else channels

    def __len__(self) -> int:
        return len(self.pixels)

    def cut(
        self, boxes: Tensor, size: tuple[int, int], interpolation: str = "bicubic", rows: Sequence[int] | None = None
    ) -> Tensor:
        """As `Raws.cut`. A filter near a box's edge also reads the pixels beyond it."""
        from regard.datasets.augment.geometry import resample

        pixels = self.pixels if rows is None else self.pixels[torch.as_tensor(rows, dtype=torch.long)]
        return with_channels(resample(pixels, boxes, size, interpolation), self.channels)

    def fitted(self, preprocess: Preprocess) -> Tensor:
        """As `Raws.fitted`."""
        height, width = self.pixels.shape[2:]
        if preprocess.window(height, width) == (0, 0, height, width) and preprocess.size in (None, (height, width)):
            return with_channels(self.pixels, len(preprocess.mean))
        images = with_channels(self.pixels, 3).permute(0, 2, 3, 1).contiguous().numpy()
        return torch.stack([preprocess.pixels(Image.fromarray(image)) for image in images])


class FileRaws:
    """Pictures of any sizes; JPEGs are decoded when they are first cut.

    Args:
        pictures: PIL images, uint8 arrays `(height, width, 3)`, encoded files, or the InputError that kept one from
            being read.
        names: of the pictures, for messages.
        channels: 3, or 1 for grey.
        background: what transparent pixels are composited on.
        reduced: `cut` may decode a JPEG at 1/2, 1/4 or 1/8 of its size where a box keeps at least as many pixels as
            are asked for. That is quicker, and its pixels are others: a mean over a block instead of the filter.
        lenient: note a picture that cannot be decoded in `bad`, and give zeros for it, instead of raising InputError.
    """

    def __init__(
        self,
        pictures: Sequence[RawPicture],
        names: Sequence[str] | None = None,
        *,
        channels: int = 3,
        background: tuple[int, int, int] = (255, 255, 255),
        reduced: bool = False,
        lenient: bool = False,
    ) -> None:
        self.names = [f"picture {row}" for row in range(len(pictures))] if names is None else names
        self.channels, self.background = channels, background
        self.reduced, self.lenient = reduced, lenient
        self.bad: dict[int, str] = {}
        self.sizes: list[tuple[int, int]] = []
        self._encoded: list[bytes] = []
        self._decoded: list[np.ndarray | None] = []
        self._scales = [1] * len(pictures)
        for row, picture in enumerate(pictures):
            self._add(row, picture)

    def __len__(self) -> int:
        return len(self.sizes)

    def cut(
        self, boxes: Tensor, size: tuple[int, int], interpolation: str = "bicubic", rows: Sequence[int] | None = None
    ) -> Tensor:
        """As `Raws.cut`.

        A box of whole pixels is cut out first, as by torchvision's RandomResizedCrop, so that no filter reads beyond
        it. Bilinear and bicubic then run in torch's 8-bit kernels, several times as fast as Pillow's and within one
        level of 255 of them, or two or three where bicubic overshoots at hard edges. All else is Pillow's own.
        """
        chosen = range(len(self)) if rows is None else rows
        out = torch.zeros(len(boxes), self.channels, *size, dtype=torch.uint8)
        for place, (row, box) in enumerate(zip(chosen, boxes.tolist(), strict=True)):
            scale = reduction((box[2], box[3]), size) if self.reduced else 1
            pixels = self._pixels(row, scale)
            if pixels is None:
                continue
            if self._scales[row] > 1:
                box = _whole_box([side / self._scales[row] for side in box])
            piece = _resized(pixels, box, size, interpolation)
            out[place] = with_channels(piece[None], self.channels)[0]
        return out

    def fitted(self, preprocess: Preprocess) -> Tensor:
        """As `Raws.fitted`. Raises InputError where pictures that keep their own size differ in it."""
        fitted: list[Tensor | None] = []
        for row in range(len(self)):
            pixels = self._pixels(row, 1)
            fitted.append(None if pixels is None else preprocess.pixels(Image.fromarray(pixels)))
        shapes = {tuple(pixels.shape) for pixels in fitted if pixels is not None}
        if len(shapes) > 1:
            raise InputError("pictures of different sizes do not make one batch; set a size for them all")
        shape = shapes.pop() if shapes else (len(preprocess.mean), *(preprocess.size or (1, 1)))
        return torch.stack([torch.zeros(shape, dtype=torch.uint8) if pixels is None else pixels for pixels in fitted])

    def _add(self, row: int, picture: RawPicture) -> None:
        size, decoded = None, None
        try:
            if isinstance(picture, InputError):
                raise picture
            if isinstance(picture, bytes):
                size = plain_jpeg_size(picture)
                if size is None:  # which way up it is may stand behind its pixels
                    decoded = decode(picture, self.names[row], background=self.background)
            elif isinstance(picture, np.ndarray):
                decoded = picture
            else:
                decoded = np.asarray(to_rgb(picture, self.background))
        except InputError as error:
            self._failed(row, error)
        self._encoded.append(picture if isinstance(picture, bytes) else b"")
        self._decoded.append(decoded)
        self.sizes.append(size or ((1, 1) if decoded is None else decoded.shape[:2]))

    def _pixels(self, row: int, scale: int) -> np.ndarray | None:
        """The picture at 1 / `scale` of its size or larger, `(height, width, 3)`; None if it is bad."""
        if row in self.bad:
            return None
        kept = self._decoded[row]
        if kept is not None and self._scales[row] <= scale:
            return kept
        try:
            pixels = decode_reduced(self._encoded[row], self.names[row], scale, background=self.background)
            if scale == 1 and pixels.shape[:2] != self.sizes[row]:
                raise InputError(f"{self.names[row]}: its header tells another size than its pixels; replace it")
        except InputError as error:
            self._failed(row, error)
            return None
        self._decoded[row], self._scales[row] = pixels, 1 if pixels.shape[:2] == self.sizes[row] else scale
        return pixels

    def _failed(self, row: int, error: InputError) -> None:
        if not self.lenient:
            raise error
        self.bad[row] = str(error)


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """uint8 `(B, C, height, width)` of one or three channels as grey or RGB, as Pillow converts them."""
    if pixels.shape[1] == channels:
        return pixels
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1).contiguous()
    red, green, blue = pixels.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).byte()[:, None]


def _whole_box(box: list[float]) -> list[float]:
    """The nearest box of whole pixels, at least one each way."""
    top, left = round(box[0]), round(box[1])
    return [top, left, max(round(box[0] + box[2]) - top, 1), max(round(box[1] + box[3]) - left, 1)]


def _resized(pixels: np.ndarray, box: Sequence[float], size: tuple[int, int], interpolation: str) -> Tensor:
    """A box of `(height, width, 3)` as `(3, *size)`."""
    top, left, height, width = box
    whole = all(side == int(side) for side in box)
    if interpolation in ("bilinear", "bicubic") and whole:
        view = pixels[int(top) : int(top + height), int(left) : int(left + width)]
        piece = torch.from_numpy(view if view.flags.writeable else view.copy()).permute(2, 0, 1)[None]
        if piece.shape[2:] == size:
            return piece[0]
        return functional.interpolate(piece, size, mode=interpolation, antialias=True)[0]
    image = Image.fromarray(pixels)
    filters = {filter.name.lower(): filter for filter in Image.Resampling}
    if interpolation not in filters:
        raise InputError(f"interpolation is {interpolation!r}; choose one of {', '.join(filters)}")
    image = image.resize((size[1], size[0]), filters[interpolation], (left, top, left + width, top + height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
