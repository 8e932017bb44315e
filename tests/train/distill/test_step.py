"""One step of the module: what the teacher is, what moves when, and that ranks are one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from dino_reference import batch_of, dino_by_einsum, noisy, part, small_module

from regard.train.distill.module import DistillModule
from regard.train.distill.network import move_teacher, parameter_groups, set_drop_path
from regard.vit import ViT, ViTConfig

V2: dict[str, Any] = {"sinkhorn": True, "koleo": 0.1, "ibot": 1.0}


def test_the_loss_of_a_step_is_that_of_crops_read_one_by_one() -> None:
    module = small_module()
    batch = batch_of(3)
    crops = [module.normalise(pixels) for pixels in batch.pixels]
    student = torch.stack([module.student.head(module.student.look(crop)[0]) for crop in crops])
    teacher = torch.stack([module.teacher.head(module.teacher.look(crop)[0]) for crop in crops[:2]])
    q = torch.softmax((teacher - module.centre.centre) / 0.06, dim=-1)
    torch.testing.assert_close(module.losses(batch), dino_by_einsum(student, q, 0.1), rtol=1e-5, atol=1e-6)


def test_the_backbone_reads_once_per_resolution_and_the_head_once() -> None:
    """A weight-normed layer of 65,536 rows is made anew for each call of the head."""
    module = small_module()
    calls: list[tuple[str, int]] = []
    for name in ("student", "teacher"):
        for kind in ("backbone", "head"):
            getattr(getattr(module, name), kind).register_forward_hook(
                lambda *a, what=f"{name} {kind}": calls.append((what, len(a[1][0])))
            )
    module.losses(batch_of(3))
    assert sorted(calls) == [
        ("student backbone", 6),
        ("student backbone", 6),
        ("student head", 12),
        ("teacher backbone", 6),
        ("teacher head", 6),
    ]


def test_the_teacher_begins_as_the_student_and_never_trains_nor_gets_gradients() -> None:
    module = small_module(drop_path=0.2, **V2)
    for one, other in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    for mode in (True, False, True):
        module.train(mode)
        assert all(part.training is mode for part in module.student.modules())
        assert not any(part.training for part in module.teacher.modules())
    module.losses(batch_of(4)).backward()
    assert all(p.grad is None and not p.requires_grad for p in module.teacher.parameters())
    fixed = {id(head.norms) for head in (module.student.head, module.student.patch_head)}
    assert all(p.grad is not None for p in module.student.parameters() if id(p) not in fixed)
    assert module.mask_token is not None
    assert module.mask_token.grad.any()


def test_the_teacher_moves_by_its_momentum() -> None:
    module = small_module()
    noisy(module.student, 5)
    before = [p.clone() for p in module.teacher.parameters()]
    move_teacher(module.teacher, module.student, 0.9)
    for old, own, theirs in zip(before, module.teacher.parameters(), module.student.parameters(), strict=True):
        torch.testing.assert_close(own, 0.9 * old + 0.1 * theirs)


def test_the_norms_of_the_last_layer_follow_by_average_too() -> None:
    module = small_module(fixed_norm=False)
    with torch.no_grad():
        module.student.head.norms.fill_(2.0)
    move_teacher(module.teacher, module.student, 0.75)
    torch.testing.assert_close(module.teacher.head.norms, torch.full((24, 1), 1.25))


def test_what_decays_is_what_decays_in_dino() -> None:
    module = small_module(vit={"registers": 2, "layer_scale": 0.1}, fixed_norm=False, ibot=1.0)
    groups = {str(group["name"]): group for group in parameter_groups(module, 0.04)}
    names = {id(p): name for name, p in module.named_parameters()}
    decay = {names[id(p)] for p in groups["decay"]["params"]}
    rest = {names[id(p)] for p in groups["no_decay"]["params"]}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert decay | rest == trained
    assert groups["no_decay"]["weight_decay"] == 0.0
    assert all(name.endswith((".bias", ".gamma")) or ".norm" in name for name in rest)
    assert {"student.backbone.cls", "student.backbone.registers", "student.backbone.positions", "mask_token"} <= decay
    assert sum("last_layer" in name for name in decay) == 4


def test_registers_are_in_both_networks() -> None:
    module = small_module(vit={"registers": 3})
    for network in (module.student, module.teacher):
        assert network.look(torch.randn(2, 3, 12, 8))[1].registers.shape == (2, 3, 16)


def test_everything_is_in_the_state() -> None:
    module = small_module(ibot=1.0)
    kinds = {name.split(".")[0] for name in module.state_dict()}
    assert kinds == {"student", "teacher", "mask_token", "centre", "patch_centre", "watch"}


@pytest.mark.parametrize("parts", [{}, V2, {"ibot": 1.0, "ibot_head": "shared"}], ids=["v1", "v2", "shared"])
def test_the_memory_of_a_step_is_estimated_without_a_trace(parts: dict[str, Any]) -> None:
    from regard.train.memory import estimate

    module = small_module(**parts).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    need = estimate(module, batch_of(4))
    trained = sum(4 * p.numel() for p in module.parameters() if p.requires_grad)
    assert need.gradients == trained
    assert need.weights > 2 * trained
    assert need.activations > 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(c is None or c._collected is None for c in (module.centre, module.patch_centre))


# iBOT in a step


def test_a_masked_student_does_not_see_what_is_masked() -> None:
    module = small_module()
    images = torch.randn(2, 3, 12, 8)
    masked = torch.zeros(2, 6, dtype=torch.bool)
    masked[:, 4] = True
    other = images.clone()
    other[:, :, 8:, :4] = torch.randn(2, 3, 4, 4)
    token = torch.randn(16)
    vit = module.student.backbone
    torch.testing.assert_close(vit(images, (masked, token)).cls, vit(other, (masked, token)).cls)
    assert not torch.allclose(vit(images).cls, vit(other).cls)
    assert "mask_token" not in " ".join(vit.state_dict())


def test_the_shared_head_reads_patches_and_features_in_one_call() -> None:
    shared, own = small_module(ibot=1.0, ibot_head="shared"), small_module(ibot=1.0)
    assert shared.student.patch_head is None
    assert own.student.patch_head is not None
    terms = shared.terms(batch_of(4), 0, 0)
    assert float(terms["ibot"].detach()) > 0.5
    calls: list[int] = []
    shared.student.head.register_forward_hook(lambda layer, given, out: calls.append(len(given[0])))
    shared.losses(batch_of(4))
    assert len(calls) == 1
    assert calls[0] > 16


def test_each_part_of_dinov2_is_off_unless_named() -> None:
    terms = small_module().terms(batch_of(4), 0, 0)
    assert torch.equal(terms["loss"], terms["dino"])
    assert not {"koleo", "ibot"} & terms.keys()
    all_on = small_module(**V2).terms(batch_of(4), 0, 0)
    expected = all_on["dino"] + 0.1 * all_on["koleo"] + all_on["ibot"]
    torch.testing.assert_close(all_on["loss"], expected)
    torch.testing.assert_close(all_on["q"].flatten(0, 1).sum(1), torch.ones(8))


def test_under_bf16_answers_losses_and_centres_are_single_precision() -> None:
    for parts in ({}, V2):
        module = small_module(drop_path=0.4, drop_path_subset=True, **parts)
        with torch.autocast("cpu", torch.bfloat16):
            terms = module.terms(batch_of(4), 0, 0)
        assert module.student.head(torch.randn(2, 16)).dtype == torch.float32
        assert {terms[name].dtype for name in ("loss", "dino", "q")} == {torch.float32}
        terms["loss"].backward()
        assert all(p.grad.isfinite().all() for p in module.student.parameters() if p.grad is not None)
        exact = module.eval().terms(batch_of(4), 0, 0)["loss"]
        assert abs(float((terms["loss"] - exact).detach())) < 0.1 * float(exact.detach())
        if module.centre is not None:
            assert module.centre._collected is not None
            assert module.centre._collected.dtype == torch.float32


# Drop path by subset


def dropping(rate: float = 0.5) -> ViT:
    torch.manual_seed(0)
    vit = noisy(
        ViT(ViTConfig(**{"image_size": (8, 8), "patch_size": 4, "dim": 16, "depth": 2, "heads": 2}, drop_path=rate))
    )
    set_drop_path(vit, subset=True, uniform=True)
    return vit.train()


def test_a_branch_is_computed_for_the_kept_samples_alone() -> None:
    vit = dropping()
    rows: list[int] = []
    vit.blocks[0].mlp.register_forward_hook(lambda layer, given, out: rows.append(len(given[0])))
    vit(torch.randn(10, 3, 8, 8))
    assert rows == [5]
    vit.eval()(torch.randn(10, 3, 8, 8))
    assert rows == [5, 10]


def test_its_mean_over_draws_is_the_whole_branch() -> None:
    vit = dropping(0.4)
    block = vit.blocks[0]
    x = torch.randn(5, 5, 16, dtype=torch.float64)
    block.double()
    whole = block.eval()._plus(x, block.mlp)
    block.train()
    drawn = [block._plus(x, block.mlp) for _ in range(3000)]
    torch.testing.assert_close(torch.stack(drawn).mean(0), whole, rtol=0.1, atol=0.05)
    untouched = (drawn[0] == x).flatten(1).all(1)
    assert int(untouched.sum()) == 2  # of 5 at a rate of 0.4


def test_gradients_reach_only_what_was_kept() -> None:
    vit = dropping()
    images = torch.randn(4, 3, 8, 8, requires_grad=True)
    vit(images).patches.square().mean().backward()
    assert images.grad is not None
    assert images.grad.flatten(1).any(1).all()  # the residual stream reaches every sample


def test_low_rates_keep_the_ordinary_way_and_the_flag_is_off_by_default() -> None:
    vit = dropping(0.05)
    assert not any(block.drop_path.subset for block in vit.blocks)
    assert not any(block.drop_path.subset for block in small_module(drop_path=0.5).student.backbone.blocks)
    rising = small_module(drop_path=0.4, drop_path_subset=True).student.backbone
    assert [block.drop_path.subset for block in rising.blocks] == [False, True]
    even = small_module(drop_path=0.4, drop_path_subset=True, drop_path_uniform=True).student.backbone
    assert [block.drop_path.rate for block in even.blocks] == [0.4, 0.4]


@pytest.mark.slow
def test_a_compiled_block_leaves_samples_out_too() -> None:
    """Each block has a rate of its own unless it is uniform; the eager backend shows that nothing breaks."""
    from regard.train.compiling import compile_blocks

    vit = dropping(0.5)
    compile_blocks([vit], backend="eager")
    x = torch.randn(6, 5, 16)
    lost = [int((vit.blocks[0](x) == x).flatten(1).all(1).sum()) for _ in range(400)]
    assert max(lost) == 3  # both branches left the same three out
    assert min(lost) == 0


# Ranks


def on_rank(rank: int, world: int, port: int, folder: str, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=world, rank=rank)
    torch.save(
        outcome(small_module(**changes), part(batch_of(8), slice(rank * 4, rank * 4 + 4))), f"{folder}/{rank}.pt"
    )
    torch.distributed.destroy_process_group()


def outcome(module: DistillModule, batch: Any) -> dict[str, Any]:
    terms = module.terms(batch, 0, 0)
    terms["loss"].backward()
    if module.centre is not None:
        module.centre.move()
    return {
        "loss": terms["loss"].detach(),
        "q": terms["q"],
        "centre": None if module.centre is None else module.centre.centre,
        "gradients": {name: p.grad for name, p in module.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("changes", [{}, {"sinkhorn": True}], ids=["centre", "sinkhorn"])
def test_two_ranks_of_half_a_batch_are_one_of_the_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    from conftest import free_port

    mp.start_processes(on_rank, (2, free_port(), str(tmp_path), changes), nprocs=2, start_method="fork")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    one = outcome(small_module(**changes), batch_of(8))
    torch.testing.assert_close((ranks[0]["loss"] + ranks[1]["loss"]) / 2, one["loss"])
    torch.testing.assert_close(torch.cat([rank["q"] for rank in ranks], dim=1), one["q"])
    if not changes:
        torch.testing.assert_close(ranks[0]["centre"], one["centre"])
        assert torch.equal(ranks[0]["centre"], ranks[1]["centre"])
    for name, gradient in one["gradients"].items():
        mean = (ranks[0]["gradients"][name] + ranks[1]["gradients"][name]) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=1e-6)
