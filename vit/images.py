"""Any PIL image -> upright 8-bit RGB: EXIF orientation first, then depth, then alpha."""

import numpy as np
from PIL import ExifTags, Image

from regard.vit.errors import InputError

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_SOURCES = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")


def to_rgb(image: Image.Image, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """Return `image` as upright RGB; transparent pixels are composited on `background` (default white).

    16-bit grey is scaled to 8 bits, never clipped; 32-bit float grey must lie within 0..1; of an animation
    the current frame is taken, the first one unless the caller moved on. An image that already is plain
    upright RGB is returned itself, not a copy; the caller's image is never changed.
    Raises InputError for pixel values without a known range, an unknown mode, or an image without pixels.
    """
    image.load()  # EXIF may follow the pixels in the file
    if image.width == 0 or image.height == 0:
        raise InputError(f"the image has no pixels: height {image.height}, width {image.width}")
    source_format = image.format  # lost by a rotation
    image = _upright(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _grey_from_integers(image, always_16_bit=source_format in ("PNG", "PPM"))
    elif image.mode == "F":
        image = _grey_from_floats(image)
    elif image.mode == "La":  # premultiplied; its only conversion
        image = image.convert("LA")
    elif image.mode == "RGB":
        image = _colour_key_in_8_bits(image)
    try:
        if not image.has_transparency_data:
            return image.convert("RGB")
        rgba = image.convert("RGBA")
    except ValueError as error:
        raise InputError(f"mode {image.mode} cannot be turned into RGB ({error}); convert it first") from error
    canvas = Image.new("RGB", rgba.size, background)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a broken EXIF block tells no orientation; the pixels are still good
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    if method is None:
        return image
    image = image.transpose(method)
    for key in _ORIENTATION_SOURCES:  # else a second call would turn it again
        image.info.pop(key, None)
    return image


def _grey_from_integers(image: Image.Image, *, always_16_bit: bool) -> Image.Image:
    # Pillow opens 16-bit PPM files, and some versions PNG, as 32-bit "I"; a dark picture there is 16-bit too.
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise InputError(f"32-bit grey values {low}..{high} have no known range; scale them to 0..65535")
    sixteen_bit = image.mode != "I" or always_16_bit or high > 255
    grey = Image.fromarray(((values + 128) // 257 if sixteen_bit else values).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _grey_from_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
        raise InputError(
            f"float grey values {values.min():g}..{values.max():g} have no known range; scale them to 0..1"
        )
    return Image.fromarray(np.rint(values * 255).astype(np.uint8))


def _colour_key_in_8_bits(image: Image.Image) -> Image.Image:
    # The key of a 16-bit RGB PNG keeps 16 bits though Pillow keeps only the high byte of each pixel.
    key = image.info["transparency"]
    image = image.copy()
    if isinstance(key, tuple) and max(key) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in key)
    elif not isinstance(key, tuple):
        del image.info["transparency"]
    return image
