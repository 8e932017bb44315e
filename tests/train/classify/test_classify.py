"""The task `classify`: what it trains, what it counts, what it refuses, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import picture_run as script
import pytest
import torch
from classify_cases import QUIET, batch, module, recipe, small
from PIL import Image
from torch.nn import functional

from regard.datasets import pictures as pictures_file
from regard.train.classify import task as classify_task
from regard.train.classify.building import CLASSES, build
from regard.train.classify.recipe import ClassifyRecipe
from regard.train.classify.task import prepare, train_classify
from regard.train.optim import depth_factors
from regard.train.recipe import load_recipe, save_recipe
from regard.train.sampling import Draw
from regard.vit import ViT
from regard.vit.errors import InputError

# What it trains


def test_it_learns_a_small_set_by_heart_and_saves_a_plain_vit(data: Path, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    twice = script.draw(tmp_path / "pictures")
    script.draw(twice, split="val")  # the same pictures
    changes = {"mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0, "erase": 0.0, "shift": 0, "held_out": None, "ema": None}
    settings = recipe(
        plain, twice, epochs=25, batch=13, lr=5e-3, trainer={k: v for k, v in QUIET.items() if k != "logger"}, **changes
    )
    save_recipe(settings, tmp_path / "run.yaml")
    trained = train_classify(tmp_path / "run.yaml", out=tmp_path / "run")
    assert trained.fit.best_score == 1.0
    assert json.loads((trained.model / CLASSES).read_text()) == list(script.CLASSES)
    assert json.loads(json.dumps(trained.as_dict()))["held_out_accuracy"] == 1.0
    assert f"regard evaluate classify --model {tmp_path / 'run'}" in str(trained)
    opened = ViT.from_pretrained(tmp_path / "run")
    assert opened.config.classes == 3
    best = torch.load(trained.fit.best, weights_only=True)["state_dict"]
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, best[f"vit.{name}"]), name


def test_the_saved_model_gives_the_logits_of_the_averaged_weights(picture_run: Any, tmp_path: Path) -> None:
    code, report = picture_run(tmp_path / "run", epochs=1)
    assert (code, report["averaged_weights"]) == (0, True)
    saved = torch.load(report["best_checkpoint"], weights_only=True)["state_dict"]
    opened = ViT.from_pretrained(tmp_path / "run")
    trained = ViT(opened.config).eval()
    trained.load_state_dict(
        {n.removeprefix("average.network."): t for n, t in saved.items() if n.startswith("average.")}
    )
    images = torch.randn(4, 3, 12, 8)
    assert torch.equal(opened.classify(images), trained.classify(images))
    assert not torch.equal(saved["vit.head.weight"], saved["average.network.head.weight"])


def test_an_optimizer_step_moves_the_average_once_however_many_batches_it_gathers(
    picture_run: Any, tmp_path: Path
) -> None:
    """The average of one epoch, computed again from the weights that each step left behind."""
    options = {"epochs": 1, "batch": 3, "save_every_steps": 1, "trainer": {"accumulate_grad_batches": 2}}
    _, report = picture_run(tmp_path / "run", **options)
    assert report["steps"] == 5  # 27 pictures, 9 batches, the last step has one
    module_file = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    mean: dict[str, torch.Tensor] = {}
    for step in range(6):
        if step == 0:
            start, _ = prepare(load_recipe(tmp_path / "run" / "recipe.yaml", ClassifyRecipe))[:2]
            mean = {name: tensor.double() for name, tensor in start.vit.state_dict().items()}
            continue
        out = tmp_path / f"cut{step}"
        kill = ["batch end", 0, 2 * step - 1 if step < 5 else 8]
        picture_run(out, kill=kill, signum=15, **options)
        after = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        decay = min(0.9, (1 + step) / (10 + step))
        mean = {name: decay * old + (1 - decay) * after[f"vit.{name}"].double() for name, old in mean.items()}
    for name, tensor in mean.items():
        torch.testing.assert_close(module_file[f"average.network.{name}"].double(), tensor, rtol=1e-5, atol=1e-6)


def test_layers_learn_the_slower_the_nearer_they_are_to_the_pixels() -> None:
    vit = small(classes=3, registers=2)
    factors = depth_factors(vit, 0.75)
    for part in (vit.tokenizer, "cls", "registers", "positions"):
        own = [getattr(vit, part)] if isinstance(part, str) else list(part.parameters())
        assert {factors[p] for p in own} == {0.75**3}
    assert {factors[p] for p in vit.blocks[0].parameters()} == {0.75**2}
    assert {factors[p] for p in vit.blocks[1].parameters()} == {0.75}
    assert {factors[p] for part in (vit.norm, vit.head) for p in part.parameters()} == {1.0}
    assert factors.keys() == set(vit.parameters())


def test_a_frozen_vit_trains_its_head_alone_and_stays_in_inference_mode(
    data: Path, plain: Path, tmp_path: Path
) -> None:
    small(drop_path=0.3).save_pretrained(tmp_path / "vit")
    settings = recipe(plain, data, pretrained=str(tmp_path / "vit"), freeze_vit=True, drop_path=0.0)
    probe, _, told = prepare(settings)
    assert {name for name, p in probe.vit.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    probe.train()
    assert {name for name, part in probe.vit.named_modules() if part.training} <= {"", "head", "pool", "pool.norm"}
    assert "a new head of 3 classes" in told


# What a step computes


def test_the_loss_is_that_of_torch_for_labels_and_smoothed_ones() -> None:
    seen = batch()
    for smoothing in (0.0, 0.1):
        trained = module(label_smoothing=smoothing).eval()
        logits = trained.vit.classify(trained.vit.preprocess.normalize(seen.pixels))
        expected = functional.cross_entropy(logits, seen.labels, label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(trained.losses(seen), expected)
        binary = module(label_smoothing=smoothing, loss="bce").eval()
        targets = functional.one_hot(seen.labels, 3) * (1 - smoothing) + smoothing / 3
        expected = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        torch.testing.assert_close(binary.losses(seen), expected)


def test_a_batch_of_one_picture_is_mixed_with_itself_and_stays_as_it_is() -> None:
    for kinds in ({"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}):
        one = batch(1)
        torch.testing.assert_close(module(**kinds).eval().losses(one), module().eval().losses(one))


def test_mixing_depends_on_the_epoch_and_not_on_the_global_random_state() -> None:
    mixed, seen = module(mixup=0.8, cutmix=1.0).eval(), batch()
    torch.manual_seed(1)
    first = mixed.losses(seen)
    torch.manual_seed(2)
    assert torch.equal(first, mixed.losses(seen))
    seen.epochs += 1
    assert not torch.equal(first, mixed.losses(seen))


def test_a_picture_that_could_not_be_read_changes_nobodys_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pixels are blank and its label is not its own: neither may be mixed into the others."""
    trained, seen = module(mixup=5.0, cutmix=1.0).eval(), batch()
    monkeypatch.setattr(trained, "log", lambda *args, **kwargs: None)
    seen.counts[2], seen.labels[2] = False, -1
    seen.pixels[2] = 0  # type: ignore[index]
    loss = trained.training_step(seen, 0)
    seen.pixels[2] = 255  # type: ignore[index]
    seen.labels[2] = 1
    assert torch.equal(loss, trained.training_step(seen, 0))
    expected = trained.losses(seen)[[0, 1, 3, 4, 5]].mean()
    torch.testing.assert_close(loss, expected)
    seen.counts[:] = False
    assert trained.training_step(seen, 0) == 0.0


