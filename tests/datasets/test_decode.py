import io

import numpy as np
import pytest
from PIL import Image

from regard.datasets import decode as module
from regard.datasets import open_image
from regard.datasets.decode import decode, decode_reduced, decoder_name, plain_jpeg_size, reduction
from regard.vit.errors import InputError

HEIGHT, WIDTH = 75, 101
KINDS = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "coarse": {"quality": 5},
}


def photograph(mode: str = "RGB") -> Image.Image:
    """Smooth shapes under noise, so that no block is empty and none is all noise."""
    rng = np.random.default_rng(3)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
    noisy = np.asarray(smooth, dtype=np.int64) + rng.integers(-25, 26, (HEIGHT, WIDTH, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **{"quality": 88, **options} if kind == "JPEG" else options)
    return buffer.getvalue()


def opened(data: bytes) -> np.ndarray:
    return np.asarray(open_image(io.BytesIO(data)))


@pytest.fixture(params=["simplejpeg", "torchvision", "pillow"])
def decoder(request, monkeypatch):
    """One decoder after another; the others look as if they were not installed."""
    for name in ("simplejpeg", "torchvision"):
        if name != request.param:
            monkeypatch.setattr(module, f"_{name}", lambda: None)
    module._decoder.cache_clear()
    if decoder_name() != request.param:
        module._decoder.cache_clear()
        pytest.skip(f"{request.param} is not installed, or its libjpeg gives other pixels")
    yield request.param
    module._decoder.cache_clear()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_decoder_gives_the_pixels_of_open_image(kind, mode, decoder):
    data = encoded(photograph(mode), **KINDS[kind])
    assert plain_jpeg_size(data) == (HEIGHT, WIDTH)
    assert np.array_equal(decode(data, "a"), opened(data))


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (8, 8), (17, 16)])
def test_small_and_odd_sizes_are_decoded_alike(size, decoder):
    data = encoded(photograph().resize((size[1], size[0])))
    assert np.array_equal(decode(data, "a"), opened(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_comes_out_upright(orientation, decoder):
    image = photograph()
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, exif=exif)
    pixels = decode(data, "a")
    assert np.array_equal(pixels, opened(data))
    assert (plain_jpeg_size(data) is not None) == (orientation == 1)
    assert pixels.shape[:2] == ((WIDTH, HEIGHT) if orientation > 4 else (HEIGHT, WIDTH))
    plain = decode(encoded(image), "a")
    turned = {1: plain, 3: plain[::-1, ::-1], 6: np.rot90(plain, -1), 8: np.rot90(plain)}
    if orientation in turned:
        assert np.array_equal(pixels, turned[orientation])


@pytest.mark.parametrize("name", ["CMYK", "RGB stored as RGB", "16-bit", "palette", "alpha", "gif", "webp", "tiff"])
def test_every_other_file_is_opened_as_open_image_does(name, decoder):
    image = photograph()
    data = {
        "CMYK": lambda: encoded(photograph("CMYK")),
        "RGB stored as RGB": lambda: encoded(image, keep_rgb=True),
        "16-bit": lambda: encoded(Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 201), "PNG"),
        "palette": lambda: encoded(image.quantize(17), "PNG"),
        "alpha": lambda: encoded(Image.merge("RGBA", (*image.split(), image.getchannel(0))), "PNG"),
        "gif": lambda: encoded(image, "GIF"),
        "webp": lambda: encoded(image, "WEBP"),
        "tiff": lambda: encoded(image, "TIFF"),
    }[name]()
    assert np.array_equal(decode(data, "a"), opened(data))


def test_transparency_falls_on_the_background(decoder):
    clear = encoded(Image.new("RGBA", (3, 2), (0, 0, 0, 0)), "PNG")
    assert (decode(clear, "a", background=(7, 8, 9)) == (7, 8, 9)).all()


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "4:4:4"])
def test_a_file_cut_anywhere_is_an_error_or_has_every_pixel(kind, decoder):
    data = encoded(photograph(), **KINDS[kind])
    whole = opened(data)
    refused = 0
    for end in {*range(0, len(data), 61), len(data) // 2, len(data) - 30, len(data) - 2}:
        try:
            pixels = decode(data[:end], "photo.jpg")
        except InputError:
            refused += 1
        else:
            assert np.array_equal(pixels, whole), f"cut at {end} of {len(data)}"
    assert refused > len(data) // 61 * 0.8


def test_damaged_bytes_give_open_images_pixels_or_an_error(decoder):
    whole = encoded(photograph())
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.integers(2, len(data))] = rng.integers(256)
        try:
            expected = opened(bytes(data))
        except InputError:
            expected = None
        try:
            pixels = decode(bytes(data), "a")
        except InputError:
            pixels = None
        outcomes.add(pixels is None)
        assert (pixels is None) == (expected is None)
        assert pixels is None or np.array_equal(pixels, expected)
    assert outcomes == {True, False}


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "4:4:4"])
def test_reduced_decoding_gives_the_same_picture_smaller(kind, scale, decoder):
    data = encoded(photograph(), **KINDS[kind])
    small = decode_reduced(data, "a", scale)
    assert small.shape == (-(-HEIGHT // scale), -(-WIDTH // scale), 3)
    rows, columns = HEIGHT // scale, WIDTH // scale
    whole = opened(data)[: rows * scale, : columns * scale].reshape(rows, scale, columns, scale, 3).mean((1, 3))
    assert np.abs(small[:rows, :columns] - whole).mean() < 3
    drafted = Image.open(io.BytesIO(data))
    drafted.draft("RGB", (WIDTH // scale, HEIGHT // scale))
    assert np.array_equal(small, np.asarray(drafted.convert("RGB")))


def test_what_cannot_be_reduced_is_decoded_whole(decoder):
    for data in (encoded(photograph(), "PNG"), encoded(photograph("CMYK"))):
        assert np.array_equal(decode_reduced(data, "a", 4), opened(data))


def test_a_truncated_file_is_an_error_at_a_reduced_scale_too(decoder):
    data = encoded(photograph())
    with pytest.raises(InputError, match=r"^half\.jpg: "):
        decode_reduced(data[: len(data) // 2], "half.jpg", 4)


def test_the_scale_leaves_at_least_as_many_pixels_as_are_asked_for():
    assert [reduction((side, side), (224, 224)) for side in (100, 224, 447, 448, 895, 896, 1791, 1792, 9999)] == [
        *(1, 1, 1, 2, 2, 4, 4, 8, 8)
    ]
    assert reduction((10_000, 300), (224, 224)) == 1


def test_a_decoder_of_other_pixels_is_not_used(monkeypatch):
    from simplejpeg import decode_jpeg

    def other(data, size):
        return decode_jpeg(data, "RGB") ^ 1

    monkeypatch.setattr(module, "_simplejpeg", lambda: other)
    monkeypatch.setattr(module, "_torchvision", lambda: None)
    module._decoder.cache_clear()
    data = encoded(photograph())
    assert decoder_name() == "pillow"
    assert np.array_equal(decode(data, "a"), opened(data))
    module._decoder.cache_clear()
