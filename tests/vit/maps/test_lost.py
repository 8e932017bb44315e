"""LOST against the dense algorithm in float64, and boxes that lie where the object lies."""

import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.maps.lost import LostSettings, component, lost_boxes
from regard.vit.preprocess import Preprocess

SIZE = (48, 64)  # grid 6 x 8
LAYOUTS = [{}, dict(registers=2, registers_place="end"), dict(class_token=False, pooling="mean")]


def dense(features: Tensor, bias: float, candidates: int) -> tuple[Tensor, int, Tensor]:
    """Degrees, seed and the mask before its parts are told apart, from the whole matrix of likenesses."""
    a = features @ features.T + bias
    positive = a.clone()
    positive.fill_diagonal_(0)
    positive[positive < 0] = 0
    degrees = (positive + positive.T > 0).sum(1)
    order = degrees.argsort(stable=True)
    group = [p for p in order[:candidates].tolist() if a[order[0], p] > 0]
    return degrees, int(order[0]), a[group].sum(0) > 0


@pytest.mark.parametrize("features", ["keys", "values", "queries"])
@pytest.mark.parametrize("options", [{}, dict(normalise=True, bias=-0.3), dict(bias=2.0, candidates=5)])
@pytest.mark.parametrize(
    "layout", [{}, dict(registers=2, registers_place="end"), dict(class_token=False, pooling="mean")]
)
def test_it_is_the_dense_algorithm(vit, features, options, layout):
    model, images = vit(**layout), torch.randn(2, 3, *SIZE)
    found = lost_boxes(model, images, 1, features=features, **options)
    x, grid = model.embed(images)
    block = model.blocks[1]
    x = block.norm1(model.blocks[0](x))
    projected = getattr(block.attn, {"keys": "to_k", "values": "to_v", "queries": "to_q"}[features])(x)
    for box, tokens in zip(found, model.name(projected, grid).patches.double(), strict=True):
        if options.get("normalise"):
            tokens = tokens / tokens.norm(dim=-1, keepdim=True)
        degrees, seed, mask = dense(tokens, options.get("bias", 0.0), options.get("candidates", 100))
        assert torch.equal(box.degrees.flatten(), degrees)
        assert box.seed == divmod(seed, 8)
        want = component(mask.unflatten(0, (6, 8)), box.seed)
        assert torch.equal(box.mask, want)
        assert box.mask[box.seed]
        rows, columns = want.any(1).nonzero(), want.any(0).nonzero()
        assert box.box == (rows.min() * 8, columns.min() * 8, rows.max() * 8 + 8, columns.max() * 8 + 8)


def test_the_whole_matrix_is_never_held(vit, monkeypatch):
    from regard.vit.maps import lost

    monkeypatch.setattr(lost, "BLOCK", 7)
    model, images = vit(), torch.randn(1, 3, *SIZE)
    whole = lost_boxes(model, images)[0]
    monkeypatch.setattr(lost, "BLOCK", 256)
    assert torch.equal(whole.degrees, lost_boxes(model, images)[0].degrees)


def spotted(rows: slice, columns: slice, size: tuple[int, int] = SIZE) -> Tensor:
    """Grey with one bright rectangle."""
    image = torch.zeros(1, 3, *size)
    image[..., rows, columns] = 3.0
    return image


def by_colour(vit, **changes):
    """A model whose keys are what the patch shows, dark or bright: the two are opposite."""
    model = vit(positions="none", depth=1, **changes)
    with torch.no_grad():
        dark, bright = (model.blocks[0].norm1(model.tokenizer(torch.full((1, 3, 8, 8), v))[0]) for v in (0.0, 3.0))
        to_k = model.blocks[0].attn.to_k
        to_k.bias.copy_(-(to_k.weight @ (dark + bright)[0, 0]) / 2)
    return model


def test_a_bright_rectangle_is_boxed(vit):
    for rows, columns in ((slice(8, 24), slice(40, 64)), (slice(32, 40), slice(0, 16))):
        (found,) = lost_boxes(by_colour(vit), spotted(rows, columns))
        assert found.box == (rows.start, columns.start, rows.stop, columns.stop)


def test_of_two_objects_the_one_with_the_seed_is_boxed(vit):
    images = spotted(slice(8, 24), slice(48, 64))
    images[..., 40:48, 0:8] = 3.0
    (found,) = lost_boxes(by_colour(vit), images)
    assert found.box == (8, 48, 24, 64)


@pytest.mark.parametrize(("policy", "right"), [("pad", 61), ("crop", 56), ("resize", 61)])
def test_boxes_end_where_the_unpadded_image_ends(vit, policy, right):
    """61 is no multiple of 8: the last patch reaches beyond the image, is cut off, or is squeezed into it."""
    (found,) = lost_boxes(by_colour(vit, size_policy=policy), spotted(slice(8, 24), slice(40, 61), (48, 61)))
    top, left, bottom, got = found.box
    assert got == pytest.approx(right)
    assert (top, bottom) == (8, 24)
    assert left == pytest.approx(40, abs=4)


def test_boxes_of_pictures_are_in_their_own_pixels(vit):
    model = by_colour(vit, image_size=SIZE, preprocess=Preprocess(size=SIZE))
    picture = Image.new("RGB", (640, 240), (124, 116, 104))  # the mean colour, which is 0 after preprocessing
    picture.paste((255, 255, 255), (400, 40, 640, 120))
    mean = model.preprocess.normalize(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8))
    with torch.no_grad():
        model.tokenizer.proj.weight.div_(mean.expand(1, 3, 8, 8).flatten() / 3)  # white is to it what 3 is above
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    for given in (picture, turned):
        (found,) = lost_boxes(model, given)
        assert found.box == pytest.approx((40, 400, 120, 640), abs=1)


def test_rope_does_not_make_alike_patches_unlike(vit):
    model = vit(positions="rope", depth=1)
    (found,) = lost_boxes(model, torch.zeros(1, 3, *SIZE))
    assert (found.degrees == 47).all()


def test_what_was_used_is_told(vit):
    (found,) = lost_boxes(vit(), torch.randn(1, 3, *SIZE), -2, features="values", normalise=True, bias=-0.2)
    assert found.settings == LostSettings("values", 1, True, -0.2, 100)


def test_a_bias_beyond_reason_is_told(vit):
    with pytest.raises(InputError, match=r"LOST bias -1.5 is so low .* choose one above -1"):
        lost_boxes(vit(), torch.randn(1, 3, *SIZE), normalise=True, bias=-1.5)
    with pytest.raises(InputError, match="features 'key' are unknown"):
        lost_boxes(vit(), torch.randn(1, 3, *SIZE), features="key")
    with pytest.raises(InputError, match="candidates is 0"):
        lost_boxes(vit(), torch.randn(1, 3, *SIZE), candidates=0)
    with pytest.raises(InputError, match="layer 9 does not exist"):
        lost_boxes(vit(), torch.randn(1, 3, *SIZE), 9)


def test_parts_hang_together_by_sides_alone():
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    assert component(mask, (0, 0)).int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert component(mask, (2, 3)).int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert not component(mask, (1, 0)).any()
