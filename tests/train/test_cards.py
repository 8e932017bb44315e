"""The card before a run says what it trains and what that takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from torch import Tensor, nn

from regard.train import cards
from regard.train.cards import told
from regard.train.loop import fit
from regard.train.memory import GIB, MemoryEstimate, estimate


class Carded(toy_run.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def card(self) -> list[tuple[str, str]]:
        return [("data", "40 points in 2 classes")]

    def picture_flops(self) -> float:
        return 4.2e9

    def losses(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


class Data(toy_run.Data):
    def example(self) -> Any:
        return torch.zeros(self.batch_size, toy_run.FEATURES), torch.zeros(self.batch_size, dtype=torch.long)


def said(out: Path, capfd: pytest.CaptureFixture[str], module: Any, data: Any, **trainer: Any) -> list[str]:
    fit(module, data, out=out, epochs=3, seed=1, trainer={"accelerator": "cpu", **trainer})
    return capfd.readouterr().err.splitlines()


def test_a_card_names_model_cost_batch_precision_steps_and_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = said(tmp_path, capfd, Carded(), Data(4), accumulate_grad_batches=2)
    card = dict(line.split(None, 1) for line in lines[:7])
    assert card["data"] == "40 points in 2 classes"
    assert card["parameters"] == "74 trained, 12 kept or averaged"
    assert card["cost"] == "4.2 GFLOPs an image, forward and backward"
    assert card["batch"] == "4 x 1 device x 2 accumulated = 8 images a step"
    assert card["precision"] == "32-true on cpu"
    assert card["steps"] == "5 an epoch, 15 in 3 epochs"
    assert card["memory"].startswith("about ")
    assert "GiB for training on each device" in card["memory"]
    starts = {line.index(text) for line, text in zip(lines[:7], card.values(), strict=True)}
    assert len(starts) == 1, "the texts stand in one column"


def test_the_time_is_told_once_when_some_steps_have_been_timed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "TIMED_BATCHES", 5)
    lines = said(tmp_path, capfd, Carded(), Data(4))
    timed = [line for line in lines if line.startswith("time ")]
    assert len(timed) == 1
    assert re.fullmatch(r"time +about 0:0\d of training to go, validation apart", timed[0])


def test_a_module_without_a_card_prints_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = said(tmp_path, capfd, toy_run.Module(), Data(4))
    assert len(lines) == 3
    assert all(line.startswith("epoch") for line in lines)


def test_any_module_with_losses_is_estimated() -> None:
    module, batch = Carded(), Data(4).example()
    found = estimate(module, batch)
    weights = sum(4 * parameter.numel() for parameter in module.net.parameters())
    assert (found.gradients, found.optimizer) == (weights, 2 * weights)
    assert found.weights >= weights + 4 * 12
    assert found.activations > 0


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "available", lambda accelerator: (2 * GIB, "the GPU"))
    assert "warning" not in told(MemoryEstimate(GIB // 2, 0, 0, 0), "cuda")
    assert "warning: that is more than the 2.0 GiB of the GPU" in told(MemoryEstimate(GIB, GIB, GIB, GIB), "cuda")
