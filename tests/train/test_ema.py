"""The running average of the weights: its arithmetic, and that it is no part of what is trained."""

import pytest
import torch
from torch import nn

from regard.train.ema import WeightAverage
from regard.vit.errors import InputError


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_it_is_the_exponential_average_with_a_warm_up() -> None:
    net = network()
    average = WeightAverage(net, 0.9)
    expected = [p.detach().double() for p in net.parameters()]
    for step in range(1, 100):
        for parameter in net.parameters():
            parameter.data += torch.randn_like(parameter)
        average.update(net, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = [
            decay * mean + (1 - decay) * parameter.detach().double()
            for mean, parameter in zip(expected, net.parameters(), strict=True)
        ]
    for mean, parameter in zip(expected, average.network.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), mean, rtol=1e-5, atol=1e-5)


def test_it_leaves_its_start_fast_and_ends_at_its_decay() -> None:
    average = WeightAverage(network(), 0.999)
    decays = [average.decay_at(step) for step in range(1, 20_000)]
    assert decays[0] == pytest.approx(2 / 11)
    assert decays == sorted(decays)
    assert decays[-1] == 0.999


def test_it_takes_over_what_is_counted_rather_than_trained() -> None:
    net = network()
    average = WeightAverage(net, 0.9)
    net(torch.randn(8, 3) + 5)
    average.update(net, 1)
    for name, buffer in average.network.named_buffers():
        assert torch.equal(buffer, net.get_buffer(name)), name


def test_it_stays_in_inference_mode_without_gradients_and_leaves_the_network_alone() -> None:
    net = network()
    before = [p.detach().clone() for p in net.parameters()]
    average = WeightAverage(net, 0.5)
    average.train()
    assert not any(part.training for part in average.modules())
    assert not any(p.requires_grad for p in average.parameters())
    average.update(net, 3)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_impossible_decay_is_told(decay: float) -> None:
    with pytest.raises(InputError, match="the decay must lie in"):
        WeightAverage(network(), decay)


def test_half_precision_weights_are_refused_rather_than_left_where_they_are() -> None:
    net = network().bfloat16()
    with pytest.raises(InputError, match="half-precision weights cannot be averaged"):
        WeightAverage(net, 0.9999).update(net, 1)
