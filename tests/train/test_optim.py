import math
from typing import Any

import pytest
import torch
from torch import nn

from regard.crossattn import ImageQA
from regard.train.optim import configure, depth_factors, parameter_groups, warmup_cosine
from regard.vit.lora import add_lora


class Odd(nn.Module):
    """A bit of everything that must not decay, next to what must."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 6))
        self.registers = nn.Parameter(torch.zeros(1, 4, 6))
        self.positions = nn.Parameter(torch.zeros(12, 6))
        self.latent = nn.Parameter(torch.zeros(3, 6))
        self.gate = nn.Parameter(torch.zeros(()))
        self.gamma = nn.Parameter(torch.ones(6))
        self.words = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm((2, 6))
        self.linear = nn.Linear(6, 5)
        self.attention = nn.MultiheadAttention(6, 2)
        self.conv = nn.Conv2d(3, 6, 4)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.words.weight
        self.twin = nn.Linear(6, 5)
        self.twin.weight = self.linear.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)


def names(module: nn.Module, group: dict[str, Any]) -> set[str]:
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    return {by_id[id(parameter)] for parameter in group["params"]}


def test_only_the_weights_of_layers_decay() -> None:
    module = Odd()
    decay, rest = parameter_groups(module, 0.1)
    assert (decay["name"], decay["weight_decay"]) == ("decay", 0.1)
    assert (rest["name"], rest["weight_decay"]) == ("no_decay", 0.0)
    assert names(module, decay) == {
        "linear.weight",
        "conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }


def test_each_trainable_parameter_is_in_exactly_one_group() -> None:
    module = Odd()
    grouped = [id(p) for group in parameter_groups(module, 0.1) for p in group["params"]]
    trainable = [id(p) for p in module.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trainable)


def test_a_weight_tied_to_an_embedding_does_not_decay() -> None:
    module = Odd()
    assert "words.weight" in names(module, parameter_groups(module, 0.1)[1])


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    factor = warmup_cosine(100, 10, final=0.2)
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(55) == pytest.approx(0.6)
    assert factor(100) == factor(1000) == pytest.approx(0.2)
    falling = [factor(step) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


def test_a_run_shorter_than_its_warm_up_does_not_divide_by_zero() -> None:
    assert [warmup_cosine(2, 5)(step) for step in range(8)][4:] == [1.0, 1.0, 0.0, 0.0]


def test_the_scheduler_moves_by_optimizer_step() -> None:
    made = configure(nn.Linear(2, 2), lr=0.5, weight_decay=0.1, total_steps=8, warmup_steps=2)
    assert made["lr_scheduler"]["interval"] == "step"
    assert [group["lr"] for group in made["optimizer"].param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_learning_rate_of_a_run_follows_the_schedule(toy: Any, tmp_path: Any, accumulate: int) -> None:
    """Ten batches, of which three make a step: four steps an epoch, the last one of a single batch."""
    toy(tmp_path, accumulate=accumulate, epochs=2, trainer={"log_every_n_steps": 1})
    header, *rows = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("train/lr")
    rates = {int(row.split(",")[0]): row.split(",")[column] for row in rows if row.split(",")[column]}
    total = 2 * math.ceil(10 / accumulate)
    assert list(rates) == list(range(total))
    expected = [0.01 * warmup_cosine(total, 3)(step) for step in range(total)]
    assert [float(rate) for rate in rates.values()] == pytest.approx(expected, rel=1e-6)


# Layer-wise learning rate


def model_with_decoder(gate: bool = False) -> ImageQA:
    return ImageQA.preset(
        questions=["what is it?"],
        answers=["a", "b"],
        vit={"image_size": (16, 16), "dim": 16, "heads": 2, "depth": 3, "registers": 1},
        text={"dim": 16, "heads": 2, "depth": 2, "gate": gate},
        head="rank",
        decoder={"text": {"dim": 16, "heads": 2, "depth": 1}},
    )


def test_the_learning_rate_falls_from_layer_to_layer_towards_the_input() -> None:
    model = model_with_decoder()
    own = depth_factors(model, 0.5)
    factors = {name: own.get(parameter, 1.0) for name, parameter in model.named_parameters()}
    expected = {
        "vit.tokenizer.proj.weight": 0.5**4,
        "vit.cls": 0.5**4,
        "vit.registers": 0.5**4,
        "vit.positions": 0.5**4,
        "vit.blocks.0.attn.to_q.weight": 0.5**3,
        "vit.blocks.2.mlp.fc2.bias": 0.5,
        "vit.norm.weight": 1.0,
        "text.words.weight": 0.5**3,
        "text.positions": 0.5**3,
        "text.layers.0.cross.attn.to_k.weight": 0.5**2,
        "text.layers.1.norm3.bias": 0.5,
        "text.norm.weight": 1.0,
        "decoder.body.words.weight": 0.5**2,
        "decoder.body.layers.0.attn.out.weight": 0.5,
        "decoder.transform.weight": 1.0,
        "decoder.out.weight": 1.0,
        "decoder.bias": 1.0,
    }
    assert {name: factors[name] for name in expected} == expected


def test_new_parts_have_the_whole_learning_rate() -> None:
    model = model_with_decoder(gate=True)
    own = depth_factors(model, 0.5)
    assert own[model.text.layers[0].cross.gate] == own[model.text.layers[0].norm2.weight] == 1.0
    assert own[model.text.layers[0].attn.to_q.weight] == 0.25
    own = depth_factors(model, 0.5, new=("text", "decoder"))
    assert {own.get(parameter, 1.0) for part in (model.text, model.decoder) for parameter in part.parameters()} == {1.0}
    add_lora(model.vit)
    own = depth_factors(model, 0.5)
    assert {own[p] for p in model.vit.parameters() if p.requires_grad} == {1.0}


def test_depth_and_decay_group_parameters_together() -> None:
    model = model_with_decoder()
    made = configure(model, lr=0.1, weight_decay=0.3, total_steps=9, warmup_steps=1, factors=depth_factors(model, 0.5))
    groups = made["optimizer"].param_groups
    of = {id(p): group for group in groups for p in group["params"]}
    assert len(of) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for parameter, lr, decay in (
        (model.vit.blocks[0].attn.to_q.weight, 0.1 * 0.5**3, 0.3),
        (model.vit.blocks[0].attn.to_q.bias, 0.1 * 0.5**3, 0.0),
        (model.vit.cls, 0.1 * 0.5**4, 0.0),
        (model.decoder.out.weight, 0.1, 0.3),
    ):
        assert of[id(parameter)]["lr"] == pytest.approx(lr)
        assert of[id(parameter)]["weight_decay"] == decay
    assert groups[0]["lr"] == 0.1
    plain = parameter_groups(model, 0.3)
    assert [group["name"] for group in plain] == ["decay", "no_decay"]