def test_the_learning_rate_follows_the_pictures_per_step_by_the_rule_that_is_named(
    picture_run: Any, tmp_path: Path
) -> None:
    rates = {}
    for rule in ("none", "sqrt", "linear"):
        out = tmp_path / rule
        _, report = picture_run(
            out,
            epochs=1,
            lr=1e-3,
            warmup_steps=0,
            lr_scale=rule,
            lr_batch=2,
            trainer={"accumulate_grad_batches": 2, "log_every_n_steps": 1},
        )
        rates[rule] = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["lr_schedulers"][0]["base_lrs"][
            0
        ]
    assert rates == pytest.approx({"none": 1e-3, "linear": 4e-3, "sqrt": 2e-3})  # 4 x 2 pictures a step, for 2
    assert "lr          0.004, 4 times 0.001 (linear)" in report["stderr"]


# What it counts


def test_scores_are_equal_for_one_two_and_three_processes(picture_run: Any, tmp_path: Path) -> None:
    """11 pictures to score, in batches of 12, 6 and 4 a process: neither 2 nor 3 divides them."""
    folder = script.draw(script.draw(tmp_path / "data"), per_class=4, split="val", seed=1)
    (folder / "val" / "left" / "03.png").unlink()
    seen = []
    for world, size in ((1, 6), (2, 3), (3, 2)):
        out = tmp_path / str(world)
        # Drop path and mixing draw otherwise for a batch in parts.
        plain = {"held_out": 0, "drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0}
        code, report = picture_run(out, world=world, data=str(folder), batch=size, epochs=3, lr=1e-2, **plain)
        assert code == 0, report
        header, *lines = [row.split(",") for row in (out / "logs" / "metrics.csv").read_text().splitlines()]
        row = {name: value for line in lines for name, value in zip(header, line, strict=True) if value}
        seen.append({name: float(value) for name, value in row.items() if name.startswith("val/")})
    assert set(seen[0]) == {"val/accuracy", "val/loss", "val/ema_accuracy", "val/ema_loss"}
    assert 0 < seen[0]["val/accuracy"] < 1
    assert seen[0]["val/accuracy"] * 11 == pytest.approx(round(seen[0]["val/accuracy"] * 11), abs=1e-5)
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], rel=1e-4)
        assert other["val/accuracy"] == seen[0]["val/accuracy"]
        assert other["val/ema_accuracy"] == seen[0]["val/ema_accuracy"]


