"""Three ways to clip under one number are three algorithms."""

import pytest
import torch
from torch import nn

from regard.train.distill.clip import clip_gradients


def parts(scale: float = 1.0) -> dict[str, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shapes in {"backbone": [(4, 3), (5,)], "head": [(2, 2), (7,)]}.items():
        made[name] = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in made[name]:
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    made["head"].append(nn.Parameter(torch.zeros(3)))  # without a gradient
    return made


def gradients(made: dict[str, list[nn.Parameter]]) -> list[torch.Tensor]:
    return [p.grad.clone() for part in made.values() for p in part if p.grad is not None]


def test_global_is_what_torch_does() -> None:
    ours, theirs = parts(), parts()
    norm = clip_gradients(ours, "global", 1.5)
    expected = torch.nn.utils.clip_grad_norm_([p for part in theirs.values() for p in part], 1.5)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(one, other)


def test_per_module_is_what_torch_does_to_each() -> None:
    ours, theirs = parts(), parts()
    clip_gradients(ours, "per_module", 1.5)
    for part in theirs.values():
        torch.nn.utils.clip_grad_norm_(part, 1.5)
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(one, other)


def test_per_parameter_is_dinos_loop() -> None:
    ours = parts()
    expected = []
    for gradient in gradients(ours):
        factor = 1.5 / (float(gradient.norm()) + 1e-6)
        expected.append(gradient * factor if factor < 1 else gradient)
    clip_gradients(ours, "per_parameter", 1.5)
    assert any(float(g.norm()) < 1.5 for g in expected)
    assert any(1.49 < float(g.norm()) < 1.51 for g in expected)
    for one, other in zip(gradients(ours), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["per_parameter", "per_module", "global"])
def test_small_gradients_and_no_limit_leave_every_bit(mode: str) -> None:
    for scale, limit in ((1e-3, 3.0), (10.0, None)):
        made = parts(scale)
        before = gradients(made)
        norm = clip_gradients(made, mode, limit)  # type: ignore[arg-type]
        assert all(torch.equal(one, other) for one, other in zip(gradients(made), before, strict=True))
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in before]).norm()), rel=1e-6)


@pytest.mark.parametrize("mode", ["per_parameter", "per_module", "global"])
def test_the_norm_tells_of_a_nan(mode: str) -> None:
    made = parts()
    made["head"][0].grad[0, 0] = torch.nan
    assert clip_gradients(made, mode, 3.0).isnan()  # type: ignore[arg-type]
