"""Chopping images into patches: reading order, size policies, and the convolution it replaces."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.vit.errors import InputError
from regard.vit.patches import PatchTokenizer

P = 8


def tokenizer(policy: str = "resize", dim: int = 6, channels: int = 3) -> PatchTokenizer:
    part = PatchTokenizer(P, channels, dim, policy)
    nn.init.normal_(part.proj.bias)
    return part


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(8, 8), (16, 40), (40, 16)])
def test_equals_a_convolution_with_the_patch_as_its_stride(size, channels):
    part = tokenizer(channels=channels)
    conv = nn.Conv2d(channels, 6, P, stride=P)
    with torch.no_grad():
        part.proj.weight.copy_(conv.weight.flatten(1))
        part.proj.bias.copy_(conv.bias)
    images = torch.randn(2, channels, *size)
    tokens, grid = part(images)
    assert grid == (size[0] // P, size[1] // P)
    torch.testing.assert_close(tokens, conv(images).flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_patches_come_in_reading_order():
    part = tokenizer(dim=2)
    with torch.no_grad():  # read the mean of channel 0 (row ramp) and of channel 1 (column ramp)
        part.proj.bias.zero_()
        part.proj.weight.zero_()
        part.proj.weight[0, : P * P] = part.proj.weight[1, P * P : 2 * P * P] = 1 / P**2
    rows, columns = torch.meshgrid(torch.arange(16.0) // P, torch.arange(24.0) // P, indexing="ij")
    tokens, grid = part(torch.stack((rows, columns, rows * 0))[None])
    assert grid == (2, 3)
    want = torch.tensor([[0.0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])
    torch.testing.assert_close(tokens[0], want)


SIZES = [(1, 1), (7, 100), (33, 65), (100, 7), (8, 9), (16, 24)]


@pytest.mark.parametrize("size", SIZES)
def test_resize_goes_to_the_nearest_multiple_and_at_least_one_patch(size):
    part, images = tokenizer("resize"), torch.randn(2, 3, *size)
    fitted = part.fit(images)
    for before, after in zip(size, fitted.shape[2:], strict=True):
        assert after % P == 0
        assert after >= P
        assert abs(after - before) <= P / 2 or before < P
    want = F.interpolate(images, fitted.shape[2:], mode="bicubic", antialias=True)
    assert torch.equal(fitted, images if tuple(fitted.shape[2:]) == size else want)
    assert part(images)[1] == (fitted.shape[2] // P, fitted.shape[3] // P)


@pytest.mark.parametrize("size", SIZES)
def test_pad_adds_the_mean_colour_at_the_bottom_and_right(size):
    images = torch.randn(2, 3, *size)
    fitted = tokenizer("pad").fit(images)
    height, width = size
    assert fitted.shape[2:] == (-(-height // P) * P, -(-width // P) * P)
    assert torch.equal(fitted[:, :, :height, :width], images)
    assert (fitted[:, :, height:] == 0).all()
    assert (fitted[:, :, :, width:] == 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_crop_keeps_the_top_left(size):
    part, images = tokenizer("crop"), torch.randn(2, 3, *size)
    height, width = size
    if min(size) < P:
        with pytest.raises(InputError, match=f"{height} x {width} px"):
            part(images)
        return
    fitted = part.fit(images)
    assert torch.equal(fitted, images[:, :, : height // P * P, : width // P * P])


@pytest.mark.parametrize("size", SIZES)
def test_error_refuses_what_the_patch_does_not_divide(size):
    part, images = tokenizer("error"), torch.randn(2, 3, *size)
    if size == (16, 24):
        assert part(images)[1] == (2, 3)
        return
    with pytest.raises(InputError, match=r"patches of 8 px do not divide an image of \d+ x \d+ px") as caught:
        part(images)
    message = str(caught.value)
    assert f"{size[0]} x {size[1]}" in message
    assert "resize" in message, "the message says how to fix it"
    assert "\n" not in message


@pytest.mark.parametrize("policy", ["resize", "pad", "crop", "error"])
@pytest.mark.parametrize("shape", [(1, 3, 0, 8), (1, 3, 8, 0), (1, 3, 0, 0), (3, 8, 16), (1, 1, 8, 16), (1, 8, 16, 3)])
def test_what_is_no_image_batch_is_refused_in_one_line(policy, shape):
    with pytest.raises(InputError) as caught:
        tokenizer(policy)(torch.zeros(shape))
    assert "\n" not in str(caught.value)


def test_resize_keeps_the_dtype_and_is_computed_in_fp32():
    images = torch.randn(1, 3, 13, 30).bfloat16()
    part = tokenizer()
    assert torch.equal(part.fit(images), part.fit(images.float()).bfloat16())
