"""Blocks are compiled in place: one graph per resolution for all of them, and nothing else changes."""

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
import vit_run
from torch import nn
from torch._dynamo.utils import counters

from regard.train import module as module_of_all
from regard.train.compiling import RateTensor, blocks_of, compile_blocks
from regard.train.loop import fit
from regard.vit import ViT
from regard.vit.blocks import DropPath
from regard.vit.config import ViTConfig

CONFIG = ViTConfig(image_size=(16, 24), patch_size=8, dim=16, heads=2, depth=4, registers=1, layer_scale=0.5)
DROPPING = ViTConfig(**{**vars(CONFIG), "drop_path": 0.4})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def step(model: ViT, *sizes: tuple[int, int]) -> None:
    for size in sizes:
        model(torch.randn(2, 3, *size)).patches.square().sum().backward()


@pytest.mark.parametrize("config", [CONFIG, DROPPING], ids=["plain", "with drop path"])
def test_two_resolutions_make_two_graphs_for_all_blocks_and_no_more_later(config: ViTConfig) -> None:
    student, teacher = vit_run.random_vit(config), vit_run.random_vit(config).eval()
    assert compile_blocks([student, teacher], backend="eager") == 8
    step(student, (16, 24), (16, 8))
    assert graphs() == 2
    with torch.no_grad():
        teacher(torch.randn(2, 3, 16, 24))
        student.eval()(torch.randn(2, 3, 16, 24))
    student.train()
    warm = graphs()
    # The teacher's graph, in inference mode and without gradients, is also that of the student's validation.
    assert warm == 3
    assert not counters["graph_break"]
    for _ in range(3):
        step(student, (16, 8), (16, 24))
        with torch.no_grad():
            teacher(torch.randn(2, 3, 16, 24))
            student.eval()(torch.randn(2, 3, 16, 24))
        student.train()
    assert graphs() == warm
    assert not counters["frames"].get("skipped")


def test_a_compiled_network_computes_the_same() -> None:
    model = vit_run.random_vit(CONFIG)
    compiled = copy.deepcopy(model)
    compile_blocks([compiled])
    images = torch.randn(2, 3, 16, 24)
    found = []
    for network in (model, compiled):
        out = network(images).patches
        out.square().mean().backward()
        found.append((out, [p.grad for p in network.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
    assert graphs() == 1


def test_names_and_classes_stay_as_they_were() -> None:
    model = vit_run.random_vit(DROPPING)
    before, kinds = list(model.state_dict()), [type(block) for block in model.blocks]
    compile_blocks([model], backend="eager")
    assert list(model.state_dict()) == before
    assert [type(block) for block in model.blocks] == kinds
    model.load_state_dict(vit_run.random_vit(DROPPING).state_dict())
    assert compile_blocks([model], backend="eager") == 0, "it was compiled a second time"


def test_shared_blocks_are_found_once() -> None:
    model = vit_run.random_vit(CONFIG)
    assert len(blocks_of([model, nn.Sequential(model)])) == 4


@pytest.mark.parametrize("make", [DropPath, RateTensor])
def test_both_kinds_of_drop_path_drop_as_often_and_keep_the_mean(make: Callable[[float], nn.Module]) -> None:
    torch.manual_seed(0)
    out = make(0.3)(torch.ones(20_000, 2, 3))
    assert torch.equal(out, out[:, :1, :1].expand_as(out)), "a sample is kept or dropped as a whole"
    assert sorted(out.unique().tolist()) == [0.0, pytest.approx(1 / 0.7)]
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.015)
    assert torch.equal(make(0.3).eval()(out), out)


def test_a_compiled_run_trains_what_an_eager_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_all, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
    ends = []
    for compiled in (False, True):
        module = vit_run.Module()
        out = tmp_path / str(compiled)
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "limit_train_batches": 3}
        fit(module, vit_run.Data(8), out=out, epochs=1, seed=toy_run.SEED, trainer=quiet, compile=compiled)
        ends.append(vit_run.weights(out / "checkpoints" / "last.ckpt"))
        assert bool(graphs()) == compiled
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_compiled_blocks_can_be_sharded(vit_toy: Any, tmp_path: Path) -> None:
    _, plain = vit_toy(tmp_path / "plain", epochs=1, batch_size=4, world=2)
    options = {"epochs": 1, "batch_size": 4, "world": 2, "trainer": {"strategy": "fsdp2"}}
    _, report = vit_toy(tmp_path / "compiled", compile=True, **options)
    assert report is not None
    assert "error" not in report, report
    torch.testing.assert_close(torch.tensor(report["flat"]), torch.tensor(plain["flat"]), rtol=1e-3, atol=1e-5)
