"""Two processes, whatever holds the weights, train what one would, and leave one kind of checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import vit_run

from regard.train.strategies import strategy_of
from regard.vit import InputError, ViT

RUN: dict[str, Any] = {"epochs": 2}


@pytest.fixture(scope="module")
def runs(vit_toy: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    found = {}
    for name, options in {
        "one": {"batch_size": 8},
        "ddp": {"batch_size": 4, "world": 2},
        "fsdp2": {"batch_size": 4, "world": 2, "trainer": {"strategy": "fsdp2"}},
    }.items():
        out = tmp_path_factory.mktemp(name)
        _, report = vit_toy(out, **RUN, **options)
        assert report is not None
        assert "error" not in report, report
        found[name] = out, report
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_what_one_would(runs: dict[str, Any], strategy: str) -> None:
    (out, report), (alone, expected) = runs[strategy], runs["one"]
    assert (report["steps"], report["score"]) == (expected["steps"], pytest.approx(expected["score"]))
    last = Path("checkpoints", "last.ckpt")
    assert_close(vit_run.weights(out / last), vit_run.weights(alone / last))
    begun = {f"net.{k}": v for k, v in vit_run.Module().net.state_dict().items()}
    moved = vit_run.weights(out / last)
    assert all(not torch.equal(moved[name], value) for name, value in begun.items()), "a weight was not trained"


@pytest.mark.parametrize("strategy", ["one", "ddp", "fsdp2"])
def test_a_checkpoint_of_any_strategy_opens_as_a_plain_vit(runs: dict[str, Any], strategy: str) -> None:
    path = runs[strategy][0] / "checkpoints" / "last.ckpt"
    model = ViT(vit_run.CONFIG)
    saved = vit_run.weights(path)
    model.load_state_dict({name.removeprefix("net."): v for name, v in saved.items() if name.startswith("net.")})
    assert model.classify(torch.randn(2, 3, 16, 24)).shape == (2, 3)


def test_the_module_is_plain_again_after_a_sharded_run(runs: dict[str, Any]) -> None:
    out, report = runs["fsdp2"]
    saved = vit_run.weights(out / "checkpoints" / "last.ckpt")
    net = [saved[f"net.{name}"] for name in vit_run.Module().net.state_dict()]
    assert report["flat"] == torch.cat([value.flatten() for value in net]).tolist()


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2", "fsdp2")])
def test_a_run_under_one_strategy_goes_on_under_another(
    vit_toy: Any, tmp_path: Path, runs: dict[str, Any], first: str, second: str
) -> None:
    common = {**RUN, "batch_size": 4, "world": 2, "save_every_steps": 2}
    code, _ = vit_toy(tmp_path, kill=["batch", 1, 3], trainer={"strategy": first}, **common)
    assert code != 0
    _, report = vit_toy(tmp_path, resume=True, trainer={"strategy": second}, **common)
    assert report is not None
    assert "error" not in report, report
    last = Path("checkpoints", "last.ckpt")
    ended, whole = vit_run.weights(tmp_path / last), vit_run.weights(runs[second][0] / last)
    if first == second:
        assert all(torch.equal(ended[name], whole[name]) for name in whole)
    assert_close(ended, whole)


def test_accumulation_under_sharding_is_the_larger_batch(vit_toy: Any, tmp_path: Path, runs: dict[str, Any]) -> None:
    _, report = vit_toy(tmp_path, **RUN, batch_size=2, world=2, accumulate=2, trainer={"strategy": "fsdp2"})
    assert report is not None
    assert report["steps"] == runs["one"][1]["steps"]
    last = Path("checkpoints", "last.ckpt")
    assert_close(vit_run.weights(tmp_path / last), vit_run.weights(runs["one"][0] / last))


def test_half_precision_keeps_whole_master_weights(vit_toy: Any, tmp_path: Path, runs: dict[str, Any]) -> None:
    options = {"batch_size": 4, "world": 2, "trainer": {"strategy": "fsdp2", "precision": "bf16-mixed"}}
    _, report = vit_toy(tmp_path, **RUN, **options)
    assert report is not None
    assert "error" not in report, report
    saved = vit_run.weights(tmp_path / "checkpoints" / "last.ckpt")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_precisions_that_sharding_cannot_have_are_refused(precision: str) -> None:
    with pytest.raises(InputError, match=f"fsdp2 goes with trainer.precision 32-true or bf16-mixed; {precision}"):
        strategy_of("fsdp2", precision)
    assert strategy_of("ddp", precision) == "ddp"
