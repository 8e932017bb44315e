"""The eager CPU path: the numbers of the ordinary lines, and nothing that hangs on a module is passed by."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from regard.vit import fused
from regard.vit.blocks import Block

KINDS = {
    "plain": {},
    "layer scale": dict(layer_scale=0.1),
    "rope": dict(positions="rope", registers=2, layer_scale=0.1),
    "learned and rope": dict(positions="learned+rope", qk_norm=True),
    "swiglu and inner norms": dict(activation="swiglu", mlp_norm=True, attn_norm=True),
    "tanh gelu": dict(activation="gelu_tanh", mlp_norm=True),
    "quick gelu": dict(activation="quick_gelu", pre_norm=True),
    "drop path": dict(drop_path=0.3),
}
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=[name.replace(" ", "-") for name in KINDS])
PARTS = ["attn", "mlp", "attn.out", "attn.to_q", "mlp.fc1", "mlp.act", "mlp.fc2", "scale1", "scale2", "drop_path"]


@pytest.fixture(autouse=True)
def _where_it_runs(monkeypatch):
    """Small tensors are large, and nothing records gradients: elsewhere a test would only see the ordinary lines."""
    monkeypatch.setattr(fused, "LARGE", 0)
    with torch.no_grad():
        yield


@pytest.fixture
def ordinary(monkeypatch):
    """Calls a function with the fused path switched off."""

    def call(work, *args):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "pays", lambda x: False)
            return work(*args)

    return call


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 40)


def sequence(model, images: Tensor) -> Tensor:
    tokens = model(images)
    cls = [] if tokens.cls is None else [tokens.cls[:, None]]
    return torch.cat([*cls, tokens.registers, tokens.patches], dim=1)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# the same numbers ----------------------------------------------------------------------------------------------------


@OF_EACH_KIND
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_gives_the_numbers_of_the_ordinary_lines(vit, images, ordinary, kind, mode):
    model = vit(**kind)
    with mode():
        assert model.blocks[0]._fuses(torch.randn(1, 2, 32))
        assert distance(sequence(model, images), ordinary(sequence, model, images)) < 1e-6


def test_where_gradients_are_recorded_the_ordinary_lines_run(vit):
    block, x = vit().blocks[0], torch.randn(1, 2, 32)
    assert block._fuses(x)
    with torch.enable_grad():
        assert not block._fuses(x)  # the sum inside the product makes a training step slower


def test_layers_that_were_handed_out_keep_their_numbers(vit, images):
    model = vit(layer_scale=None)
    with torch.no_grad():
        passing = [(x, x.clone()) for x, _ in model.layers(images)]
    for x, as_it_was in passing:
        assert torch.equal(x, as_it_was)
    images_before = images.clone()
    model.intermediates(images, "all")
    assert torch.equal(images, images_before)


def test_stochastic_depth_draws_as_the_ordinary_lines_do(vit, images, ordinary):
    model = vit(drop_path=0.5).train()

    def drawn(model, images) -> Tensor:
        torch.manual_seed(3)
        return sequence(model, images)

    assert distance(drawn(model, images), ordinary(drawn, model, images)) < 1e-6
    assert distance(sequence(model, images), sequence(model, images)) > 1e-2


def test_new_weights_count_at_once(vit, images):
    model, other = vit(), vit()
    with torch.no_grad():
        before = sequence(model, images)
        model.blocks[1].mlp.fc2.weight.mul_(2)
        model.blocks[1].attn.out.bias.data = torch.ones(32)
        changed = sequence(model, images)
        assert not torch.allclose(changed, before)
        model.load_state_dict(other.state_dict())
        assert torch.equal(sequence(model, images), sequence(other, images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_the_ordinary_lines(vit, images, ordinary, dtype):
    model = vit().to(dtype)
    with torch.no_grad():
        assert torch.equal(sequence(model, images.to(dtype)), ordinary(sequence, model, images.to(dtype)))


def test_autocast_takes_the_ordinary_lines(vit, images, ordinary):
    model = vit()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sequence(model, images), ordinary(sequence, model, images))


def test_an_empty_batch_gives_empty_tokens(vit):
    with torch.no_grad():
        assert vit()(torch.randn(0, 3, 16, 40)).patches.shape == (0, 10, 32)


# nothing is passed by ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_sees_what_its_module_gives(vit, images, ordinary, name):
    model = vit(layer_scale=0.1)

    def seen(model) -> list[Tensor]:
        outputs: list[Tensor] = []
        hook = model.blocks[1].get_submodule(name).register_forward_hook(lambda m, i, output: outputs.append(output))
        with torch.no_grad():
            model(images)
        hook.remove()
        return outputs

    got, want = seen(model), ordinary(seen, model)
    assert want
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-6


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_can_change_what_its_module_gives(vit, images, ordinary, name):
    model = vit(layer_scale=0.1)
    with torch.no_grad():
        before = sequence(model, images)
        model.blocks[1].get_submodule(name).register_forward_hook(lambda m, i, output: output * 1.5)
        changed = sequence(model, images)
        assert distance(changed, before) > 1e-3
        assert distance(changed, ordinary(sequence, model, images)) < 1e-6


def test_hooks_on_all_modules_see_every_linear_layer(vit, images):
    model, seen = vit(), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
    with torch.no_grad():
        model(images)
    hook.remove()
    assert seen.count("Linear") == 1 + 3 * 6
    assert seen.count("Mlp") == seen.count("Attention") == 3


class Adapter(nn.Module):
    """A low-rank adapter around a Linear, as fine-tuning libraries put it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2)
        self.up = nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def with_adapter(parent: nn.Module, name: str) -> None:
    setattr(parent, name, Adapter(getattr(parent, name)))


