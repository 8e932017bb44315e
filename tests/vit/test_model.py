"""The vision transformer as a whole: any size, named tokens, intermediate layers, initialisation."""

import ast
import copy
from pathlib import Path

import pytest
import torch

from regard.vit.blocks import LayerScale
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT

ROOT = Path(__file__).parents[2]
KINDS = ["learned", "sincos", "rope", "none"]


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("size", [(24, 40), (8, 8), (1, 1), (7, 100), (33, 65), (48, 16)])
def test_any_size_of_image_gives_its_own_grid(vit, positions, size):
    tokens = vit(positions=positions, registers=2)(torch.randn(2, 3, *size))
    grid = tuple(max(1, round(side / 8)) for side in size)
    assert tokens.grid == grid
    assert tokens.patches.shape == (2, grid[0] * grid[1], 32)
    assert tokens.patch_map.shape == (2, 32, *grid)
    assert torch.equal(tokens.patch_map[0, :, -1, 0], tokens.patches[0, (grid[0] - 1) * grid[1]])
    for part in (tokens.cls, tokens.registers, tokens.patches):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("positions", KINDS)
def test_an_image_does_not_depend_on_its_neighbours_in_the_batch(vit, positions):
    model, images = vit(positions=positions), torch.randn(3, 3, 16, 40)
    together = model(images)
    for i in range(3):
        torch.testing.assert_close(model(images[i : i + 1]).patches, together.patches[i : i + 1], rtol=1e-4, atol=1e-5)


def test_an_empty_batch_comes_back_empty(vit):
    tokens = vit(registers=2)(torch.zeros(0, 3, 24, 40))
    assert tokens.cls.shape == (0, 32)
    assert tokens.patches.shape == (0, 15, 32)


def test_without_a_class_token_cls_is_none_and_registers_may_be_none_of_width_d(vit):
    tokens = vit(class_token=False, pooling="mean")(torch.randn(2, 3, 16, 40))
    assert tokens.cls is None
    assert tokens.registers.shape == (2, 0, 32)
    assert tokens.patches.shape == (2, 10, 32)
    assert vit()(torch.randn(2, 3, 16, 40)).registers.shape == (2, 0, 32)


def test_forward_is_embedding_blocks_and_a_norm(vit):
    model = vit(registers=2, layer_scale=0.1, qk_norm=True, positions="rope", pre_norm=True)
    images = torch.randn(2, 3, 16, 40)
    patches, grid = model.tokenizer(images)
    x = torch.cat((model.cls.expand(2, 1, -1), model.registers.expand(2, -1, -1), patches), dim=1)
    x = model.pre_norm(x)
    for block in model.blocks:
        x = block(x, model.rotary(grid, x.device))
    x = model.norm(x)
    tokens = model(images)
    torch.testing.assert_close(tokens.cls, x[:, 0])
    torch.testing.assert_close(tokens.registers, x[:, 1:3])
    torch.testing.assert_close(tokens.patches, x[:, 3:])


# intermediate layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["after_cls", "end"])
def test_the_last_layer_with_its_norm_is_what_forward_returns(vit, place):
    model, images = vit(registers=2, registers_place=place), torch.randn(2, 3, 16, 40)
    (last,) = model.intermediates(images, -1, norm=True)
    final = model(images)
    for name in ("cls", "registers", "patches"):
        assert torch.equal(getattr(last, name), getattr(final, name))
    (raw,) = model.intermediates(images, -1)
    assert not torch.allclose(raw.patches, final.patches)
    torch.testing.assert_close(model.norm(raw.patches), final.patches)


def test_layers_come_in_the_order_asked_for(vit):
    model, images = vit(), torch.randn(1, 3, 16, 40)
    every = model.intermediates(images, "all")
    assert len(every) == 3
    assert len({t.cls[0, 0].item() for t in every}) == 3
    for asked, numbers in (([2, 0], [2, 0]), ([-1, -3, -1], [2, 0, 2]), (1, [1]), ((0,), [0]), ([], [])):
        got = model.intermediates(images, asked)
        assert len(got) == len(numbers)
        for tokens, number in zip(got, numbers, strict=True):
            assert torch.equal(tokens.patches, every[number].patches)
    x, grid = model.embed(images)
    assert torch.equal(every[0].patches, model.name(model.blocks[0](x), grid).patches)


@pytest.mark.parametrize("layers", [3, -4, [0, 3], "first", [0, "1"], 1.5, None])
def test_a_layer_that_does_not_exist_is_named(vit, layers):
    with pytest.raises(InputError, match="layer"):
        vit().intermediates(torch.randn(1, 3, 16, 40), layers)


