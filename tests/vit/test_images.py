import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from regard.vit.errors import InputError
from regard.vit.images import to_rgb

HEIGHT, WIDTH = 4, 7
WHITE = (255, 255, 255)


def picture() -> Image.Image:
    """A gradient in two directions, so that no turn or flip maps it onto itself."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return Image.fromarray(np.stack([rows * 60, columns * 30, rows * 0 + 90], -1).astype(np.uint8))


def reopened(image: Image.Image, file_format: str, **options: object) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    buffer.seek(0)
    return Image.open(buffer)


def same(a: Image.Image, b: Image.Image) -> bool:
    return a.mode == b.mode == "RGB" and a.size == b.size and a.tobytes() == b.tobytes()


STORED = {  # how a camera held in each orientation stores the upright picture
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_every_exif_orientation_comes_out_upright(orientation, file_format):
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](np.asarray(picture()))))
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = to_rgb(reopened(stored, file_format, exif=exif))
    assert same(upright, picture())
    assert same(to_rgb(upright), picture()), "a second call turned it again"


def test_orientation_is_applied_before_alpha_and_depth():
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = picture().convert("RGBA")
    rgba.putpixel((0, 0), (0, 0, 0, 0))
    turned = to_rgb(reopened(rgba, "PNG", exif=exif))
    assert turned.size == (HEIGHT, WIDTH)
    assert turned.getpixel((HEIGHT - 1, 0)) == WHITE  # top left goes to top right


def test_a_broken_exif_block_does_not_hide_the_picture():
    image = picture()
    image.info["exif"] = b"Exif\0\0MM\0*\xff\xff"
    assert same(to_rgb(image), picture())


def test_plain_rgb_is_returned_itself_and_others_leave_the_source_unchanged():
    image = picture()
    assert to_rgb(image) is image
    rgba = image.convert("RGBA")
    before = rgba.tobytes()
    to_rgb(rgba)
    assert rgba.mode == "RGBA"
    assert rgba.tobytes() == before


def test_one_bit_and_grey():
    one = Image.new("1", (WIDTH, HEIGHT), 0)
    one.putpixel((2, 1), 1)
    assert to_rgb(one).getpixel((2, 1)) == WHITE
    assert to_rgb(one).getpixel((0, 0)) == (0, 0, 0)
    assert to_rgb(Image.new("L", (WIDTH, HEIGHT), 77)).getpixel((0, 0)) == (77, 77, 77)


def test_grey_with_alpha_and_premultiplied_grey_composite_alike():
    grey = Image.new("LA", (WIDTH, HEIGHT), (100, 255))
    grey.putpixel((1, 2), (100, 0))
    grey.putpixel((3, 2), (100, 51))  # a fifth
    for image in (grey, grey.convert("La")):
        rgb = to_rgb(image, background=(10, 20, 30))
        assert rgb.getpixel((0, 0)) == (100, 100, 100)
        assert rgb.getpixel((1, 2)) == (10, 20, 30)
        assert np.abs(np.subtract(rgb.getpixel((3, 2)), (28, 36, 44))).max() <= 2


def test_rgba_premultiplied_rgba_and_padded_rgb():
    rgba = Image.new("RGBA", (WIDTH, HEIGHT), (200, 100, 0, 255))
    rgba.putpixel((5, 1), (200, 100, 0, 0))
    for image in (rgba, rgba.convert("RGBa")):
        assert to_rgb(image).getpixel((0, 0)) == (200, 100, 0)
        assert to_rgb(image).getpixel((5, 1)) == WHITE
    padded = Image.new("RGBX", (WIDTH, HEIGHT), (200, 100, 0, 0))
    assert to_rgb(padded).getpixel((0, 0)) == (200, 100, 0)


def palette_image() -> Image.Image:
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([9, 9, 9, 200, 100, 50, 0, 0, 250])
    image.putpixel((0, 0), 0)
    image.putpixel((6, 3), 2)
    return image


@pytest.mark.parametrize(
    ("file_format", "transparency"),
    [
        ("GIF", None),
        ("GIF", 0),
        ("PNG", None),
        ("PNG", 0),
        ("PNG", b"\x00\xff\xff"),
        ("PNG", b"\x00\xff\x33"),
    ],
)
def test_palettes_with_and_without_transparent_entries(file_format, transparency):
    options = {} if transparency is None else {"transparency": transparency}
    rgb = to_rgb(reopened(palette_image(), file_format, **options))
    assert rgb.getpixel((0, 0)) == ((9, 9, 9) if transparency is None else WHITE)
    assert rgb.getpixel((1, 1)) == (200, 100, 50)
    assert rgb.getpixel((6, 3)) == ((204, 204, 254) if transparency == b"\x00\xff\x33" else (0, 0, 250))


def test_palette_with_alpha_band_and_palette_of_rgba_entries():
    with_alpha = palette_image().convert("PA")
    with_alpha.putpixel((0, 0), (0, 0))
    assert to_rgb(with_alpha).getpixel((0, 0)) == WHITE
    assert to_rgb(with_alpha).getpixel((1, 1)) == (200, 100, 50)
    entries = palette_image()
    entries.putpalette([9, 9, 9, 0, 200, 100, 50, 255, 0, 0, 250, 255], "RGBA")
    assert to_rgb(entries).getpixel((0, 0)) == WHITE
    assert to_rgb(entries).getpixel((6, 3)) == (0, 0, 250)


def test_colour_key_of_grey_one_bit_and_rgb_png():
    grey = Image.new("L", (WIDTH, HEIGHT), 77)
    grey.putpixel((3, 1), 5)
    rgb = to_rgb(reopened(grey, "PNG", transparency=5))
    assert rgb.getpixel((3, 1)) == WHITE
    assert rgb.getpixel((0, 0)) == (77, 77, 77)
    one = to_rgb(reopened(Image.new("1", (WIDTH, HEIGHT), 0), "PNG", transparency=0))
    assert one.getpixel((0, 0)) == WHITE
    keyed = to_rgb(reopened(picture(), "PNG", transparency=picture().getpixel((2, 3))))
    assert keyed.getpixel((2, 3)) == WHITE
    assert keyed.getpixel((3, 3)) == picture().getpixel((3, 3))
    assert same(to_rgb(keyed), keyed)


def test_colour_key_of_16_bit_rgb_png():
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = np.array([[[0x1234, 0x5678, 0x9ABC], [0x4000, 0x4000, 0x4000], [0, 0, 0]]], ">u2")
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 3, 1, 16, 2, 0, 0, 0))
        + chunk(b"tRNS", pixels[0, 0].tobytes())
        + chunk(b"IDAT", zlib.compress(b"\0" + pixels.tobytes()))
        + chunk(b"IEND", b"")
    )
    rgb = to_rgb(Image.open(io.BytesIO(data)))
    assert [rgb.getpixel((x, 0)) for x in range(3)] == [WHITE, (64, 64, 64), (0, 0, 0)]


def test_cmyk_and_the_inverted_cmyk_of_adobe_jpeg():
    cmyk = Image.new("CMYK", (16, 8), (0, 255, 255, 0))  # red
    assert to_rgb(cmyk).getpixel((3, 3)) == (255, 0, 0)
    stored = reopened(cmyk, "JPEG", quality=100)
    assert "adobe" in stored.info
    assert np.abs(np.subtract(to_rgb(stored).getpixel((3, 3)), (255, 0, 0))).max() <= 3


@pytest.mark.parametrize("mode", ["YCbCr", "HSV"])
def test_other_colour_spaces_keep_their_colours(mode):
    back = np.asarray(to_rgb(picture().convert(mode))).astype(int)
    assert np.abs(back - np.asarray(picture())).max() <= 6


def test_lab_is_converted_as_colour():
    lab = Image.new("LAB", (WIDTH, HEIGHT), (255, 128, 128))
    assert min(to_rgb(lab).getpixel((0, 0))) >= 250


def deep_values() -> np.ndarray:
    values = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 2000
    values[-1, -1] = 65535
    return values


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I"])
def test_16_bit_grey_is_scaled_not_clipped(mode):
    values = deep_values()
    data = values.astype({"I;16B": ">u2", "I;16N": "=u2", "I": "=i4"}.get(mode, "<u2"))
    image = Image.frombytes(mode, (WIDTH, HEIGHT), data.tobytes())
    rgb = np.asarray(to_rgb(image))
    assert (rgb[..., 0] == np.rint(values / 257)).all()
    assert (rgb == rgb[..., :1]).all()


def test_a_dark_16_bit_png_stays_dark_and_its_colour_key_is_exact():
    values = np.full((HEIGHT, WIDTH), 200, np.uint16)
    values[0, 1] = 201
    values[1, 0] = 40000
    dark = np.asarray(to_rgb(reopened(Image.fromarray(np.minimum(values, 201)), "PNG")))
    assert dark.max() == 1
    keyed = to_rgb(reopened(Image.fromarray(values), "PNG", transparency=201))
    assert keyed.getpixel((1, 0)) == WHITE
    assert keyed.getpixel((0, 0)) == (1, 1, 1)
    assert keyed.getpixel((0, 1)) == (156, 156, 156)


@pytest.mark.parametrize(("maximum", "value", "expected"), [(65535, 200, 1), (1023, 1, 0), (1023, 1023, 255)])
def test_a_deep_pgm_is_scaled_by_its_range_however_dark(maximum, value, expected):
    data = b"P5 %d %d %d\n" % (WIDTH, HEIGHT, maximum) + struct.pack(">H", value) * (WIDTH * HEIGHT)
    assert to_rgb(Image.open(io.BytesIO(data))).getpixel((0, 0)) == (expected,) * 3


def test_32_bit_grey_below_256_is_taken_as_8_bit_and_without_a_range_refused():
    assert to_rgb(Image.new("I", (WIDTH, HEIGHT), 77)).getpixel((0, 0)) == (77, 77, 77)
    for value in (-1, 70000):
        with pytest.raises(InputError, match="scale them"):
            to_rgb(Image.new("I", (WIDTH, HEIGHT), value))


def test_float_grey_within_0_to_1_is_scaled_and_anything_else_refused():
    assert to_rgb(Image.new("F", (WIDTH, HEIGHT), 0.2)).getpixel((0, 0)) == (51, 51, 51)
    for value in (1.5, -0.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"scale them to 0\.\.1"):
            to_rgb(Image.new("F", (WIDTH, HEIGHT), value))


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "blue")]
    for file_format in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if file_format == "WEBP" else {}
        animated = reopened(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
        assert animated.n_frames == 2
        assert to_rgb(animated).getpixel((0, 0)) == (255, 0, 0)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InputError, match="no pixels"):
        to_rgb(Image.new("RGB", (0, 3)))
