"""From a picture to the tensor a model expects."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from regard.vit.errors import InputError
from regard.vit.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

HEIGHT, WIDTH = 30, 50


@pytest.fixture
def array() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def as_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_squash_equals_pillow_s_antialiased_resize(array, interpolation):
    image, kind = Image.fromarray(array), Image.Resampling[interpolation.upper()]
    for height, width in ((14, 20), (64, 33), (30, 50)):
        got = Preprocess(size=(height, width), interpolation=interpolation).pixels(image)
        assert torch.equal(got, as_pixels(image.resize((width, height), kind)))


def test_numbers_are_normalised_per_channel(array):
    image = Image.fromarray(array)
    batch = Preprocess(size=None)(image)
    assert batch.shape == (1, 3, HEIGHT, WIDTH)
    assert batch.dtype == torch.float32
    for channel in range(3):
        want = (array[..., channel] / 255.0 - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        np.testing.assert_allclose(batch[0, channel].numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fit", ["squash", "crop"])
@pytest.mark.parametrize("size", [None, (14, 20)])
def test_arrays_tensors_and_pictures_give_identical_numbers(array, fit, size):
    preprocess = Preprocess(size=size, fit=fit, crop_ratio=0.875)
    kinds = [Image.fromarray(array), array, torch.from_numpy(array).permute(2, 0, 1), array.copy()[:, ::-1][:, ::-1]]
    batches = [preprocess(kind) for kind in kinds]
    for batch in batches[1:]:
        assert torch.equal(batch, batches[0])
    assert torch.equal(preprocess(kinds), torch.cat(batches))
    assert torch.equal(preprocess(tuple(kinds)), torch.cat(batches))


def centre_crop_by_peers(image: Image.Image, size: int, ratio: float) -> Image.Image:
    """Resize the short side to floor(size / ratio), floor the long one, cut the centre: timm and torchvision."""
    short = int(size / ratio)
    width, height = image.size
    if width < height:
        resized = image.resize((short, int(short * height / width)), Image.Resampling.BICUBIC)
    else:
        resized = image.resize((int(short * width / height), short), Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2.0), round((resized.height - size) / 2.0)
    return resized.crop((left, top, left + size, top + size))


@pytest.mark.parametrize("ratio", [1.0, 0.875, 0.9])
@pytest.mark.parametrize("picture", [(30, 50), (64, 43), (47, 61), (32, 32), (20, 97)])
def test_crop_takes_the_centre_as_timm_and_torchvision_do(picture, ratio):
    array = np.random.default_rng(1).integers(0, 256, (*picture, 3), dtype=np.uint8)
    got = Preprocess(size=(28, 28), fit="crop", crop_ratio=ratio).pixels(array)
    assert torch.equal(got, as_pixels(centre_crop_by_peers(Image.fromarray(array), 28, ratio)))


@pytest.mark.parametrize("target", [(14, 40), (40, 14), (20, 30)])
@pytest.mark.parametrize("picture", [(30, 50), (64, 43), (20, 90)])
def test_crop_keeps_the_aspect_and_never_runs_past_the_edge(picture, target):
    rows, columns = np.mgrid[: picture[0], : picture[1]]
    ramp = np.stack(((rows + 0.5) * 255 / picture[0], (columns + 0.5) * 255 / picture[1], rows * 0 + 200), -1).astype(
        np.uint8
    )
    got = Preprocess(size=target, fit="crop").pixels(ramp).float()
    assert got.shape == (3, *target)
    assert (got[2] == 200).all(), "no padding may show"
    down = (got[0, -2] - got[0, 1]).mean() / (target[0] - 3) * picture[0]
    across = (got[1, :, -2] - got[1, :, 1]).mean() / (target[1] - 3) * picture[1]
    assert down / across == pytest.approx(1, abs=0.12), "pixels stay square"
    for channel in (0, 1):
        middle = got[channel].mean()
        assert abs(middle - 127) < 8, "the centre is kept"


def test_a_crop_that_is_not_square_covers_it_rounded_to_the_nearest_pixel():
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (47, 61, 3), dtype=np.uint8))
    got = Preprocess(size=(20, 30), fit="crop", crop_ratio=0.9).pixels(image)
    # 22 x 33 is to be covered: 61 / 33 is less than 47 / 22, and 47 / (61 / 33) = 25.43
    assert torch.equal(got, as_pixels(image.resize((33, 25), Image.Resampling.BICUBIC).crop((2, 2, 32, 22))))


@pytest.mark.parametrize(("offset", "top"), [("even", 2), ("floor", 1)])
def test_an_odd_rest_is_cut_where_the_owner_cuts_it(offset, top):
    rows = np.tile(np.arange(23, dtype=np.uint8)[:, None, None], (1, 20, 3))
    got = Preprocess(size=(20, 20), fit="crop", crop_offset=offset).pixels(rows)
    assert got[0, 0, 0] == top
    assert got.shape == (3, 20, 20)


def test_squash_keeps_its_share_too(array):
    got = Preprocess(size=(14, 20), crop_ratio=0.5).pixels(array)
    whole = Image.fromarray(array).resize((40, 28), Image.Resampling.BICUBIC)
    assert torch.equal(got, as_pixels(whole.crop((10, 7, 30, 21))))


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_a_picture_smaller_than_its_frame_stands_in_black(fit):
    white = np.full((HEIGHT, HEIGHT, 3), 255, np.uint8)
    got = Preprocess(size=(30, 30), fit=fit, crop_ratio=1.5).pixels(white)
    assert (got[:, 5:25, 5:25] == 255).all()
    assert got.long().sum() == 3 * 20 * 20 * 255


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_every_filter_is_pillow_s_of_that_name(array, name):
    got = Preprocess(size=(14, 20), interpolation=name).pixels(array)
    assert torch.equal(got, as_pixels(Image.fromarray(array).resize((20, 14), Image.Resampling[name.upper()])))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_torch_resizes_as_torch_does(array, interpolation):
    tensor = torch.from_numpy(array).permute(2, 0, 1)[None]
    how = dict(size=(14, 20), mode=interpolation, antialias=True)
    for resampler, expected in (
        ("torch", torch.nn.functional.interpolate(tensor, **how)),
        ("torch_float", torch.nn.functional.interpolate(tensor.float(), **how).round().clamp(0, 255).byte()),
    ):
        preprocess = Preprocess(size=(14, 20), interpolation=interpolation, resampler=resampler)
        assert torch.equal(preprocess.pixels(array), expected[0])
        assert preprocess(array).shape == (1, 3, 14, 20)


def test_a_picture_too_thin_to_be_cropped_is_refused_not_blown_up():
    with pytest.raises(InputError, match="1 x 100000 would be resized to 224 x 22400000"):
        Preprocess(fit="crop")(Image.new("RGB", (100_000, 1)))


def test_a_picture_lying_on_its_side_is_turned_first(array):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn clockwise to view
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG", exif=exif)
    batch = Preprocess(size=None)(Image.open(buffer))
    assert batch.shape == (1, 3, WIDTH, HEIGHT)
    upright = np.ascontiguousarray(np.rot90(array, -1))
    assert torch.equal(batch, Preprocess(size=None)(upright))


def test_transparent_pixels_show_the_background(array):
    image = Image.fromarray(array).convert("RGBA")
    image.putalpha(0)
    pixels = Preprocess(size=None, background=(10, 20, 30)).pixels(image)
    assert pixels[:, 3, 4].tolist() == [10, 20, 30]


def test_one_mean_makes_a_grey_picture(array):
    batch = Preprocess(size=(14, 20), mean=(0.5,), std=(0.25,))(array)
    assert batch.shape == (1, 1, 14, 20)
    grey = np.array(Image.fromarray(array).resize((20, 14), Image.Resampling.BICUBIC).convert("L"))
    np.testing.assert_allclose(batch[0, 0].numpy(), (grey / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-5)


def test_pictures_that_keep_their_own_sizes_do_not_make_one_batch(array):
    preprocess = Preprocess(size=None)
    assert preprocess([array, array]).shape == (2, 3, HEIGHT, WIDTH)
    with pytest.raises(InputError, match="different sizes"):
        preprocess([array, array[:10]])


@pytest.mark.parametrize(
    "picture",
    [
        torch.rand(3, HEIGHT, WIDTH),
        torch.zeros(HEIGHT, WIDTH, 3, dtype=torch.uint8),
        torch.zeros(2, 3, HEIGHT, WIDTH, dtype=torch.uint8),
        np.random.rand(HEIGHT, WIDTH, 3),
        np.zeros((HEIGHT, WIDTH), np.uint8),
        "photo.jpg",
        None,
        [],
    ],
    ids=["float tensor", "tensor HWC", "batch", "float array", "grey array", "path", "None", "empty list"],
)
def test_what_is_no_picture_is_refused_in_one_line(picture):
    with pytest.raises(InputError) as caught:
        Preprocess()(picture)
    message = str(caught.value)
    assert "\n" not in message
    assert "picture" in message


def test_a_float_tensor_is_told_what_it_is():
    with pytest.raises(InputError, match=r"uint8.*float32 \(3, 30, 50\) Tensor"):
        Preprocess()(torch.rand(3, HEIGHT, WIDTH))


def test_the_model_sees_its_pictures_at_its_own_size(vit, array):
    model = vit(preprocess=Preprocess(size=(24, 40)))
    assert model.preprocess is model.config.preprocess
    assert model(model.preprocess([array, array])).grid == (3, 5)
