"""One optimizer that is two: Muon on the matrices inside the blocks, AdamW on the rest."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from regard.train.muon import MuonWithAdamW, hidden_matrices
from regard.train.optim import configure, depth_factors
from regard.vit import ViT
from regard.vit.errors import InputError


def small(seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    return ViT.preset(
        "tiny", image_size=(12, 8), patch_size=4, dim=16, depth=2, heads=2, hidden_dim=24, registers=1, classes=3
    )


def made(vit: ViT, factors: Any = None) -> dict[str, Any]:
    make = functools.partial(MuonWithAdamW, hidden=hidden_matrices(vit.blocks), muon_lr=0.02)
    return configure(vit, lr=1e-3, weight_decay=0.1, total_steps=20, warmup_steps=2, factors=factors, make=make)


def step(vit: ViT, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    vit.classify(torch.randn(5, 3, 12, 8)).square().sum().backward()
    optimizer.step()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    vit = small()
    optimizer = made(vit)["optimizer"]
    names = {id(p): name for name, p in vit.named_parameters()}
    by_group = {group["name"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert set(by_group) == {"muon decay", "decay", "no_decay"}
    assert by_group["muon decay"] == {
        name for name, p in vit.named_parameters() if name.startswith("blocks.") and p.ndim == 2
    }
    assert by_group["decay"] == {"tokenizer.proj.weight", "head.weight"}
    assert sum(len(group) for group in by_group.values()) == len(names)


def test_each_part_moves_as_its_own_optimizer_would_move_it() -> None:
    vit, twin = small(), small()
    whole = made(vit)
    hidden = hidden_matrices(twin.blocks)
    rest = [p for p in twin.parameters() if not any(p is q for q in hidden)]
    decay = [p for name, p in twin.named_parameters() if name in ("tokenizer.proj.weight", "head.weight")]
    others = [p for p in rest if not any(p is q for q in decay)]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    both: list[torch.optim.Optimizer] = [muon, adamw]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, whole["lr_scheduler"]["scheduler"].lr_lambdas[0]) for o in both]
    for number in range(6):
        step(vit, whole["optimizer"], number)
        whole["lr_scheduler"]["scheduler"].step()
        torch.manual_seed(number)
        twin.zero_grad()
        twin.classify(torch.randn(5, 3, 12, 8)).square().sum().backward()
        for own, schedule in zip(both, schedules, strict=True):
            own.step()
            schedule.step()
    for (name, mine), theirs in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_its_state_goes_through_a_checkpoint_bit_for_bit() -> None:
    vit = small()
    optimizer = made(vit)["optimizer"]
    for number in range(3):
        step(vit, optimizer, number)
    twin = copy.deepcopy(vit)
    resumed = made(twin)["optimizer"]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in resumed.param_groups:
        group["lr"] *= 0.5
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for number in range(3, 6):
        step(vit, optimizer, number)
        step(twin, resumed, number)
    for (name, mine), theirs in zip(vit.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    momenta = [state for state in resumed.state.values() if "momentum_buffer" in state]
    assert len(momenta) == len(hidden_matrices(vit.blocks))


def test_a_schedule_and_depth_factors_reach_both_parts() -> None:
    vit = small()
    whole = made(vit, depth_factors(vit, 0.5))
    rates = {group["name"]: group["lr"] for group in whole["optimizer"].param_groups}
    assert rates["muon decay x 0.5"] == pytest.approx(0.02 * 0.5 * 0.5)  # the first of two steps of warm-up
    assert rates["decay x 0.125"] == pytest.approx(1e-3 * 0.125 * 0.5)
    whole["optimizer"].step()
    whole["lr_scheduler"]["scheduler"].step()
    rates = {group["name"]: group["lr"] for group in whole["optimizer"].param_groups}
    assert rates["muon decay x 0.5"] == pytest.approx(0.02 * 0.5)


def test_a_closure_is_evaluated_once() -> None:
    vit = small()
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 1.5

    assert made(vit)["optimizer"].step(closure) == 1.5
    assert calls == [True]


def test_an_older_torch_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"needs torch 2\.9"):
        made(small())


def test_nothing_for_muon_to_do_is_told() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(InputError, match="no trainable matrix inside the blocks"):
        MuonWithAdamW([{"params": list(net.parameters())}], hidden=[], muon_lr=0.02, lr=1e-3)