def test_layer_numbers_may_come_from_numpy_or_torch(vit):
    model = vit()
    assert model.layer_numbers(torch.tensor(-1)) == [2]
    assert model.layer_numbers(torch.arange(3).numpy()[1]) == [1]
    assert model.layer_numbers(list(torch.arange(2))) == [0, 1]
    assert model.layer_numbers(range(3)) == [0, 1, 2]


# house rules ---------------------------------------------------------------------------------------------------------


def roots(source: str) -> list[int]:
    """Lines that take a number's square root: sqrt(n), isqrt(n), n ** 0.5; `v.sqrt()` is of a tensor's values."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("sqrt", "isqrt") and node.args:
                lines.append(node.lineno)
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node.right) in ("0.5", "1 / 2")
        ):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("room", ["vit", "crossattn"])
def test_no_code_takes_a_square_root_of_a_token_count(room):
    assert roots("a = math.isqrt(n)\nb = n ** 0.5\nc = n ** -0.5\nd = n ** (1 / 2)\ne = v.sqrt()") == [1, 2, 4]
    found = {str(path): roots(path.read_text()) for path in (ROOT / room).glob("**/*.py")}
    assert found
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_deep_copies_are_equal_and_apart(vit):
    model = vit(registers=2, layer_scale=0.1)
    twin, images = copy.deepcopy(model), torch.randn(1, 3, 16, 40)
    assert torch.equal(twin(images).patches, model(images).patches)
    with torch.no_grad():
        twin.registers.add_(1)
    assert not torch.equal(twin(images).patches, model(images).patches)


def test_every_parameter_takes_part(vit):
    model = vit(registers=2, layer_scale=0.1, qk_norm=True, activation="swiglu", pooling="map", pre_norm=True)
    model.pool(model(torch.randn(2, 3, 16, 40))).pow(2).sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-6]
    # softmax ignores what all keys share: the last bias on the way to the keys has no effect
    assert [n for n in idle if not n.endswith("norm_k.bias") and n != "pool.asker.attn.to_k.bias"] == []


# initialisation ------------------------------------------------------------------------------------------------------


def test_initial_weights_are_as_documented():
    model = ViT(ViTConfig(dim=64, heads=2, depth=2, registers=4, layer_scale=0.25, qk_norm=True, pooling="map"))
    xavier = (2 / (64 + 64)) ** 0.5
    assert 0.95 * xavier < model.blocks[0].attn.to_q.weight.std() < 1.05 * xavier
    assert 0.28 < model.positions.std() < 0.32
    for token in (model.cls, model.registers, model.pool.asker.latent):
        assert 0.01 < token.std() < 0.03
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        elif "gamma" in name:
            assert (parameter == 0.25).all()
        else:
            assert parameter.abs().max() <= 2
            assert parameter.std() > 0


def test_a_model_built_on_meta_initialises_like_any_other(vit):
    config = ViTConfig(image_size=(24, 40), patch_size=8, dim=32, depth=2, heads=2, registers=2, layer_scale=0.25)
    with torch.device("meta"):
        model = ViT(config)
    assert all(p.is_meta for p in model.parameters())
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # what was empty must be loud
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    direct = ViT(config)
    direct.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    gammas = [m.gamma for m in model.modules() if isinstance(m, LayerScale)]
    assert len(gammas) == 4
    assert all((g == 0.25).all() for g in gammas)
    model.eval()
    assert torch.isfinite(model(torch.randn(1, 3, 16, 40)).patches).all()
    names = [n for n, b in model.named_buffers()]
    assert names == [], "no state that a checkpoint could miss"
    for (name, p), (other, q) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert name == other
        assert p.shape == q.shape


def test_the_same_seed_gives_the_same_model():
    config = ViTConfig(image_size=(24, 40), patch_size=8, dim=32, depth=2, heads=2, registers=2)
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(ViT(config).state_dict())
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])


# precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", KINDS)
def test_bfloat16_autocast_and_bfloat16_weights_run_close_to_fp32(vit, positions):
    model = vit(positions=positions, registers=2, layer_scale=0.1, qk_norm=True)
    images = torch.randn(2, 3, 16, 40)
    exact = model(images).patches
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images).patches
    half = copy.deepcopy(model).bfloat16()(images.bfloat16())
    assert half.cls.dtype == half.patches.dtype == torch.bfloat16
    for rough in (mixed, half.patches):
        assert torch.isfinite(rough).all()
        assert torch.nn.functional.cosine_similarity(rough.float(), exact, dim=-1).min() > 0.99


def test_wrong_channels_are_named(vit):
    with pytest.raises(InputError, match=r"\(B, 3, height, width\)"):
        vit()(torch.zeros(1, 1, 24, 40))
