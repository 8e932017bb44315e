"""The head is DINO's, and survives what a module goes through."""

import copy
import warnings

import torch
import torch.nn.functional as F
from dino_reference import noisy

from regard.train.distill.head import ProjectionHead


def head(**options: bool) -> ProjectionHead:
    torch.manual_seed(0)
    return ProjectionHead(10, 30, hidden=16, bottleneck=8, **options)


def test_its_logits_are_cosines_times_the_norms_of_the_rows() -> None:
    net = noisy(head())
    x = torch.randn(5, 10)
    y = F.normalize(net.mlp(x), dim=-1)
    expected = y @ F.normalize(net.directions, dim=1).T * net.norms.T
    torch.testing.assert_close(net(x), expected)
    with torch.no_grad():
        net.norms.fill_(1.0)
    assert net(x).abs().max() <= 1 + 1e-6


def test_it_begins_as_published() -> None:
    net = ProjectionHead(384, 4096)
    shapes = [tuple(layer.weight.shape) for layer in net.mlp if hasattr(layer, "weight")]
    assert shapes == [(2048, 384), (2048, 2048), (256, 2048)]
    assert torch.equal(net.norms, torch.ones(4096, 1))
    assert net.last_layer.bias is None
    for layer in (net.mlp[0], net.mlp[2], net.mlp[4]):
        assert abs(float(layer.weight.detach().std()) - 0.02) < 1e-3
        assert not layer.bias.any()


def test_the_norms_are_trained_only_when_asked() -> None:
    fixed, free = head(), head(fixed_norm=False)
    for net in (fixed, free):
        net(torch.randn(5, 10)).square().mean().backward()
        assert net.directions.grad.any()
    assert fixed.norms.grad is None
    assert free.norms.grad.any()


def test_it_can_be_copied_after_a_forward_pass() -> None:
    net = noisy(head())
    x = torch.randn(5, 10)
    net(x).sum().backward()
    other = copy.deepcopy(net)
    assert torch.equal(other(x), net(x))
    with torch.no_grad():
        other.directions.add_(1.0)
    assert not torch.allclose(other(x), net(x))


def test_weights_under_the_names_of_published_checkpoints_load() -> None:
    net, other = noisy(head()), head()
    names = {"original0": "weight_g", "original1": "weight_v"}
    old = {}
    for name, value in net.state_dict().items():
        for new, published in names.items():
            name = name.replace(f"parametrizations.weight.{new}", published)
        old[name] = value
    assert {"last_layer.weight_g", "last_layer.weight_v"} <= old.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(old)
    x = torch.randn(5, 10)
    assert torch.equal(other(x), net(x))


def test_it_normalises_in_single_precision_under_autocast() -> None:
    net = noisy(head(), scale=1.0)
    seen = []
    net.last_layer.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(torch.randn(5, 10))
    assert logits.dtype == torch.bfloat16
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0].norm(dim=1), torch.ones(5), rtol=1e-6, atol=0)
