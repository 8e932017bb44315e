"""The task `classify`: what it trains, what it counts, what it refuses, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import picture_run as script
import pytest
import torch
from PIL import Image
from torch.nn import functional

from regard.datasets import pictures as pictures_file
from regard.train.classify import task as classify_task
from regard.train.classify.building import CLASSES, build
from regard.train.classify.module import ClassifyModule
from regard.train.classify.recipe import ClassifyRecipe
from regard.train.classify.task import prepare, train_classify
from regard.train.optim import depth_factors
from regard.train.pictures import PictureBatch
from regard.train.recipe import load_recipe, names, save_recipe
from regard.train.sampling import Draw
from regard.vit import ViT
from regard.vit.errors import InputError

QUIET = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script.draw(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A recipe in which every field is the default."""
    path = tmp_path / "plain.yaml"
    path.write_text("{}")
    return path


def recipe(plain: Path, data: Path, **changes: Any) -> ClassifyRecipe:
    settings = {**script.SETTINGS["classify"], "data": str(data), **changes}
    settings["vit"] = (
        {**script.VIT, **changes.get("vit", {})} if "pretrained" not in changes else changes.get("vit", {})
    )
    return load_recipe(plain, ClassifyRecipe, **settings)


def noisy(vit: ViT, seed: int = 3) -> ViT:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return vit


def small(**changes: Any) -> ViT:
    torch.manual_seed(0)
    return noisy(ViT.preset("small", **{**script.VIT, **changes}))


def module(vit: ViT | None = None, **settings: Any) -> ClassifyModule:
    return ClassifyModule(vit or small(classes=3), **{"seed": 7, "lr": 1e-3, **settings})


def batch(count: int = 6, classes: int = 3, seed: int = 0) -> PictureBatch:
    generator = torch.Generator().manual_seed(seed)
    return PictureBatch(
        pixels=torch.randint(0, 256, (count, 3, 12, 8), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, classes, (count,), generator=generator),
        counts=torch.ones(count, dtype=torch.bool),
        ids=[f"picture {number}" for number in range(count)],
        indices=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.long),
        bad=[],
    )


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


# Weights to start from


@pytest.mark.parametrize("classes", [0, 3, 5])
def test_pretrained_weights_keep_a_head_that_fits_and_lose_another(
    data: Path, plain: Path, tmp_path: Path, classes: int
) -> None:
    source = small(classes=classes)
    source.save_pretrained(tmp_path / "vit")
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "vit")), script.CLASSES)
    saved = source.state_dict()
    for name, tensor in vit.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, saved[name]), name
    assert vit.config.drop_path == 0.2
    if classes == 3:
        assert torch.equal(vit.head.weight, saved["head.weight"])
        assert "its head of 3 classes is trained on" in told
    else:
        assert not vit.head.weight.any()
        assert vit.head.weight.shape == (3, 16)
        assert told.endswith(
            "a new head of 3 classes on it" if not classes else "a new head of 3 classes takes its place"
        )
    assert ("its head is of 5 classes" in told) == (classes == 5)


def test_a_head_of_other_class_names_gives_way(picture_run: Any, tmp_path: Path, plain: Path, data: Path) -> None:
    picture_run(tmp_path / "run", epochs=1)
    same, told = build(recipe(plain, data, pretrained=str(tmp_path / "run")), script.CLASSES)
    assert "its head of 3 classes is trained on" in told
    assert same.head.weight.any()
    other, told = build(recipe(plain, data, pretrained=str(tmp_path / "run")), ["a", "b", "c"])
    assert "its head is of other classes (dark, left, right); a new one of 3 takes its place" in told
    assert not other.head.weight.any()


