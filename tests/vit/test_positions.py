"""Where a patch lies, on grids whose height is not their width."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.vit.attention import Attention
from regard.vit.config import PositionResize, RopeRecipe
from regard.vit.positions import Rope, resize_table, sincos_table

CPU = torch.device("cpu")
KINDS = ["learned", "sincos", "rope", "learned+rope", "none"]
ROWS = ["patches", "cls+patches", "cls+registers+patches"]


# learned tables ------------------------------------------------------------------------------------------------------


def test_the_same_grid_is_the_identity():
    table = torch.randn(2 * 8, 6)
    assert resize_table(table, (2, 8), (2, 8), PositionResize()) is table


def test_an_equal_number_of_patches_on_another_grid_is_resampled():
    table = torch.randn(16, 6)
    for new in ((4, 4), (8, 2)):
        assert resize_table(table, (2, 8), new, PositionResize()).shape == table.shape
        assert not torch.allclose(resize_table(table, (2, 8), new, PositionResize()), table)


def test_resampling_keeps_height_and_width_apart():
    height, width = 3, 5
    rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij")
    ramps = torch.stack((rows.flatten() / 3, columns.flatten() / 5), dim=1)
    for new in ((6, 5), (3, 10), (7, 4)):
        resized = resize_table(ramps, (height, width), new, PositionResize("bilinear")).unflatten(0, new)
        down, across = resized[..., 0], resized[..., 1]
        torch.testing.assert_close(down, down[:, :1].expand(new))  # the row ramp varies along rows only
        torch.testing.assert_close(across, across[:1].expand(new))
        assert (down.diff(dim=0) >= 0).all()
        assert down[-1, 0] > down[0, 0]
        assert (across.diff(dim=1) >= 0).all()
        assert across[0, -1] > across[0, 0]


@pytest.mark.parametrize("new", [(6, 4), (2, 9), (1, 1), (5, 3), (3, 6)])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [False, True])
def test_resampling_follows_its_recipe(new, mode, antialias):
    table = torch.randn(15, 4)
    image = table.T.reshape(1, 4, 3, 5)
    want = F.interpolate(image, size=new, mode=mode, antialias=antialias, align_corners=False)
    got = resize_table(table, (3, 5), new, PositionResize(mode, antialias))
    torch.testing.assert_close(got, want[0].reshape(4, -1).T, rtol=0, atol=0)


@pytest.mark.parametrize("new", [(6, 4), (2, 9), (1, 1), (5, 3), (3, 6), (30, 41)])
def test_the_offset_recipe_scales_by_new_plus_offset_over_old(new):
    table = torch.randn(15, 4)
    got = resize_table(table, (3, 5), new, PositionResize(antialias=False, offset=0.1))
    scale = ((new[0] + 0.1) / 3, (new[1] + 0.1) / 5)
    want = F.interpolate(table.T.reshape(1, 4, 3, 5), scale_factor=scale, mode="bicubic")
    assert got.shape == (new[0] * new[1], 4)
    torch.testing.assert_close(got, want[0].reshape(4, -1).T, rtol=0, atol=0)
    plain = resize_table(table, (3, 5), new, PositionResize(antialias=False))
    assert not torch.equal(got, plain), "the offset must matter"


@pytest.mark.parametrize("new", [(6, 4), (2, 9), (5, 3), (3, 6)])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_with_aligned_corners_the_corner_patches_keep_their_place(new, mode):
    table, recipe = torch.randn(15, 4), PositionResize(mode, antialias=False, align_corners=True)
    got = resize_table(table, (3, 5), new, recipe)
    want = F.interpolate(table.T.reshape(1, 4, 3, 5), size=new, mode=mode, align_corners=True)
    torch.testing.assert_close(got, want[0].reshape(4, -1).T, rtol=0, atol=0)
    old, corners = table.unflatten(0, (3, 5)), got.unflatten(0, new)
    for row in (0, -1):
        for column in (0, -1):
            torch.testing.assert_close(corners[row, column], old[row, column])
    plain = resize_table(table, (3, 5), new, PositionResize(mode, antialias=False))
    assert not torch.allclose(got, plain), "the corners must matter"


def test_a_half_precision_table_is_resampled_in_fp32():
    table = torch.randn(15, 4).bfloat16()
    got = resize_table(table, (3, 5), (6, 4), PositionResize())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, resize_table(table.float(), (3, 5), (6, 4), PositionResize()).bfloat16())


def test_gradients_reach_a_resampled_table(vit):
    model = vit()
    model(torch.randn(1, 3, 40, 24)).patches.sum().backward()
    assert (model.positions.grad != 0).any()


# fixed sine and cosine -----------------------------------------------------------------------------------------------


def sincos_by_hand(row: float, column: float, dim: int) -> list[float]:
    quarter = dim // 4
    frequencies = [10000 ** -(i / quarter) for i in range(quarter)]
    return [f(place * w) for place in (row, column) for f in (math.sin, math.cos) for w in frequencies]


def test_the_native_grid_has_whole_number_coordinates():
    table = sincos_table((3, 5), (3, 5), 16, CPU)
    want = torch.tensor([sincos_by_hand(r, c, 16) for r in range(3) for c in range(5)])
    torch.testing.assert_close(table, want, rtol=0, atol=1e-6)


def test_another_grid_stretches_the_coordinates_over_the_same_extent():
    table = sincos_table((6, 2), (3, 5), 16, CPU)
    want = [sincos_by_hand((r + 0.5) / 2 - 0.5, (c + 0.5) * 2.5 - 0.5, 16) for r in range(6) for c in range(2)]
    torch.testing.assert_close(table, torch.tensor(want), rtol=0, atol=1e-6)


# rope ----------------------------------------------------------------------------------------------------------------


RECIPES = {
    "centred": RopeRecipe(),
    "another base": RopeRecipe(base=1000.0),
    "index": RopeRecipe("index", base=10000.0),
    "stretched to a reference": RopeRecipe("index", base=10000.0, reference=(4, 7)),
    "stated periods": RopeRecipe(periods=(1.0, 3.0)),
    "stated periods on numbers": RopeRecipe("index", periods=(0.7, 20.0), reference=(5, 5)),
}
IN_WORDS = pytest.mark.parametrize("recipe", RECIPES.values(), ids=[name.replace(" ", "-") for name in RECIPES])


def angle_by_hand(recipe: RopeRecipe, grid: tuple[int, int], axis: int, place: int, i: int, count: int) -> float:
    period = recipe.periods[i] if recipe.periods else recipe.base ** (i / count)
    if recipe.coordinates == "centred":
        return 2 * math.pi * ((place + 0.5) / grid[axis] * 2 - 1) / period
    return place * (recipe.reference[axis] / grid[axis] if recipe.reference else 1) / period


def rope_by_hand(x: torch.Tensor, grid: tuple[int, int], recipe: RopeRecipe, before: int) -> torch.Tensor:
    """`x (S, K)` in float64, one pair at a time."""
    x, width = x.double(), x.shape[1]
    out, quarter = x.clone(), width // 4
    for r in range(grid[0]):
        for c in range(grid[1]):
            s = before + r * grid[1] + c
            for i in range(width // 2):
                axis = i // quarter
                angle = angle_by_hand(recipe, grid, axis, (r, c)[axis], i % quarter, quarter)
                a, b = x[s, i].item(), x[s, i + width // 2].item()
                out[s, i] = a * math.cos(angle) - b * math.sin(angle)
                out[s, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@IN_WORDS
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (3, 0), (1, 2)])
def test_rope_equals_its_formula_and_leaves_other_tokens_alone(before, after, recipe):
    grid, width = (2, 3), 8
    x = torch.randn(before + 6 + after, width)
    turned = Rope(grid, width, recipe, before, after, CPU)(x[None, None])[0, 0]
    torch.testing.assert_close(turned.double(), rope_by_hand(x, grid, recipe, before), rtol=0, atol=2e-6)
    assert torch.equal(turned[:before], x[:before])
    assert torch.equal(turned[before + 6 :], x[before + 6 :])
    assert not torch.equal(turned, x)


def test_a_reference_grid_is_where_patches_have_their_own_numbers():
    x, grid = torch.randn(1, 1, 6, 8), (2, 3)
    numbered = Rope(grid, 8, RopeRecipe("index"), 0, 0, CPU)(x)
    assert torch.equal(Rope(grid, 8, RopeRecipe("index", reference=grid), 0, 0, CPU)(x), numbered)
    assert not torch.allclose(Rope(grid, 8, RopeRecipe("index", reference=(3, 2)), 0, 0, CPU)(x), numbered)


def test_periods_that_the_base_gives_change_nothing():
    x, grid = torch.randn(1, 1, 6, 8), (2, 3)
    stated = RopeRecipe(periods=(1.0, 10.0))  # base 100, K/4 = 2: 100^0, 100^(1/2)
    assert torch.equal(Rope(grid, 8, stated, 0, 0, CPU)(x), Rope(grid, 8, RopeRecipe(base=100.0), 0, 0, CPU)(x))


def test_rope_leaves_its_input_as_it_was():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(1, 2, 6, 8).to(dtype)
        before = x.clone()
        Rope((2, 3), 8, RopeRecipe(), 0, 0, CPU)(x)
        assert torch.equal(x, before)


def test_the_gradient_of_rope_turns_back():
    rope = Rope((2, 3), 8, RopeRecipe(), 1, 0, CPU)
    x = torch.randn(1, 1, 7, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(rope, x, atol=1e-6)
    # the transpose of a rotation is its inverse: what was turned, sent back through the gradient, is x again
    back = torch.autograd.grad(rope(x), x, rope(x).detach())[0]
    torch.testing.assert_close(back, x.detach(), rtol=0, atol=1e-6)


def test_rope_scores_depend_on_the_difference_of_places_only():
    grid, width = (3, 4), 16
    rope = Rope(grid, width, RopeRecipe(), 0, 0, CPU)
    q, k = (rope(torch.randn(1, 1, 1, width).expand(1, 1, 12, width))[0, 0] for _ in range(2))
    scores = (q @ k.T).reshape(3, 4, 3, 4)
    by_shift: dict[tuple[int, int], list[float]] = {}
    for r in range(3):
        for c in range(4):
            for r2 in range(3):
                for c2 in range(4):
                    by_shift.setdefault((r2 - r, c2 - c), []).append(scores[r, c, r2, c2].item())
    for same in by_shift.values():
        assert max(same) - min(same) < 1e-4
    assert len({round(v[0], 3) for v in by_shift.values()}) == len(by_shift), "rows and columns must both matter"


def test_rope_turns_rows_and_columns_in_their_own_halves():
    width = 8
    tall, wide = Rope((4, 1), width, RopeRecipe(), 0, 0, CPU), Rope((1, 4), width, RopeRecipe(), 0, 0, CPU)
    x = torch.randn(1, 1, 4, width)
    row_pairs, column_pairs = [0, 1, 4, 5], [2, 3, 6, 7]
    assert torch.equal(tall(x)[..., column_pairs], x[..., column_pairs])  # the only column stands at 0
    assert not torch.allclose(tall(x)[..., row_pairs], x[..., row_pairs])
    assert torch.equal(wide(x)[..., row_pairs], x[..., row_pairs])


def test_rope_keeps_lengths_and_dtype():
    x = torch.randn(2, 3, 6, 8)
    rope = Rope((2, 3), 8, RopeRecipe(), 0, 0, CPU)
    torch.testing.assert_close(rope(x).norm(dim=-1), x.norm(dim=-1))
    half = rope(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rope(x.bfloat16().float()).bfloat16()), "rope must be computed in fp32"


@IN_WORDS
def test_rope_in_attention_equals_turning_by_hand(noisy, recipe):
    attn = noisy(Attention(16, 2))
    x, grid = torch.randn(1, 7, 16), (2, 3)
    q, kv = attn.project(x, rotary=Rope(grid, 8, recipe, 1, 0, CPU))
    plain_q, plain = attn.project(x)
    for h in range(2):
        scores = rope_by_hand(plain_q[0, h], grid, recipe, 1) @ rope_by_hand(plain.k[0, h], grid, recipe, 1).T
        want = torch.softmax(scores / 8**0.5, dim=-1)
        torch.testing.assert_close(attn.weights(q, kv.k)[0, h].double(), want, rtol=0, atol=1e-5)


# in the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("place", ["after_cls", "end"])
def test_class_token_and_registers_are_there_for_every_kind(vit, positions, place):
    model = vit(positions=positions, registers=2, registers_place=place)
    images = torch.randn(1, 3, 24, 40)
    tokens = model(images)
    assert tokens.cls.shape == (1, 32)
    assert tokens.registers.shape == (1, 2, 32)
    assert tokens.patches.shape == (1, 15, 32)
    with torch.no_grad():
        for parameter in (model.cls, model.registers):
            parameter.neg_()
            assert not torch.allclose(model(images).patches, tokens.patches), "the token must take part"
            parameter.neg_()


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_place_of_registers_does_not_move_the_numbers(vit, positions, rows):
    model = vit(positions=positions, registers=3, position_rows=rows)
    other = vit(positions=positions, registers=3, position_rows=rows, registers_place="end")
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 40, 16)
    a, b = model(images), other(images)
    assert a.grid == b.grid == (5, 2)
    for name in ("cls", "registers", "patches"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["after_cls", "end"])
@pytest.mark.parametrize(("rows", "special"), zip(ROWS, [0, 1, 3], strict=True))
def test_a_learned_table_has_rows_for_the_tokens_it_names(vit, rows, special, place):
    model = vit(position_rows=rows, registers=2, registers_place=place)
    assert model.positions.shape == (special + 15, 32)
    images = torch.randn(1, 3, 24, 40)
    sequence, grid = model.embed(images)
    tokens = model.name(sequence, grid)
    added = torch.zeros(3, 32)
    added[:special] = model.positions[:special]
    torch.testing.assert_close(tokens.cls[0], model.cls + added[0])
    torch.testing.assert_close(tokens.registers[0], model.registers + added[1:])
    torch.testing.assert_close(tokens.patches, model.tokenizer(images)[0] + model.positions[special:])


def test_a_table_without_a_class_token_has_no_row_for_it(vit):
    for rows, special in zip(ROWS, [0, 0, 2], strict=True):
        model = vit(class_token=False, registers=2, position_rows=rows, pooling="mean")
        assert model.positions.shape == (special + 15, 32)
        assert model(torch.randn(1, 3, 16, 40)).patches.shape == (1, 10, 32)


def test_the_special_rows_are_not_resampled(vit):
    model = vit(position_rows="cls+registers+patches", registers=2)
    native = model.name(*model.embed(torch.randn(1, 3, 24, 40)))
    larger = model.name(*model.embed(torch.randn(1, 3, 48, 16)))
    assert torch.equal(native.cls, larger.cls)
    assert torch.equal(native.registers, larger.registers)
    at_patches = larger.patches - model.tokenizer(torch.zeros(1, 3, 48, 16))[0]
    assert at_patches.shape == (1, 12, 32)
