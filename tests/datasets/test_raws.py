import io

import numpy as np
import pytest
import torch
from PIL import Image

from regard.datasets import open_image, raws
from regard.datasets.raws import ArrayRaws, FileRaws, with_channels
from regard.vit import Preprocess
from regard.vit.errors import InputError

SIZES = [(40, 61), (75, 33), (1, 1), (28, 28)]
BOXES = [(3, 5, 20, 41), (0, 0, 75, 33), (0, 0, 1, 1), (27, 2, 1, 25)]
PREPROCESSES = {
    "squash": Preprocess((16, 24), interpolation="bicubic"),
    "crop": Preprocess((16, 24), fit="crop", crop_ratio=0.875, interpolation="bilinear"),
    "smaller than its frame": Preprocess((20, 20), fit="crop", crop_ratio=1.3, interpolation="lanczos"),
    "torch": Preprocess((32, 24), resampler="torch", interpolation="bilinear"),
    "grey": Preprocess((16, 24), mean=(0.5,), std=(0.5,)),
    "as it is": Preprocess((28, 28)),
    "as it is, grey": Preprocess((28, 28), fit="crop", mean=(0.5,), std=(0.5,)),
}


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((width, height))
    noisy = np.asarray(smooth, dtype=np.int64) + rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [photograph(*size, seed) for seed, size in enumerate(SIZES)]


@pytest.mark.parametrize("name", PREPROCESSES)
def test_fitted_files_are_exactly_what_the_model_preprocesses(name, images):
    preprocess = PREPROCESSES[name]
    files = [encoded(image, kind) for image, kind in zip(images, ("JPEG", "PNG", "PNG", "JPEG"), strict=True)]
    expected = torch.stack([preprocess.pixels(open_image(io.BytesIO(file))) for file in files])
    assert torch.equal(FileRaws(files).fitted(preprocess), expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PREPROCESSES)
def test_fitted_arrays_are_exactly_what_the_model_preprocesses(name, channels):
    preprocess = PREPROCESSES[name]
    pixels = torch.randint(256, (3, channels, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = [Image.fromarray(p.permute(1, 2, 0).squeeze(2).numpy()) for p in pixels]
    expected = torch.stack([preprocess.pixels(image) for image in images])
    assert torch.equal(ArrayRaws(pixels).fitted(preprocess), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_size_of_a_turned_picture_is_its_upright_one(kind, images):
    exif = Image.Exif()  # not that of the shared picture
    exif[0x0112] = 6
    buffer = io.BytesIO()
    images[0].save(buffer, kind, exif=exif)
    turned = FileRaws([buffer.getvalue()])
    assert turned.sizes == [(61, 40)]
    whole = torch.tensor([[0, 0, 61, 40]], dtype=torch.float64)
    expected = np.array(open_image(io.BytesIO(buffer.getvalue())))
    assert torch.equal(turned.cut(whole, (61, 40))[0].permute(1, 2, 0), torch.from_numpy(expected))


def test_pictures_that_keep_their_own_sizes_make_a_batch_only_if_these_are_equal(images):
    own = Preprocess(None)
    assert FileRaws([images[0], images[0]]).fitted(own).shape == (2, 3, 40, 61)
    with pytest.raises(InputError, match="different sizes"):
        FileRaws(images).fitted(own)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 24), (64, 50)])
