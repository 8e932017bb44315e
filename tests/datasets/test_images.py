import io
import pickle
import random
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from regard.datasets import open_image
from regard.vit.errors import InputError

HEIGHT, WIDTH = 24, 37
FORMATS = {
    "png": ("PNG", {}),
    "palette.png": ("PNG", {}),
    "jpg": ("JPEG", {"quality": 90}),
    "progressive.jpg": ("JPEG", {"progressive": True}),
    "gif": ("GIF", {}),
    "tiff": ("TIFF", {}),
    "deflate.tiff": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "webp": ("WEBP", {"lossless": True}),
    "bmp": ("BMP", {}),
}


@pytest.fixture(scope="module")
def encoded() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    files = {}
    for name, (file_format, options) in FORMATS.items():
        image = Image.fromarray(noise)
        if "palette" in name:
            image = image.quantize(200)
        buffer = io.BytesIO()
        image.save(buffer, file_format, **options)
        files[name] = buffer.getvalue()
    return files


def message(source, **options) -> str:
    with pytest.raises(InputError) as caught:
        open_image(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def png_header(height: int, width: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"never decoded") + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", FORMATS)
def test_an_opened_image_is_loaded_rgb_and_its_file_is_closed(name, encoded, tmp_path):
    path = tmp_path / name
    path.write_bytes(encoded[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        image = open_image(path)
        path.unlink()
    assert image.mode == "RGB"
    assert image.size == (WIDTH, HEIGHT)
    again = pickle.loads(pickle.dumps(image))  # what a worker process sends
    assert again.tobytes() == image.tobytes()
    assert open_image(io.BytesIO(encoded[name])).tobytes() == image.tobytes()


def test_background_and_text_paths_are_passed_on(tmp_path):
    Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(tmp_path / "clear.png", background=(1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)


def test_missing_file_folder_and_odd_paths_are_named(tmp_path):
    assert message(tmp_path / "no.png") == f"{tmp_path / 'no.png'}: no such file"
    assert message(tmp_path) == f"{tmp_path}: a folder, not an image file"
    assert "no such file" in message("two\nlines.png")
    assert "cannot be opened" in message("nul\0.png")
    assert "cannot be opened" in message("x" * 5000)


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert message(tmp_path / "locked.png") == f"{tmp_path / 'locked.png'}: no permission to read it"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"just some text", "not an image"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<svg xmlns=''/>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 5\n%%EndComments\nshowpage\n", "PostScript"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 30, "not an image|damaged"),
    ],
)
def test_what_is_no_image_is_told_apart(content, expected, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    text = message(path)
    assert text.startswith(f"{path}: ")
    assert any(word in text for word in expected.split("|")), text


def test_postscript_is_never_handed_to_an_interpreter(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("was run"))
    path = tmp_path / "a.eps"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 5\n%%EndComments\nshowpage\n")
    assert "PostScript" in message(path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_an_error_or_has_every_pixel(name, lenient, encoded, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    data = encoded[name]
    whole = open_image(io.BytesIO(data)).tobytes()
    for end in {*range(0, len(data), 97), len(data) // 2, len(data) - 40}:
        try:
            image = open_image(io.BytesIO(data[:end]))
        except InputError:
            continue
        assert image.tobytes() == whole, f"cut at {end} of {len(data)}"
    with pytest.raises(InputError):
        open_image(io.BytesIO(data[: len(data) // 2]))
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient, "the caller's setting was not restored"


def test_a_truncated_file_is_named(encoded, tmp_path):
    path = tmp_path / "half.jpg"
    path.write_bytes(encoded["jpg"][: len(encoded["jpg"]) // 2])
    assert message(path).startswith(f"{path}: truncated or damaged (")


def test_too_many_pixels_are_refused_from_the_header(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(300, 500))
    text = message(path, max_pixels=149_999)
    assert "height 300 x width 500 = 150000 pixels are above the limit of 149999" in text
    assert "truncated or damaged" in message(path, max_pixels=150_000)


def test_pillows_own_bomb_limits_give_the_same_kind_of_message(tmp_path):
    limit = Image.MAX_IMAGE_PIXELS
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(40_000, 50_000))
    text = message(path)
    assert "2000000000 pixels are above" in text
    assert str(2 * limit) in text
    path.write_bytes(png_header(10_000, 10_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        assert "100000000 pixels are above" in message(path)
    assert limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_flipped_bytes_give_an_input_error_or_a_valid_image(name, encoded):
    dice = random.Random(name)
    refusals = []
    for attempt in range(120):
        data = bytearray(encoded[name])
        reach = len(data) if attempt % 2 else min(len(data), 120)  # headers get half the attacks
        for _ in range(dice.choice((1, 1, 3, 10))):
            data[dice.randrange(reach)] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        try:
            image = open_image(io.BytesIO(bytes(data)), max_pixels=200_000)
        except InputError as error:
            refusals.append(str(error))
        else:
            assert image.mode == "RGB"
            assert len(image.tobytes()) == image.width * image.height * 3
    assert len(refusals) >= 10
    assert not any("\n" in text for text in refusals)
