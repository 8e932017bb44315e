"""Whole runs under Lightning: killed and resumed, accumulated, on two ranks, frozen, and what comes out."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from dino_reference import RECIPE

from regard.train.distill.module import DistillModule
from regard.train.distill.recipe import DistillRecipe
from regard.train.distill.task import train_distill
from regard.vit import ViT

# 39 pictures; k-NN looks at 20 of them.
SMALL: dict[str, Any] = {
    **RECIPE,
    "lr": 3e-3,
    "momentum": 0.8,
    "local_size": [8, 4],
    "local_crops": 2,
    "drop_path": 0.3,
    "freeze_epochs": 0.5,
    "knn_images": 20,
}
V2: dict[str, Any] = {
    "sinkhorn": True,
    "koleo": 0.1,
    "ibot": 1.0,
    "drop_path_subset": True,
    "drop_path_uniform": True,
    "vit": {"registers": 2},
}


def run(picture_run: Any, out: Path, **options: Any) -> tuple[int, dict[str, Any] | None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    return picture_run(out, task="distill", **{**SMALL, **options})


def saved(out: Path, name: str = "last.ckpt") -> dict[str, Any]:
    return torch.load(out / "checkpoints" / name, weights_only=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_same_end(out: Path, whole: Path) -> None:
    """Student, teacher, centres, optimizer, loop and score."""
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = saved(out, name), saved(whole, name)
        different = [key for key in theirs if not same(ours.get(key), theirs[key])]
        assert not different, f"{name}: {different}"


@pytest.fixture(scope="module")
def whole_runs(picture_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[str, tuple[Path, dict[str, Any]]] = {}

    def whole(**options: Any) -> tuple[Path, dict[str, Any]]:
        key = json.dumps(options, sort_keys=True)
        if key not in runs:
            out = tmp_path_factory.mktemp("whole") / "run"
            code, report = run(picture_run, out, **options)
            assert code == 0, report
            runs[key] = out, report
        return runs[key]

    return whole


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("parts", [{}, V2], ids=["v1", "v2"])
def test_a_run_cut_in_mid_epoch_resumes_bit_equal(
    picture_run: Any, whole_runs: Any, tmp_path: Path, signum: int, parts: dict[str, Any]
) -> None:
    plan = {"save_every_steps": 2, **parts}
    reference, expected = whole_runs(**plan)
    code, cut = run(picture_run, tmp_path / "run", kill=["batch", 1, 5], signum=int(signum), **plan)
    assert (code if cut is None else cut["exit_code"]) == {signal.SIGKILL: -9, signal.SIGTERM: 143}[signum]
    assert 9 < saved(tmp_path / "run")["global_step"] < 18
    code, report = run(picture_run, tmp_path / "run", resume=True)
    assert code == 0, report
    assert report["weights"] == expected["weights"]
    assert_same_end(tmp_path / "run", reference)


def test_two_ranks_resume_bit_equal(picture_run: Any, tmp_path: Path) -> None:
    plan = {"world": 2, "save_every_steps": 2, "batch": 2, "ibot": 1.0}
    code, _ = run(picture_run, tmp_path / "whole", **plan)
    assert code == 0
    code, _ = run(picture_run, tmp_path / "run", kill=["batch", 1, 5], **plan)
    assert code == -signal.SIGKILL
    code, report = run(picture_run, tmp_path / "run", world=2, resume=True)
    assert code == 0, report
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def weights(out: Path, start: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in saved(out)["state_dict"].items() if name.startswith(start)}


# Without what differs between a batch and its parts: dropped paths are drawn by batch, and a bias on keys changes no
# output, so that its gradient is rounding alone, which AdamW makes a full step of.
PLAIN: dict[str, Any] = {"drop_path": 0.0, "epochs": 1, "vit": {"key_bias": False}}


def assert_near(out: Path, reference: Path) -> None:
    for start in ("student", "teacher", "centre"):
        ours, theirs = weights(out, start), weights(reference, start)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


def test_four_batches_of_two_are_one_of_eight(picture_run: Any, whole_runs: Any) -> None:
    """Teacher, student and centre: the teacher moves once per optimizer step, not once per batch (lightly's fault), and
    clipping sees the whole sum (solo-learn's).
    """
    plan = {**PLAIN, "clip_norm": 0.05}
    one, report = whole_runs(batch=8, trainer={"limit_train_batches": 4}, **plan)
    trainer = {"limit_train_batches": 16, "accumulate_grad_batches": 4}
    four, other = whole_runs(batch=2, trainer=trainer, **plan)
    assert report["steps"] == other["steps"] == 4
    assert_near(four, one)


def test_two_ranks_train_as_one(whole_runs: Any) -> None:
    one, report = whole_runs(batch=8, trainer={"limit_train_batches": 4}, **PLAIN)
    two, other = whole_runs(batch=4, world=2, trainer={"limit_train_batches": 4}, **PLAIN)
    assert report["score"] == other["score"]
    assert_near(two, one)


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_and_open_as_a_plain_vit(whole_runs: Any) -> None:
    plan = {**PLAIN, "world": 2, "batch": 4}
    whole, report = whole_runs(trainer={"limit_train_batches": 4}, **plan)
    pieces, other = whole_runs(trainer={"limit_train_batches": 4, "strategy": "fsdp2"}, **plan)
    assert report["score"] == other["score"]
    assert_near(pieces, whole)
    ViT.from_pretrained(pieces / "model")


def column(out: Path, name: str) -> list[float]:
    header, *lines = [line.split(",") for line in (out / "logs" / "metrics.csv").read_text().splitlines()]
    return [float(line[header.index(name)]) for line in lines if line[header.index(name)]]


def test_what_is_logged_follows_the_schedules(whole_runs: Any) -> None:
    out, report = whole_runs(epochs=3, trainer={"log_every_n_steps": 1})
    assert report["steps"] == 27
    momentum, tau, lr = (column(out, f"train/{name}") for name in ("momentum", "tau", "lr"))
    assert len(momentum) == len(tau) == len(lr) == 27
    assert momentum[0] == pytest.approx(0.8)
    assert momentum == sorted(momentum)
    for name in ("loss_share", "entropy_of_mean", "mean_entropy", "kl", "centre_norm", "feature_std", "rank_me"):
        assert len(column(out, f"train/{name}")) == 27
    assert len(column(out, "train/grad_norm")) == 27
    assert len(column(out, "val/knn")) == 3
    assert report["score"] == max(column(out, "val/knn"))


class Spy:
    """Watches a run from inside, without a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, **options: Any):
        from lightning.pytorch import Callback
        from picture_run import VIT

        spy = self
        self.steps: list[dict[str, Any]] = []

        class Watcher(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
                spy.look(module)

            def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                spy.look(module)
                spy.steps.append(spy.state(trainer, module))

            def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                spy.look(module)

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                spy.look(module)
                spy.validated = True

        import regard.train.distill.task as task

        fit = task.fit

        def watched(module: Any, *rest: Any, **named: Any) -> Any:
            self.start = self.copy(module)
            named["trainer"] = {**named["trainer"], "callbacks": [Watcher()]}
            return fit(module, *rest, **named)

        monkeypatch.setattr(task, "fit", watched)
        trainer = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, **options.pop("trainer", {})}
        recipe = out.parent / "spied.yaml"
        recipe.write_text("{}")
        self.trained = train_distill(
            recipe, out=out, data=str(data), trainer=trainer, **{**SMALL, "vit": VIT, "seed": 7, **options}
        )

    def look(self, module: DistillModule) -> None:
        assert not any(part.training for part in module.teacher.modules())
        assert all(p.grad is None and not p.requires_grad for p in module.teacher.parameters())

    def copy(self, module: DistillModule) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in module.state_dict().items()}

    def state(self, trainer: Any, module: DistillModule) -> dict[str, Any]:
        optimizer = trainer.optimizers[0]
        return {
            "step": trainer.global_step,
            "rates": {name: values[max(trainer.global_step - 1, 0)] for name, values in module._rates.items()},
            "groups": {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups},
            "moments": [p in optimizer.state for p in module.student.last_layers() if p.requires_grad],
            "training": module.student.training,
            **self.copy(module),
        }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    import picture_run

    return picture_run.draw(tmp_path / "pictures")


