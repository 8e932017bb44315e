"""Registers for a model that has none: what changes, what does not, and that they learn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.vit import RopeRecipe, Tokens, ViT, ViTConfig, attention_rows
from regard.vit.errors import InputError

SMALL: dict[str, Any] = dict(image_size=(24, 40), patch_size=8, dim=32, depth=3, heads=2, hidden_dim=48)
KINDS: dict[str, dict[str, Any]] = {
    "rows for patches": dict(),
    "a row for the class token": dict(position_rows="cls+patches", layer_scale=1.0),
    "rows for all special tokens": dict(position_rows="cls+registers+patches"),
    "rope": dict(positions="rope", rope=RopeRecipe("index", 10000.0, (3, 5))),
    "no class token": dict(class_token=False, pooling="mean", position_rows="cls+registers+patches"),
    "registers would stand at the end": dict(registers_place="end", classes=3),
}

Make = Callable[..., ViT]


@pytest.fixture
def plain(noisy: Callable[[Any], Any]) -> Make:
    return lambda **fields: noisy(ViT(ViTConfig(**SMALL | fields))).eval()


def seen(vit: ViT, size: tuple[int, int] = (24, 40)) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return vit(torch.randn(2, 3, *size, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_changes_a_little_and_no_more(kind: str, plain: Make) -> None:
    vit = plain(**KINDS[kind])
    made = vit.with_registers(4)
    assert isinstance(made, ViT)
    assert made.config.registers == 4
    assert made.config.registers_place == "after_cls"
    for size in ((24, 40), (40, 16)):
        before, after = seen(vit, size), seen(made, size)
        assert after.registers.shape == (2, 4, 32)
        assert after.patches.shape == before.patches.shape
        change = (after.patches - before.patches).norm(dim=-1) / before.patches.norm(dim=-1)
        assert change.min() > 1e-4  # each attends to four more tokens
        assert change.max() < 0.7
        # As far as a model with four fewer patches would be: the registers are a part of what is attended to.
        assert change.mean() < 0.3


def test_all_that_changes_is_the_share_of_attention_that_registers_take(plain: Make) -> None:
    vit = plain(position_rows="cls+patches")
    made = vit.with_registers(2)
    images = torch.randn(1, 3, 24, 40)
    old, new = (attention_rows(model, images, "cls", 0) for model in (vit, made))
    share = new.registers.sum(-1)
    assert share.min() > 0
    assert share.max() < 1
    # In the first layer all tokens meet as before: the rows shrink by the registers' share, and nothing else.
    left = (1 - share)[..., None, None]
    torch.testing.assert_close(new.patches, old.patches * left, rtol=1e-4, atol=1e-6)


def test_registers_of_zeros_still_take_attention(plain: Make) -> None:
    vit = plain()
    made = vit.with_registers(4)
    with torch.no_grad():
        made.registers.zero_()
    assert not torch.allclose(seen(made).patches, seen(vit).patches, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_dtype_mode_and_what_is_frozen_are_kept_and_the_original_too(kind: str, plain: Make) -> None:
    vit = plain(**KINDS[kind]).to(torch.bfloat16)
    vit.blocks[0].requires_grad_(False)
    vit.blocks[2].train()
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    config, tokens = vit.config, seen(vit).patches
    made = vit.with_registers(3)
    assert made.report is vit.report
    assert made.state_dict().keys() - before.keys() == {"registers"}
    for name, tensor in before.items():
        kept = made.state_dict()[name]
        assert torch.equal(kept, tensor), name
        assert kept.dtype == tensor.dtype == torch.bfloat16
        assert kept.data_ptr() != vit.state_dict()[name].data_ptr(), name
    needs = {name: parameter.requires_grad for name, parameter in vit.named_parameters()}
    assert {name: p.requires_grad for name, p in made.named_parameters()} == {**needs, "registers": True}
    assert [part.training for part in made.modules()] == [part.training for part in vit.modules()]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert vit.config == config
    assert vit.registers is None
    assert torch.equal(seen(vit).patches, tokens)


def test_registers_are_drawn_from_a_truncated_normal_and_have_no_position(plain: Make) -> None:
    vit = plain(dim=64, position_rows="cls+registers+patches")
    torch.manual_seed(7)
    made = vit.with_registers(100)
    torch.manual_seed(7)
    assert torch.equal(made.registers, vit.with_registers(100).registers)
    assert 0.018 < made.registers.std() < 0.022
    assert made.positions.shape == vit.positions.shape
    assert made.config.position_rows == "cls+patches"


@pytest.mark.parametrize("kind", KINDS)
def test_it_saves_reloads_and_trains(kind: str, plain: Make, tmp_path: Path) -> None:
    made = plain(**KINDS[kind]).with_registers(4)
    made.save_pretrained(tmp_path / "model")
    again = ViT.from_pretrained(tmp_path / "model")
    assert again.config == made.config
    assert torch.equal(seen(again).registers, seen(made).registers)
    again.train()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.01)
    before = again.registers.detach().clone()
    losses = []
    images, aim = torch.randn(2, 3, 24, 40), torch.randn(2, 15, 32)
    for _ in range(5):
        loss = (again(images).patches - aim).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert again.registers.grad.abs().sum(dim=1).min() > 0  # every one of them
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(again.registers, before)


def test_a_model_with_registers_and_a_senseless_number_are_refused(plain: Make) -> None:
    vit = plain()
    made = vit.with_registers()
    assert made.config.registers == 4
    with pytest.raises(InputError, match="this ViT has 4 registers already"):
        made.with_registers(4)
    for count in (0, -1, 2.0, True, "4"):
        with pytest.raises(InputError, match="number of registers, at least 1, not"):
            vit.with_registers(count)  # type: ignore[arg-type]


def test_a_model_that_was_given_registers_leaves_for_other_libraries(plain: Make, tmp_path: Path) -> None:
    made = plain(position_rows="cls+patches").with_registers(4)
    report = made.export(tmp_path / "out", "timm")
    assert report.model.startswith("VisionTransformer")
    back = ViT.from_pretrained(tmp_path / "out")
    assert torch.equal(seen(back).registers, seen(made).registers)