def test_padding_and_skipped_pictures_count_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = module(small(classes=7), ema=0.9).eval()
    monkeypatch.setattr(trained, "log", lambda *args, **kwargs: None)
    seen = batch(8, classes=7)
    seen.counts[5:] = False
    seen.labels[6] = -1
    trained.validation_step(seen, 0)
    trained.validation_step(batch(4, classes=7, seed=1), 1)
    both = [(batch(8, classes=7), 5), (batch(4, classes=7, seed=1), 4)]
    logits = torch.cat([trained.vit.classify(trained.vit.preprocess.normalize(b.pixels[:n])) for b, n in both])
    labels = torch.cat([b.labels[:n] for b, n in both])
    expected = {
        "accuracy": (logits.argmax(1) == labels).float().mean(),
        "top5_accuracy": (logits.topk(5).indices == labels[:, None]).any(1).float().mean(),
        "loss": functional.cross_entropy(logits, labels),
    }
    assert set(trained.scores) == {*expected, *(f"ema_{kind}" for kind in expected)}
    for kind, value in expected.items():
        torch.testing.assert_close(trained.scores[kind].compute(), value)
        torch.testing.assert_close(trained.scores[f"ema_{kind}"].compute(), value)


def test_the_best_epoch_is_chosen_by_what_is_saved() -> None:
    assert module().monitor == "val/accuracy"
    assert module(ema=0.9).monitor == "val/ema_accuracy"
    averaged = module(ema=0.9)
    assert averaged.best is averaged.average.network


# The data