def test_the_teacher_is_the_average_of_the_students_with_each_steps_own_momentum(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """Moved once per optimizer step, after it: in lightly it lags a step and moves once per batch."""
    trainer = {"accumulate_grad_batches": 2}
    spy = Spy(monkeypatch, data, tmp_path / "run", trainer=trainer, epochs=2, save_every_steps=1)
    names = [name for name in spy.start if name.startswith("teacher.")]
    teacher = {name: spy.start[name] for name in names}
    step = 0
    for seen in spy.steps:
        if seen["step"] != step:
            step = seen["step"]
            m = seen["rates"]["momentum"]
            for name in names:
                student = seen[name.replace("teacher.", "student.")]
                teacher[name] = torch.lerp(teacher[name], student, 1 - m)
        for name in names:
            assert torch.equal(seen[name], teacher[name]), (step, name)
        assert seen["training"]
    assert step == 10
    assert spy.validated
    rates = [seen["rates"]["momentum"] for seen in spy.steps]
    assert len(set(rates)) == 10


def test_the_optimizer_gets_the_rates_of_its_step_and_decay_for_matrices_alone(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    spy = Spy(monkeypatch, data, tmp_path / "run", warmup_epochs=0.5)
    assert spy.steps[0]["groups"]["decay"][0] == 0.0  # DINO's warm-up begins at 0
    for seen in spy.steps:
        rates = seen["rates"]
        assert seen["groups"] == {"decay": (rates["lr"], rates["weight_decay"]), "no_decay": (rates["lr"], 0.0)}
    assert spy.steps[-1]["groups"]["decay"][1] > 0.39


def test_the_last_layer_is_frozen_bit_for_bit_and_then_is_not(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """Without moments, unlike a learning rate of 0 (lightly-train's fault)."""
    spy = Spy(monkeypatch, data, tmp_path / "run", freeze_epochs=1.0, fixed_norm=False, weight_decay=0.5)
    last = [name for name in spy.start if "last_layer" in name]
    assert len(last) == 4
    for seen in spy.steps[:9]:
        assert all(torch.equal(seen[name], spy.start[name]) for name in last)
        assert not any(seen["moments"])
    for seen in spy.steps[9:]:
        assert all(seen["moments"])
        assert not any(torch.equal(seen[name], spy.start[name]) for name in last)
    mlp = "student.head.mlp.0.weight"
    assert not torch.equal(spy.steps[3][mlp], spy.start[mlp])


def test_the_model_is_the_teachers_backbone_of_the_best_epoch(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    spy = Spy(
        monkeypatch,
        data,
        tmp_path / "run",
        vit={"registers": 2, "dim": 16, "depth": 1, "heads": 2, "patch_size": 4, "image_size": [12, 8]},
    )
    vit = ViT.from_pretrained(tmp_path / "run" / "model")
    best = saved(tmp_path / "run", "best.ckpt")["state_dict"]
    for name, value in vit.state_dict().items():
        assert torch.equal(value, best[f"teacher.backbone.{name}"])
    assert vit.config.registers == 2
    assert vit.config.drop_path == 0.0
    assert "regard evaluate knn --model" in str(spy.trained)
    assert spy.trained.as_dict()["knn_accuracy"] == spy.trained.fit.best_score


def test_without_labels_the_last_epoch_is_the_model(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(data.rglob("*.png"))):
        file.rename(flat / f"{number:03}.png")
    spy = Spy(monkeypatch, flat, tmp_path / "run")
    assert spy.trained.fit.best is None
    assert "the last epoch is the model" in capsys.readouterr().err
    last = saved(tmp_path / "run")["state_dict"]
    vit = ViT.from_pretrained(tmp_path / "run" / "model")
    assert all(torch.equal(value, last[f"teacher.backbone.{name}"]) for name, value in vit.state_dict().items())


def test_what_is_derived_is_told_and_can_be_set(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Spy(monkeypatch, data, tmp_path / "run", epochs=1, momentum=None, tau_teacher=None)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("auto: ")]
    assert [line.split()[1] for line in said] == ["tau_teacher", "momentum"]


def test_a_planted_collapse_is_told_in_a_run(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher so soft that it says the same of every picture."""
    Spy(monkeypatch, data, tmp_path / "run", tau_teacher=1e4, tau_teacher_start=1e4, lr=1e-9, tau_student=1e3)
    assert "uniform collapse" in capsys.readouterr().err


def test_settings_that_cannot_be_are_named() -> None:
    from regard.vit.errors import InputError

    for changes, what in [
        ({"tau_teacher": 0.0}, "tau_teacher"),
        ({"clip_mode": "norm"}, "clip_mode"),
        ({"prototypes": 1}, "prototypes"),
        ({"local_scale": (0.5, 0.1)}, "local_scale"),
        ({"koleo": 0.1, "batch": 1}, "koleo"),
        ({"momentum": 1.5}, "momentum"),
    ]:
        with pytest.raises(InputError, match=what):
            DistillRecipe(**changes)