def test_a_box_of_whole_pixels_is_cropped_and_resized_as_by_pillow_within_one_level(size, interpolation, images):
    images = [image.point(lambda level: 64 + level // 2) for image in images]  # so that no overshoot is clipped
    cut = FileRaws(images).cut(torch.tensor(BOXES, dtype=torch.float64), size, interpolation)
    assert cut.dtype == torch.uint8
    resample = Image.Resampling[interpolation.upper()]
    for image, (top, left, height, width), pixels in zip(images, BOXES, cut, strict=True):
        crop = image.crop((left, top, left + width, top + height)).resize((size[1], size[0]), resample)
        distance = (pixels.permute(1, 2, 0).int() - torch.from_numpy(np.array(crop)).int()).abs()
        assert distance.max() <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"])
def test_other_filters_and_boxes_between_pixels_are_pillows(interpolation, images):
    shift = 0.25 if interpolation in ("bilinear", "bicubic") else 0
    boxes = [(top + shift, left, height - shift, width) for top, left, height, width in BOXES]
    cut = FileRaws(images).cut(torch.tensor(boxes, dtype=torch.float64), (16, 24), interpolation)
    resample = Image.Resampling[interpolation.upper()]
    for image, (top, left, height, width), pixels in zip(images, boxes, cut, strict=True):
        expected = image.resize((24, 16), resample, (left, top, left + width, top + height))
        assert torch.equal(pixels.permute(1, 2, 0), torch.from_numpy(np.array(expected)))


def test_an_unknown_filter_is_named(images):
    with pytest.raises(InputError, match="'cubic'; choose one of nearest"):
        FileRaws(images).cut(torch.tensor(BOXES, dtype=torch.float64), (4, 4), "cubic")


def test_a_whole_picture_at_its_own_size_is_itself_and_nobody_elses_memory(images):
    file = FileRaws([images[0]])
    whole = torch.tensor([[0, 0, 40, 61]], dtype=torch.float64)
    cut = file.cut(whole, (40, 61))
    assert torch.equal(cut[0].permute(1, 2, 0), torch.from_numpy(np.array(images[0])))
    cut.zero_()
    assert file.cut(whole, (40, 61)).any()


def test_rows_choose_the_pictures_and_neighbours_do_not_matter(images):
    boxes = torch.tensor([BOXES[3], BOXES[0], BOXES[3]], dtype=torch.float64)
    cut = FileRaws(images).cut(boxes, (9, 7), rows=[3, 0, 3])
    assert torch.equal(cut[0], cut[2])
    assert torch.equal(cut, FileRaws([np.asarray(image) for image in images]).cut(boxes, (9, 7), rows=[3, 0, 3]))
    assert torch.equal(cut[0], FileRaws([images[3]]).cut(boxes[:1], (9, 7))[0])
    assert torch.equal(cut[1], FileRaws(images[:1]).cut(boxes[1:2], (9, 7))[0])
    pixels = torch.randint(256, (4, 3, 20, 30), dtype=torch.uint8)
    boxes = torch.tensor([(1, 2, 10, 20), (0, 0, 20, 30)], dtype=torch.float64)
    some = ArrayRaws(pixels).cut(boxes, (9, 7), rows=[2, 1])
    assert torch.equal(some, ArrayRaws(pixels[[2, 1]]).cut(boxes, (9, 7)))


def test_arrays_and_files_of_the_same_pixels_are_cut_alike(images):
    pixels = torch.from_numpy(np.array(images[0])).permute(2, 0, 1)[None]
    whole = torch.tensor([[0, 0, 40, 61]], dtype=torch.float64)
    for size in ((16, 24), (80, 90)):
        one, other = ArrayRaws(pixels).cut(whole, size), FileRaws([images[0]]).cut(whole, size)
        assert (one.int() - other.int()).abs().max() <= 2


def test_grey_and_colour_are_turned_into_each_other_as_by_pillow(images):
    rgb = torch.from_numpy(np.array(images[0])).permute(2, 0, 1)[None]
    grey = torch.from_numpy(np.array(images[0].convert("L")))[None, None]
    assert torch.equal(with_channels(rgb, 1), grey)
    assert torch.equal(with_channels(grey, 3), grey.expand(-1, 3, -1, -1))
    whole = torch.tensor([[0, 0, 40, 61]], dtype=torch.float64)
    assert torch.equal(FileRaws([images[0]], channels=1).cut(whole, (40, 61)), grey)
    assert ArrayRaws(grey, 3).cut(whole, (8, 8)).shape == (1, 3, 8, 8)


def test_a_bad_picture_is_an_error_that_names_it_or_zeros_that_are_noted(images):
    good, half = encoded(images[0]), encoded(photograph(90, 90))
    half = half[: len(half) // 2]
    pictures = [good, half, b"no picture", InputError("gone.jpg: no such file")]
    boxes = torch.tensor([(0, 0, 8, 8)] * 4, dtype=torch.float64)
    with pytest.raises(InputError, match="no picture"):
        FileRaws(pictures)
    with pytest.raises(InputError, match=r"half\.jpg: truncated"):
        FileRaws([good, half], ["a.jpg", "half.jpg"]).cut(boxes[:2], (8, 8))
    for call in (lambda raw: raw.cut(boxes, (8, 8)), lambda raw: raw.fitted(Preprocess((8, 8)))):
        raw = FileRaws(pictures, ["a.jpg", "half.jpg", "text.jpg", "gone.jpg"], lenient=True)
        pixels = call(raw)
        assert pixels.shape == (4, 3, 8, 8)
        assert pixels[0].any()
        assert not pixels[1:].any()
        assert sorted(raw.bad) == [1, 2, 3]
        assert all(raw.bad[row].startswith(raw.names[row]) for row in raw.bad)


def test_all_bad_pictures_still_make_a_batch_of_zeros():
    raw = FileRaws([b"", b"x"], lenient=True)
    assert not raw.fitted(Preprocess((4, 6))).any()
    assert raw.fitted(Preprocess(None)).shape == (2, 3, 1, 1)
    assert not raw.cut(torch.tensor([[0, 0, 1, 1]] * 2, dtype=torch.float64), (4, 6)).any()


def test_reduced_decoding_keeps_as_many_pixels_as_asked_for_and_shows_the_same(monkeypatch):
    image = photograph(301, 403)
    data, scales = encoded(image), []
    honest = raws.decode_reduced
    monkeypatch.setattr(raws, "decode_reduced", lambda *a, **k: (scales.append(a[2]), honest(*a, **k))[1])
    for box in ((0, 0, 301, 403), (40, 60, 200, 300), (10, 300, 70, 60)):
        boxes = torch.tensor([box], dtype=torch.float64)
        whole, small = (FileRaws([data], reduced=reduced).cut(boxes, (32, 32)) for reduced in (False, True))
        assert (whole.int() - small.int()).abs().float().mean() < 4
    assert scales == [1, 8, 1, 4, 1, 1]


def test_what_was_decoded_coarsely_is_decoded_again_for_a_smaller_box():
    data = encoded(photograph(301, 403))
    raw, fresh = FileRaws([data], reduced=True), FileRaws([data], reduced=True)
    large = torch.tensor([[0, 0, 301, 403]], dtype=torch.float64)
    little = torch.tensor([[10, 20, 40, 40]], dtype=torch.float64)
    raw.cut(large, (32, 32))
    assert torch.equal(raw.cut(little, (32, 32)), fresh.cut(little, (32, 32)))
    assert torch.equal(raw.fitted(Preprocess((64, 64))), FileRaws([data]).fitted(Preprocess((64, 64))))
