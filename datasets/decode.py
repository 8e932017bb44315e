"""Bytes of a picture -> pixels, as fast as the plain JPEGs of a training set allow and exactly as `open_image`.

Upright 8-bit JPEGs of one or three channels go to the fastest decoder there is: simplejpeg (the extra `fast`), else
torchvision's, else Pillow's. Every other file, and every one that the decoder finds fault with, goes to `open_image`. A
decoder is used only if it gives `open_image`'s pixels on a probe: builds of libjpeg may differ.
"""

import contextlib
import functools
import importlib.util
import io
import math
import sys
from collections.abc import Callable

import numpy as np
import torch
from PIL import ExifTags, Image

from regard.datasets.images import open_bytes, truncation_is_an_error

_MOST_PIXELS = 1 << 26  # beyond it `open_image` knows what to say
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_SCALES = (8, 4, 2)

Decoder = Callable[[bytes, tuple[int, int]], np.ndarray]


def decode(data: bytes, name: str, *, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """uint8 `(height, width, 3)`, upright: the pixels of `open_image`.

    Raises InputError naming the picture where it is truncated, damaged or no picture.
    """
    size, decoder = plain_jpeg_size(data), _decoder()
    if size is not None and decoder is not None:
        with contextlib.suppress(Exception):  # `open_image` finds the pixels, or says why there are none
            pixels = decoder(data, size)
            if pixels.shape == (*size, 3):
                return pixels
    return np.asarray(open_bytes(data, name, background))


def decode_reduced(
    data: bytes, name: str, scale: int, *, background: tuple[int, int, int] = (255, 255, 255)
) -> np.ndarray:
    """The same at 1 / `scale` (1, 2, 4 or 8) of the size, rounded up, if it is a plain JPEG; else at its full size.

    A JPEG holds its pixels as cosines of 8 x 8 blocks; leaving the finer ones out gives the smaller picture at once.
    One of its pixels stands for `scale` x `scale` of the picture; the last of a line may reach beyond it.
    """
    size = plain_jpeg_size(data)
    if scale == 1 or size is None:
        return decode(data, name, background=background)
    small = (math.ceil(size[0] / scale), math.ceil(size[1] / scale))
    by_size = _decoder() if decoder_name() == "simplejpeg" else None  # torchvision's knows one size alone
    for attempt in (lambda: by_size and by_size(data, small), lambda: _drafted(data, size, scale)):
        with contextlib.suppress(Exception):
            pixels = attempt()
            if pixels is not None and pixels.shape == (*small, 3):
                return pixels
    return decode(data, name, background=background)


def reduction(box: tuple[float, float], size: tuple[int, int]) -> int:
    """The largest scale at which a box (height, width) still has at least `size` pixels each way: 1, 2, 4 or 8."""
    for scale in _SCALES:
        if box[0] >= scale * size[0] and box[1] >= scale * size[1]:
            return scale
    return 1


def decoder_name() -> str:
    """What decodes plain JPEGs here: simplejpeg, torchvision or pillow."""
    decoder = _decoder()
    return "pillow" if decoder is None else decoder.__name__.removeprefix("_by_")


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from the markers of a JPEG that needs no turning and no other colours; None for all others."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    place, end = 2, len(data) - 9
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker in _FRAMES:
            precision, components = data[place + 4], data[place + 9]
            height, width = (int.from_bytes(data[place + at : place + at + 2], "big") for at in (5, 7))
            plain = precision == 8 and components in (1, 3) and 0 < height * width <= _MOST_PIXELS
            return (height, width) if plain else None
        if marker in _OTHER_FRAMES or not 0xC0 <= marker <= 0xFE or 0xD0 <= marker <= 0xDA or length < 2:
            return None
        if marker == 0xE1 and not _lies_upright(data):
            return None
        place += 2 + length
    return None


def _lies_upright(data: bytes) -> bool:
    try:
        return _orientation(Image.open(io.BytesIO(data))) in (None, 1)
    except Exception:  # `open_image` decides
        return False


def _orientation(image: Image.Image) -> object:
    return image.getexif().get(ExifTags.Base.Orientation)


@functools.cache
def _decoder() -> Decoder | None:
    """The first decoder that is installed and gives the pixels of `open_image`."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 67, 3), dtype=np.uint8))
    probes = []
    for subsampling in (0, 2):
        buffer = io.BytesIO()
        noise.save(buffer, "JPEG", quality=85, subsampling=subsampling)
        probes.append(buffer.getvalue())
    for find in (_simplejpeg, _torchvision):
        decoder = find()
        if decoder is not None and all(_gives(decoder, probe) for probe in probes):
            return decoder
    return None


def _gives(decoder: Decoder, data: bytes) -> bool:
    expected = np.asarray(open_bytes(data, "probe"))
    try:
        return np.array_equal(decoder(data, expected.shape[:2]), expected)
    except Exception:  # a wheel for another build of torch, an interface of another version
        return False


def _simplejpeg() -> Decoder | None:
    try:
        from simplejpeg import decode_jpeg
    except Exception:  # not installed, or built against another numpy
        return None

    def _by_simplejpeg(data: bytes, size: tuple[int, int]) -> np.ndarray:
        return decode_jpeg(data, "RGB", min_height=size[0], min_width=size[1], min_factor=1, strict=True)

    return _by_simplejpeg


def _torchvision() -> Decoder | None:
    if importlib.util.find_spec("torchvision") is None:
        return None
    before = set(sys.modules)
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except Exception:  # its compiled operators do not load beside this torch
        for module in set(sys.modules) - before:
            if module.split(".")[0] == "torchvision":  # half an import would mislead whoever looks next
                del sys.modules[module]
        return None

    def _by_torchvision(data: bytes, size: tuple[int, int]) -> np.ndarray:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(encoded, ImageReadMode.RGB).permute(1, 2, 0).contiguous().numpy()

    return _by_torchvision


def _drafted(data: bytes, size: tuple[int, int], scale: int) -> np.ndarray:
    with truncation_is_an_error():
        image = Image.open(io.BytesIO(data))
        image.draft("RGB", (max(1, size[1] // scale), max(1, size[0] // scale)))
        return np.asarray(image.convert("RGB"))