def test_the_test_split_is_never_read_and_held_out_pictures_are_never_trained_on(
    data: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(source: str, split: str = "train", **options: Any) -> Any:
        asked.append(split)
        return pictures_file.load_pictures(source, split, **options)

    monkeypatch.setattr(classify_task, "load_pictures", load)
    _, given, _ = prepare(recipe(plain, data))
    assert asked == ["train"]
    training, held_out = given.training.pictures, given.held_out.pictures
    ids = [{part.id(i) for i in range(len(part))} for part in (training, held_out)]
    assert len(ids[0] | ids[1]) == 39
    assert not ids[0] & ids[1]


def test_a_set_without_val_does_not_fall_back_on_test(plain: Path, tmp_path: Path) -> None:
    folder = script.draw(tmp_path / "pictures")
    script.draw(folder, split="test")
    with pytest.raises(InputError, match="has no split val to choose the best epoch by; set held_out"):
        prepare(recipe(plain, folder, held_out=0))
    pictures = prepare(recipe(plain, folder, held_out=None))[1]
    assert pictures.held_out is not None
    assert pictures.held_out.pictures.name == "pictures/train"
    with pytest.raises(InputError, match="split is test"):
        recipe(plain, folder, split="test")


def test_one_class_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures" / "train" / "only"
    folder.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 12)).save(folder / f"{number}.png")
    with pytest.raises(InputError, match="one class"):
        prepare(recipe(plain, tmp_path / "pictures"))
    with pytest.raises(InputError, match="two classes at least"):
        build(recipe(plain, tmp_path), ["only"])


def test_pictures_of_one_pixel_are_trained_on(plain: Path, tmp_path: Path) -> None:
    for label, level in (("dark", 0), ("light", 255)):
        folder = tmp_path / "pictures" / "train" / label
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (1, 1), (level, level, level)).save(folder / f"{number}.png")
    changes = {"rand_augment": "rand-m9-n2-mstd0.5-inc1", "three_augment": True, "crop_scale": (0.08, 1.0)}
    trained, given, _ = prepare(recipe(plain, tmp_path / "pictures", **changes))
    seen = given.training.__getitems__([Draw(0), Draw(5)])
    assert seen.pixels.shape == (2, 3, 12, 8)
    assert torch.isfinite(trained.losses(seen)).all()


def test_a_set_smaller_than_the_number_of_processes_is_refused(picture_run: Any, tmp_path: Path) -> None:
    few = script.draw(tmp_path / "few", per_class=2)
    _, report = picture_run(tmp_path / "run", data=str(few), batch=8)
    assert "3 pictures are too few for a batch of 8 on 1 device(s)" in report["error"]
    _, report = picture_run(tmp_path / "other", world=2, data=str(few), batch=2)
    assert "3 pictures are too few for a batch of 2 on 2 device(s)" in report["error"]


# Around a run


def test_a_trial_leaves_nothing_behind(data: Path, plain: Path, tmp_path: Path) -> None:
    save_recipe(recipe(plain, data, trainer=QUIET), tmp_path / "run.yaml")
    trained = train_classify(tmp_path / "run.yaml", out=tmp_path / "run", fast_dev_run=True)
    assert "the configuration works" in str(trained)
    assert trained.fit.steps == 4
    assert ViT.from_pretrained(trained.model).config.classes == 3
    assert not (tmp_path / "run").exists()


def test_the_card_tells_the_model_its_cost_and_its_memory(picture_run: Any, tmp_path: Path) -> None:
    _, report = picture_run(tmp_path / "run", epochs=1)
    assert "ViT of width 16, 2 blocks, patches of 4 px of 12 x 8, 3 classes" in report["stderr"]
    assert "training on 27 pictures of pictures/train in 3 classes, choosing the best epoch on 12" in report["stderr"]
    assert "memory      about" in report["stderr"]
    assert "GFLOPs an image" in report["stderr"]


def test_a_frozen_vit_costs_its_forward_pass_alone(data: Path, plain: Path, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "vit")
    frozen = recipe(plain, data, pretrained=str(tmp_path / "vit"), freeze_vit=True, drop_path=0.0)
    whole = recipe(plain, data, pretrained=str(tmp_path / "vit"))
    assert prepare(whole)[0].picture_flops() == 3 * prepare(frozen)[0].picture_flops()