def test_weights_of_another_library_with_another_head_get_a_new_one(data: Path, plain: Path, tmp_path: Path) -> None:
    source = small(classes=5, image_size=(12, 12), position_rows="cls+patches")
    source.export(tmp_path / "timm", "timm")
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "timm")), script.CLASSES)
    assert "it has a classifier of 5 classes; a new head of 3 classes takes its place" in told
    assert torch.equal(vit.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)
    same, told = build(recipe(plain, data, pretrained=str(tmp_path / "timm")), list("abcde"))
    assert "its head of 5 classes is trained on" in told
    assert torch.equal(same.head.weight, source.head.weight)


def test_pretrained_weights_are_laid_out_for_another_size_and_pooling(data: Path, plain: Path, tmp_path: Path) -> None:
    source = small()
    source.save_pretrained(tmp_path / "vit")
    changes = {"image_size": [24, 16], "pooling": "cls+mean"}
    vit, told = build(recipe(plain, data, pretrained=str(tmp_path / "vit"), vit=changes), script.CLASSES)
    assert (vit.config.grid, vit.preprocess.size, vit.head.in_features) == ((6, 4), (24, 16), 32)
    images = torch.randn(2, 3, 24, 16)
    vit.eval()
    torch.testing.assert_close(vit(images).patches, source.eval()(images).patches)
    assert "a new head of 3 classes" in told
    with pytest.raises(InputError, match="saved by Regard"):
        build(recipe(plain, data, pretrained=str(tmp_path / "vit"), vit={"depth": 1}), script.CLASSES)


# The recipe


def test_a_misspelt_key_is_told_with_the_right_one(plain: Path) -> None:
    with pytest.raises(InputError, match="no field 'label_smoothin'; did you mean 'label_smoothing'"):
        load_recipe(plain, ClassifyRecipe, label_smoothin=0.1)
    plain.write_text("mixxup: 0.2\n")
    with pytest.raises(InputError, match="did you mean 'mixup'"):
        load_recipe(plain, ClassifyRecipe)


def test_every_recipe_that_comes_along_can_be_read_and_says_what_it_reaches() -> None:
    assert {"vit_s16_scratch", "deit3_s16_scratch", "fine_tune", "fashion_mnist", "linear_probe"} <= set(
        names(ClassifyRecipe)
    )
    for name in names(ClassifyRecipe):
        own = load_recipe(name, ClassifyRecipe)
        assert len(own.about) > 10


def test_every_field_is_documented() -> None:
    told = ClassifyRecipe.__doc__ or ""
    missing = [name for name in ClassifyRecipe.__dataclass_fields__ if f"\n        {name}: " not in told]
    assert missing == ["task"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"mixup": -1.0}, "mixup is -1.0"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"drop_path": 1.0}, "drop_path is 1.0"),
        ({"loss": "mse"}, "choose one of ce, bce"),
        ({"optimizer": "sgd"}, "choose one of adamw, muon"),
        ({"crop_scale": (0.5, 0.1)}, "the smaller first"),
        ({"warmup_steps": 3, "warmup_epochs": 1.0}, "say the same"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"muon_lr": 0.0}, "muon_lr is 0.0"),
        ({"freeze_vit": True, "optimizer": "muon", "drop_path": 0.0}, "muon trains those alone"),
        ({"freeze_vit": True, "drop_path": 0.1}, "leave layer_decay and drop_path out"),
    ],
)
def test_impossible_settings_are_told(plain: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_recipe(plain, ClassifyRecipe, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "smal"}, "no ViT preset is called 'smal'"),
        ({"vit": {"dimm": 3}}, "dimm"),
        ({"vit": {"classes": 3}}, "vit.classes is given by the data"),
        ({"vit": {"drop_path": 0.1}}, "vit.drop_path is a field of the recipe itself"),
        ({"freeze_vit": True, "drop_path": 0.0}, "give pretrained"),
        ({"rand_augment": "2,10"}, "rand_augment"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_what_contradicts_the_data_or_the_model_is_told(
    data: Path, plain: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        prepare(recipe(plain, **{"data": data, **change}))


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
