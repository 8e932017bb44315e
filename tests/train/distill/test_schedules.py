"""Schedules have one value per optimizer step, and the published ends."""

import math

import numpy as np
import pytest
from dino_reference import small_module

from regard.train.distill.schedules import cosine, line


def published(base: float, final: float, epochs: int, steps: int, warmup_epochs: int = 0) -> np.ndarray:
    warmup = np.linspace(0, base, warmup_epochs * steps) if warmup_epochs else np.array([])
    places = np.arange(epochs * steps - warmup_epochs * steps)
    return np.concatenate((warmup, final + 0.5 * (base - final) * (1 + np.cos(np.pi * places / len(places)))))


@pytest.mark.parametrize(("base", "final", "warmup"), [(5e-4, 1e-6, 3), (0.04, 0.4, 0), (0.996, 1.0, 0)])
def test_the_cosine_is_the_published_one(base: float, final: float, warmup: int) -> None:
    ours = cosine(base, final, 10 * 7, warmup * 7)
    np.testing.assert_allclose(ours, published(base, final, 10, 7, warmup), rtol=1e-12)


def test_lengths_and_ends() -> None:
    values = cosine(1.0, 0.1, 100, 10)
    assert len(values) == 100
    assert (values[0], values[9], values[10]) == (0.0, 1.0, 1.0)
    assert values[-1] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90)))
    assert cosine(1.0, 0.1, 4, 9) == [0.0, 1 / 3, 2 / 3, 1.0]  # a warm-up longer than the run
    assert len(cosine(1.0, 0.0, 1)) == 1


def test_the_temperature_rises_by_epoch_to_its_peak() -> None:
    assert line(0.04, 0.07, 4, 6) == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    assert line(0.04, 0.07, 0, 3) == [0.07] * 3
    assert len(line(0.04, 0.07, 30, 5)) == 5


def test_a_run_has_a_value_of_each_for_every_optimizer_step() -> None:
    module = small_module(tau_warmup_epochs=3.0, warmup_epochs=1.0, freeze_epochs=1.5)
    rates = module.schedules(6, 10)
    assert {name: len(values) for name, values in rates.items()} == dict.fromkeys(rates, 60)
    assert rates["tau"][:10] == [0.04] * 10
    assert rates["tau"][20:] == [0.06] * 40
    assert rates["frozen"] == [1.0] * 15 + [0.0] * 45
    assert (rates["lr"][0], rates["lr"][9]) == (0.0, module.recipe.lr)
    assert rates["momentum"][0] == 0.9
    assert 0.999 < rates["momentum"][-1] < 1.0
    assert rates["weight_decay"][0] == pytest.approx(0.04)
    assert rates["weight_decay"][-1] == pytest.approx(0.4, rel=1e-2)
    by_step = small_module(tau_per="step", tau_warmup_epochs=2.0).schedules(6, 10)["tau"]
    assert len(set(by_step)) == 20
