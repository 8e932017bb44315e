"""The monitors measure what they say, and speak of both collapses."""

import math
from typing import Any

import pytest
import torch
from dino_reference import batch_of, small_module

from regard.train.distill.loss import Centre, dino_loss
from regard.train.distill.monitors import CollapseWatch, entropy, feature_spread, measures, rank_me

K = 64


def measured(teacher: torch.Tensor, student: torch.Tensor, tau: float = 0.04) -> tuple[torch.Tensor, dict[str, Any]]:
    q = Centre(K)(teacher, tau)
    loss = dino_loss(student, q).total
    return loss, measures(q, loss, torch.randn(teacher.shape[1], 8), torch.zeros(1, K))


def healthy() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = 0.3 * torch.randn(2, 32, K, generator=generator)
    return z, torch.cat((z, z)) + 0.05 * torch.randn(4, 32, K, generator=generator)


def test_a_healthy_run_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    watch = CollapseWatch(K, patience=5)
    for _ in range(20):
        loss, numbers = measured(*healthy())
        watch.count(loss)
        assert watch.speak(numbers) == []
    assert capsys.readouterr().err == ""


def test_a_planted_uniform_collapse_is_told_once_after_its_patience(capsys: pytest.CaptureFixture[str]) -> None:
    watch = CollapseWatch(K, patience=5)
    said = []
    for _ in range(20):
        loss, numbers = measured(torch.zeros(2, 8, K), 1e-3 * torch.randn(4, 8, K))
        watch.count(loss)
        said.append(watch.speak(numbers))
    assert [len(lines) for lines in said] == [0] * 4 + [1] + [0] * 15
    assert "uniform collapse" in said[4][0]
    assert "tau_teacher" in capsys.readouterr().err


def test_one_step_off_ln_k_starts_the_count_again() -> None:
    watch = CollapseWatch(K, patience=5)
    for step in range(8):
        watch.count(torch.tensor(math.log(K) * (1.01 if step == 4 else 1.0)))
    assert int(watch.pinned) == 3
    assert watch.speak(measured(*healthy())[1]) == []


def test_a_planted_one_hot_collapse_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    one_hot = torch.full((2, 32, K), -1.0)
    one_hot[:, :, 5] = 1.0
    watch = CollapseWatch(K)
    loss, numbers = measured(one_hot, torch.cat((one_hot, one_hot)))
    assert float(loss) < 0.01
    lines = watch.speak(numbers)
    assert any("one-hot collapse" in line for line in lines)
    assert any("same few prototypes" in line for line in lines)
    assert capsys.readouterr().err.count("warning:") == 2
    assert watch.speak(numbers) == []


def test_certain_of_different_prototypes_is_no_single_prototype() -> None:
    teacher = torch.full((2, 32, K), -1.0)
    teacher[:, torch.arange(32), torch.arange(32)] = 1.0
    lines = CollapseWatch(K).speak(measured(teacher, torch.cat((teacher, teacher)))[1])
    assert len(lines) == 1
    assert "one-hot" in lines[0]


def test_measures_are_their_formulas() -> None:
    assert float(entropy(torch.full((4,), 0.25))) == pytest.approx(math.log(4))
    assert float(entropy(torch.tensor([1.0, 0.0]))) == 0.0
    assert float(rank_me(torch.eye(6))) == pytest.approx(6.0)
    assert float(rank_me(torch.ones(6, 4))) == pytest.approx(1.0, abs=1e-4)
    assert float(feature_spread(torch.ones(6, 4))) == pytest.approx(0.0, abs=1e-6)
    assert float(feature_spread(torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)))) > 0.97
    teacher, student = healthy()
    q = Centre(K)(teacher, 0.04)
    loss, numbers = measured(teacher, student)
    logs = [torch.log_softmax(crop / 0.1, -1) for crop in student]
    pairs = [(q[t] * (q[t].log() - logs[s])).sum(-1).mean() for t in range(2) for s in range(4) if s != t]
    assert float(numbers["kl"]) == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)
    assert float(numbers["loss_share"]) == pytest.approx(float(loss) / math.log(K))


def test_a_module_whose_networks_are_blank_meets_ln_k() -> None:
    """What the first monitor looks at is the loss of the step."""
    module = small_module()
    for network in (module.student, module.teacher):
        for layer in network.head.mlp:
            if hasattr(layer, "weight"):
                torch.nn.init.zeros_(layer.weight)
                torch.nn.init.zeros_(layer.bias)
    module.centre.centre.zero_()
    terms = module.terms(batch_of(4), 0, 0)
    assert float(terms["dino"].detach()) == pytest.approx(math.log(24), abs=1e-6)
