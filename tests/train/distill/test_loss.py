"""DINO's loss, its teacher's centre, Sinkhorn-Knopp and KoLeo equal the published formulas."""

import math

import numpy as np
import pytest
import torch
from dino_reference import dino_by_einsum, dino_by_loops
from torch import Tensor

from regard.train.distill.koleo import koleo_loss
from regard.train.distill.loss import Centre, dino_loss, soft_cross_entropy
from regard.train.distill.sinkhorn import sinkhorn_knopp


def logits(crops: int = 5, images: int = 3, prototypes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(crops, images, prototypes, generator=generator, dtype=torch.float64)
    teacher = torch.randn(2, images, prototypes, generator=generator, dtype=torch.float64)
    return student, teacher, torch.randn(1, prototypes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("prototypes", [2, 4096, 65536])
def test_zero_logits_give_ln_k(prototypes: int) -> None:
    q = Centre(prototypes)(torch.zeros(2, 3, prototypes), 0.04)
    loss = dino_loss(torch.zeros(10, 3, prototypes), q).total
    assert abs(float(loss) - math.log(prototypes)) < 1e-6 * math.log(prototypes)


def test_zero_logits_give_ln_k_to_a_millionth_in_double() -> None:
    q = torch.softmax(torch.zeros(2, 3, 65536, dtype=torch.float64), -1)
    loss = dino_loss(torch.zeros(10, 3, 65536, dtype=torch.float64), q).total
    assert abs(float(loss) - math.log(65536)) < 1e-6


@pytest.mark.parametrize("crops", [2, 3, 10])
def test_double_loop_einsum_and_logsumexp_are_one_loss(crops: int) -> None:
    student, teacher, centre = logits(crops)
    q = torch.softmax((teacher - centre) / 0.05, dim=-1)
    ours = float(dino_loss(student, q, 0.1).total)
    assert ours == pytest.approx(dino_by_loops(student, teacher, centre, 0.1, 0.05), rel=1e-12)
    assert ours == pytest.approx(float(dino_by_einsum(student, q, 0.1)), rel=1e-12)


def test_its_gradient_is_that_of_the_einsum() -> None:
    student, teacher, _ = logits()
    q = torch.softmax(teacher / 0.05, dim=-1)
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    (3.0 * dino_loss(ours, q).total).backward()
    (3.0 * dino_by_einsum(theirs, q, 0.1)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(lambda z: soft_cross_entropy(z, q[0], 0.5, 1), student[0].requires_grad_())


def test_its_parts_are_the_means_of_their_pairs() -> None:
    student, teacher, _ = logits(4)
    q = torch.softmax(teacher / 0.05, dim=-1)
    loss = dino_loss(student, q)
    assert float(loss.total) == pytest.approx((2 * float(loss.globals) + 4 * float(loss.locals)) / 6, rel=1e-12)
    assert float(loss.globals) == pytest.approx(float(dino_by_einsum(student[:2], q, 0.1)), rel=1e-12)


def test_all_crops_take_part_not_the_global_ones_alone() -> None:
    """solo-learn's loss splits off the two large crops."""
    student, teacher, _ = logits(6)
    q = torch.softmax(teacher / 0.05, dim=-1)
    moved = student.clone()
    moved[4] += torch.randn(3, 7, dtype=torch.float64)
    assert float(dino_loss(moved, q).total) != pytest.approx(float(dino_loss(student, q).total), rel=1e-3)


def test_half_precision_logits_are_summed_in_single() -> None:
    student, teacher, _ = logits(4, 5, 4096)
    q = torch.softmax(teacher / 0.05, dim=-1).float()
    half = student.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = dino_loss(half, q).total
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(dino_loss(half.detach().float(), q).total), rel=1e-6)
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_the_centre_is_subtracted_and_moves_after_the_step() -> None:
    _, teacher, _ = logits(images=4)
    teacher = teacher.float()
    centre = Centre(7, momentum=0.9)
    centre.add(teacher)
    before = centre(teacher, 0.05)
    torch.testing.assert_close(before, torch.softmax(teacher / 0.05, dim=-1))  # still the old one, 0
    centre.move()
    mean = teacher.flatten(0, 1).mean(0, keepdim=True)
    torch.testing.assert_close(centre.centre, 0.1 * mean)
    torch.testing.assert_close(centre(teacher, 0.05), torch.softmax((teacher - 0.1 * mean) / 0.05, dim=-1))
    centre.move()  # nothing was collected since
    torch.testing.assert_close(centre.centre, 0.1 * mean)


def test_the_centre_of_many_batches_is_that_of_one_and_is_in_the_state() -> None:
    _, teacher, _ = logits(images=8)
    whole, parts = Centre(7), Centre(7)
    for _ in range(3):
        whole.add(teacher.float())
        for rows in teacher.float().split(2, dim=1):
            parts.add(rows)
        whole.move()
        parts.move()
    torch.testing.assert_close(parts.centre, whole.centre)
    assert list(parts.state_dict()) == ["centre"]
    again = Centre(7)
    again.load_state_dict(parts.state_dict())
    assert torch.equal(again.centre, parts.centre)


def sinkhorn_in_numpy(z: np.ndarray, tau: float) -> np.ndarray:
    q = np.exp(z / tau).T
    q /= q.sum()
    for _ in range(3):
        q = q / q.sum(axis=1, keepdims=True) / q.shape[0]
        q = q / q.sum(axis=0, keepdims=True) / q.shape[1]
    return (q * q.shape[1]).T


def test_sinkhorn_is_the_published_loop_and_uses_all_prototypes() -> None:
    z = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[:, 2] += 2.0
    ours = sinkhorn_knopp(z, 0.5)
    np.testing.assert_allclose(ours.numpy(), sinkhorn_in_numpy(z.numpy(), 0.5), rtol=1e-12)
    torch.testing.assert_close(ours.sum(dim=1), torch.ones(64, dtype=torch.float64))
    torch.testing.assert_close(sinkhorn_knopp(z, 0.5, 50).mean(0), torch.full((8,), 1 / 8, dtype=torch.float64))
    assert float(torch.softmax(z / 0.5, -1).mean(0).max()) > 0.5


def test_sinkhorn_does_not_overflow() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    small = sinkhorn_knopp(z, 0.5)
    torch.testing.assert_close(sinkhorn_knopp(z + 1e3, 0.5), small, rtol=1e-3, atol=1e-4)
    assert torch.exp(torch.tensor(1e3 / 0.5)).isinf()
    assert sinkhorn_knopp(torch.tensor([[0.0, 5e3], [0.0, 0.0]]), 0.04).isfinite().all()


def test_koleo_is_its_formula_and_pushes_twins_apart() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    nearest = [min(np.linalg.norm(unit[i] - unit[j]) for j in range(5) if j != i) for i in range(5)]
    assert float(koleo_loss(x)) == pytest.approx(-np.mean(np.log(np.array(nearest) + 1e-8)), rel=1e-12)
    x[1] = 3.0 * x[0] + 1e-3  # nearly the same direction
    assert float(koleo_loss(x)) > 1.0
    moving = x.clone().requires_grad_()
    koleo_loss(moving).backward()
    step = x - 1e-3 * moving.grad
    assert float(koleo_loss(step)) < float(koleo_loss(x))


def test_koleo_is_in_single_precision_under_autocast() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert float(koleo_loss(x)) == pytest.approx(float(koleo_loss(x.double())), rel=1e-5)
