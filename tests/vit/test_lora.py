"""LoRA on any linear layers: nothing changes at first, only adapters learn, and a merge is the same model."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.vit import ViT, ViTConfig
from regard.vit.errors import InputError
from regard.vit.lora import LoRALinear, add_lora, has_lora, merge_lora

ALL = ("to_q", "to_k", "to_v", "out", "fc1", "fc2")


def noisy_vit(**changes: Any) -> ViT:
    settings: dict[str, Any] = {"image_size": (64, 64), "patch_size": 8, "dim": 64, "depth": 2, "heads": 4, **changes}
    vit = ViT(ViTConfig(**settings))
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vit.eval()


def patches(vit: ViT, images: torch.Tensor) -> torch.Tensor:
    return vit(images).patches


def test_outputs_are_unchanged_to_the_bit_until_the_adapters_are_trained() -> None:
    vit, images = noisy_vit(), torch.randn(16, 3, 64, 64)
    with torch.no_grad():  # large enough for the fused lines
        plain = patches(vit, images)
    traced = patches(vit, images)
    add_lora(vit)
    with torch.no_grad():
        assert torch.equal(patches(vit, images), plain)
    assert torch.equal(patches(vit, images), traced)
    merge_lora(vit)
    add_lora(vit, ALL)
    assert torch.equal(patches(vit, images), traced)


def test_only_the_adapters_learn_and_the_merge_gives_the_same_outputs() -> None:
    vit, images = noisy_vit(), torch.randn(4, 3, 64, 64)
    names = add_lora(vit, ALL, rank=4)
    assert len(names) == 12
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        patches(vit.train(), images).square().mean().backward()
        optimizer.step()
    vit.eval()
    moved = {name for name, tensor in vit.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.{part}" for name in names for part in ("down", "up")}
    adapted = patches(vit, images)
    weight = vit.blocks[0].attn.to_q.weight
    merge_lora(vit)
    torch.testing.assert_close(vit.blocks[0].attn.to_q.weight, weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(patches(vit, images), adapted, atol=2e-6, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(patches(vit, images), adapted, atol=2e-6, rtol=1e-6)
    assert not has_lora(vit)
    assert vit.state_dict().keys() == noisy_vit().state_dict().keys()


def test_a_merged_model_is_saved_and_opened_as_a_plain_one(tmp_path: Any) -> None:
    vit, images = noisy_vit(), torch.randn(2, 3, 64, 64)
    add_lora(vit)
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if name.endswith(".up"):
                parameter.normal_()
    adapted = patches(vit, images)
    merge_lora(vit)
    vit.save_pretrained(tmp_path / "vit")
    opened = ViT.from_pretrained(tmp_path / "vit")
    torch.testing.assert_close(patches(opened, images), adapted, atol=1e-5, rtol=1e-5)
    assert type(opened.blocks[0].attn.to_q) is nn.Linear


def test_names_ends_and_patterns_choose_layers() -> None:
    def chosen(*targets: str) -> list[str]:
        return add_lora(noisy_vit(), targets)

    assert chosen("to_q") == ["blocks.0.attn.to_q", "blocks.1.attn.to_q"]
    assert chosen("attn.out") == ["blocks.0.attn.out", "blocks.1.attn.out"]
    assert chosen("blocks.1.*.to_?") == [f"blocks.1.attn.to_{x}" for x in "qkv"]
    assert chosen("mlp.*", "fc1") == [f"blocks.{i}.mlp.fc{j}" for i in (0, 1) for j in (1, 2)]


def test_everything_but_the_adapters_is_frozen_and_the_scale_is_alpha_over_rank() -> None:
    vit = noisy_vit()
    add_lora(vit, rank=2, alpha=6.0)
    learns = [name for name, parameter in vit.named_parameters() if parameter.requires_grad]
    assert learns
    assert all(name.rpartition(".")[2] in ("down", "up") for name in learns)
    layer = vit.blocks[0].attn.to_q
    assert isinstance(layer, LoRALinear)
    nn.init.normal_(layer.up)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), layer.base(x) + 3.0 * x @ layer.down.T @ layer.up.T)


def test_dropout_is_on_the_adapter_alone_and_in_training_alone() -> None:
    layer = LoRALinear(nn.Linear(8, 8), 4, 8.0, dropout=0.5)
    x = torch.randn(100, 8)
    assert torch.equal(layer.train()(x), layer.base(x))
    nn.init.normal_(layer.up)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"targets": ("to_q", "query")}, "'query' names no linear layer of this model; there are fc1, fc2, out, proj"),
        ({"targets": ()}, "give a list of names"),
        ({"targets": "to_q"}, "give a list of names"),
        ({"rank": 0}, "rank is 0"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_a_wrong_adapter_is_told_in_one_line_and_changes_nothing(given: dict[str, Any], says: str) -> None:
    vit = noisy_vit()
    with pytest.raises(InputError) as caught:
        add_lora(vit, **given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not has_lora(vit)
    assert all(parameter.requires_grad for parameter in vit.parameters())


def test_adapters_are_put_on_once() -> None:
    vit = noisy_vit()
    add_lora(vit)
    with pytest.raises(InputError, match="merge them first"):
        add_lora(vit)
