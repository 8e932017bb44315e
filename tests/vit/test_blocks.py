"""The practical parts: activations, LayerScale, stochastic depth, pooling."""

import math

import pytest
import torch

from regard.vit.blocks import Block, DropPath, LayerScale, Mlp
from regard.vit.config import ViTConfig
from regard.vit.pooling import Pool
from regard.vit.tokens import Tokens

ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_equals_the_formula_of_its_activation(noisy, name):
    mlp = noisy(Mlp(4, 6, name)).double()
    x = 2 * torch.randn(3, 4).double()
    inner = (x @ mlp.fc1.weight.T + mlp.fc1.bias).detach().apply_(ACTIVATIONS[name])
    torch.testing.assert_close(mlp(x), inner @ mlp.fc2.weight.T + mlp.fc2.bias, rtol=1e-12, atol=1e-12)


def test_swiglu_gates_with_a_third_projection(noisy):
    mlp = noisy(Mlp(4, 6, "swiglu")).double()
    x = torch.randn(3, 4).double()
    gate, value = x @ mlp.gate.weight.T + mlp.gate.bias, x @ mlp.fc1.weight.T + mlp.fc1.bias
    inner = gate / (1 + (-gate).exp()) * value
    torch.testing.assert_close(mlp(x), inner @ mlp.fc2.weight.T + mlp.fc2.bias, rtol=1e-12, atol=1e-12)


def test_layer_scale_multiplies_each_channel(noisy):
    scale = noisy(LayerScale(5, 0.1))
    x = torch.randn(2, 3, 5)
    assert torch.equal(scale(x), x * scale.gamma)


def test_a_block_is_two_scaled_residual_branches(noisy):
    block = noisy(Block(ViTConfig(dim=8, heads=2, depth=1, layer_scale=0.1), 0.0)).eval()
    x = torch.randn(2, 5, 8)
    y = x + block.scale1.gamma * block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), y + block.scale2.gamma * block.mlp(block.norm2(y)))


def test_a_layer_scale_of_zero_is_a_layer_scale():
    block = Block(ViTConfig(dim=8, heads=2, depth=1, layer_scale=0.0), 0.0)
    assert isinstance(block.scale1, LayerScale)
    assert not isinstance(Block(ViTConfig(dim=8, heads=2, depth=1), 0.0).scale1, LayerScale)


def test_drop_path_drops_whole_samples_and_keeps_the_expectation():
    drop = DropPath(0.25)
    x = torch.rand(4000, 3, 2) + 1
    factor = drop(x) / x
    per_sample = factor.flatten(1)
    torch.testing.assert_close(per_sample, per_sample[:, :1].expand_as(per_sample))
    kept = per_sample[:, 0] > 0
    torch.testing.assert_close(per_sample[kept], torch.full_like(per_sample[kept], 1 / 0.75))
    # deviation of the share kept: sqrt(.25 * .75 / 4000) = 0.0068
    assert abs(kept.float().mean().item() - 0.75) < 4 * 0.0068
    assert torch.equal(drop.eval()(x), x)
    assert DropPath(0.0)(x) is x


def test_drop_path_grows_linearly_with_depth_and_acts_in_training_only(vit):
    model = vit(drop_path=0.6)
    assert [round(block.drop_path.rate, 6) for block in model.blocks] == [0.0, 0.3, 0.6]
    images = torch.randn(1, 3, 24, 40)
    assert torch.equal(model(images).cls, model(images).cls)
    model.train()
    assert len({model(images).cls[0, 0].item() for _ in range(30)}) > 1


# pooling -------------------------------------------------------------------------------------------------------------


def tokens(dim: int = 8) -> Tokens:
    return Tokens(torch.randn(2, dim), torch.randn(2, 3, dim), torch.randn(2, 6, dim), (2, 3))


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls+mean", "map"])
def test_pooling_reads_the_tokens_it_names_and_never_a_register(noisy, pooling):
    pool = noisy(Pool(ViTConfig(dim=8, heads=2, depth=1, pooling=pooling)))
    t = tokens()
    vector = pool(t)
    assert vector.shape == (2, 16 if pooling == "cls+mean" else 8)
    assert torch.equal(pool(Tokens(t.cls, t.registers + 9, t.patches, t.grid)), vector)
    assert torch.equal(pool(Tokens(t.cls + 1, t.registers, t.patches, t.grid)), vector) == ("cls" not in pooling)
    assert torch.equal(pool(Tokens(t.cls, t.registers, t.patches + 1, t.grid)), vector) == (pooling == "cls")
    mean = torch.stack([t.patches[:, i] for i in range(6)]).sum(0) / 6
    if pooling != "map":
        want = {"cls": t.cls, "mean": mean, "cls+mean": torch.cat((t.cls, mean), dim=1)}[pooling]
        torch.testing.assert_close(vector, want)


def test_map_pooling_is_one_learned_query_asking_the_patches(noisy):
    pool = noisy(Pool(ViTConfig(dim=8, heads=2, depth=1, pooling="map"))).asker
    patches = torch.randn(2, 6, 8)
    asked = torch.stack([pool.attn(pool.latent[None, None], patches[i : i + 1])[0, 0] for i in range(2)])
    torch.testing.assert_close(pool(patches), asked + pool.mlp(pool.norm(asked)))
    torch.testing.assert_close(pool(patches[:, [3, 1, 0, 5, 2, 4]]), pool(patches))