def with_subclass(parent: nn.Module, name: str) -> None:
    old = getattr(parent, name)
    new = Doubled(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    setattr(parent, name, new)


def with_parametrisation(parent: nn.Module, name: str) -> None:
    parametrize.register_parametrization(getattr(parent, name), "weight", Twice())


def with_own_forward(parent: nn.Module, name: str) -> None:
    layer = getattr(parent, name)
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 1.5


@pytest.mark.parametrize("change", [with_adapter, with_subclass, with_parametrisation, with_own_forward])
@pytest.mark.parametrize("name", ["attn.out", "attn.to_v", "mlp.fc1", "mlp.fc2"])
def test_a_layer_that_was_replaced_takes_part(vit, images, ordinary, change, name):
    model = vit()
    with torch.no_grad():
        before = sequence(model, images)
        parent, _, last = name.rpartition(".")
        change(model.blocks[1].get_submodule(parent), last)
        changed = sequence(model, images)
        assert distance(changed, before) > 1e-3
        assert distance(changed, ordinary(sequence, model, images)) < 1e-6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_takes_part(vit, images):
    model = vit()
    with torch.no_grad():
        exact = sequence(model, images)
        torch.ao.quantization.quantize_dynamic(model.blocks, {nn.Linear}, dtype=torch.qint8, inplace=True)
        rounded = sequence(model, images)
    assert 1e-4 < distance(rounded, exact) < 0.2


def test_a_replaced_activation_takes_part(vit, images, ordinary):
    model = vit()
    with torch.no_grad():
        before = sequence(model, images)
        model.blocks[0].mlp.act = nn.ReLU()
        assert distance(sequence(model, images), before) > 1e-3
        assert distance(sequence(model, images), ordinary(sequence, model, images)) < 1e-6


# beside other machinery ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks.0.attn.out.weight", "blocks.1.mlp.fc2.bias", "blocks.2.mlp.fc1.weight"])
def test_an_ensemble_over_one_weight_maps(vit, images, name):
    model = vit()
    weights = torch.stack([model.get_parameter(name) * factor for factor in (1.0, 2.0, 3.0)]).detach()

    def patches(weight: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: weight}, (images,)).patches

    with torch.no_grad():
        together, singly = torch.func.vmap(patches)(weights), torch.stack([patches(w) for w in weights])
    torch.testing.assert_close(together, singly, rtol=1e-4, atol=1e-5)


def test_forward_mode_derivatives_are_right(vit):
    model, images, direction = vit().double(), torch.randn(1, 3, 16, 24).double(), torch.randn(1, 3, 16, 24).double()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward-mode derivative
        _, slope = torch.func.jvp(lambda x: model(x).patches, (images,), (direction,))
        step = 1e-6
        numeric = (model(images + step * direction).patches - model(images - step * direction).patches) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-6)


def test_forward_mode_tangents_are_carried(vit, images, ordinary):
    model, direction = vit(), torch.randn_like(images)

    def slope(model) -> Tensor:
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(images, direction)).patches).tangent
            assert tangent is not None
            return tangent.clone()

    assert distance(slope(model), ordinary(slope, model)) < 1e-5


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model_gives_the_same_tokens(vit, images):
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit()

        def forward(self, images: Tensor) -> Tensor:
            return self.vit(images).patches

    model = Patches().eval()
    with torch.no_grad():
        traced = torch.jit.trace(model, images, check_trace=False)
        assert not [name for name in ("addmm_", "gelu_") if name in str(traced.inlined_graph)]
        other = torch.randn_like(images)
        torch.testing.assert_close(traced(other), model(other), rtol=1e-4, atol=1e-5)


def test_training_works_after_inference_mode_saw_the_same_size(vit, images):
    model = vit(positions="rope")
    with torch.inference_mode():
        first = model(images).patches
    with torch.enable_grad():
        second = model(images).patches
        second.sum().backward()
    assert distance(first, second.detach()) < 1e-6  # the product that knows no gradients rounds otherwise
    assert all(p.grad is not None for p in model.blocks.parameters())


# memory --------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return out


@pytest.mark.parametrize("kind", [{}, dict(positions="rope", registers=3), dict(qk_norm=True)])
@pytest.mark.parametrize("train", [False, True])
def test_no_tensor_is_as_large_as_queries_times_keys(vit, kind, train):
    model = vit(**kind).train(train)
    grid = (24, 40)
    patches = grid[0] * grid[1]
    with torch.set_grad_enabled(train), Largest() as largest:
        model(torch.randn(1, 3, 8 * grid[0], 8 * grid[1])).patches.sum()
    assert largest.elements <= patches * 3 * 8 * 8 + 3 * patches  # the image itself; hidden layers are narrower
    assert largest.elements < patches**2 / 4


def test_blocks_are_built_to_fuse(vit):
    for kind in KINDS.values():
        for block in vit(**kind).blocks:
            assert isinstance(block, Block)
            assert block._fuses(torch.randn(1, 3, 32))
            assert not block._fuses(torch.randn(1, 3, 32).half())


def test_small_tensors_take_the_ordinary_lines(vit, monkeypatch):
    monkeypatch.setattr(fused, "LARGE", 33)
    block = vit().blocks[0]
    assert not block._fuses(torch.randn(1, 1, 32))
    assert block._fuses(torch.randn(1, 2, 32))
