"""`regard look`, `ask` and `train answer` on models of other libraries."""

import json

import pytest
import torch
from PIL import Image

from regard.crossattn import ImageQA
from regard.vit import ViT
from regard.vit.pretrained import rules
from regard.vit.pretrained.layouts import timm

SMALL = dict(image_size=(32, 32), patch_size=8, dim=192, depth=2, heads=3)
KINDS = {
    "cls": dict(registers=2, position_rows="patches"),
    "registers": dict(class_token=False, registers=2, pooling="mean", norm_place="pooled"),
    "patches": dict(class_token=False, pooling="map"),
}


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.linear_gradient("L").resize((50, 34)).convert("RGB").save(path)
    return path


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint under timm's names, as a training script leaves it."""

    def write(kind: str):
        torch.manual_seed(0)
        vit = ViT.preset("tiny", **SMALL, **KINDS[kind])
        tensors, left = rules.write(timm.RULES, vit.state_dict(), vit.config)
        assert left == []
        path = tmp_path / "last.ckpt"
        torch.save({"state_dict": {f"model._orig_mod.{n}": t for n, t in tensors.items()}, "epoch": 3}, path)
        return path

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_look_draws_any_model(regard_command, checkpoint, photo, tmp_path, kind: str) -> None:
    ran = regard_command("look", photo, "--model", checkpoint(kind), "--out", tmp_path / "map.png", "--json")
    assert ran.code == 0, ran
    told = json.loads(ran.out)
    assert (told["query"], told["layout"]) == (kind, "timm")
    for head in told["heads"]:
        assert sum(map(sum, head["map"])) + (head["cls"] or 0) + sum(head["registers"]) == pytest.approx(1, abs=1e-5)
    assert Image.open(tmp_path / "map.png").size[0] > 100


def test_look_is_told_what_a_file_does_not_say(regard_command, checkpoint, photo, tmp_path) -> None:
    path = checkpoint("cls")
    content = torch.load(path, weights_only=True)["state_dict"]
    tall = {n: torch.cat((t, t[:, :4]), dim=1) if n.endswith("pos_embed") else t for n, t in content.items()}
    torch.save(tall, path)  # 20 rows: 4 x 5 or 5 x 4 patches
    ran = regard_command("look", photo, "--model", path, "--out", tmp_path / "map.png")
    assert ran.code == 2
    assert "image_size=(height, width)" in ran.err
    told = ["--vit.image_size", "[40, 32]"]
    ran = regard_command("look", photo, "--model", path, "--out", tmp_path / "map.png", *told, "--json")
    assert ran.code == 0, ran


def test_look_tells_how_the_model_was_opened(regard_command, checkpoint, photo, tmp_path) -> None:
    ran = regard_command("look", photo, "--model", checkpoint("cls"), "--out", tmp_path / "map.png")
    assert ran.code == 0, ran
    assert "timm layout" in ran.out
    assert "prefix 'model.'" in ran.out


def test_ask_tells_that_a_vit_alone_cannot_answer(regard_command, checkpoint, photo) -> None:
    ran = regard_command("ask", photo, "what is it?", "--model", checkpoint("cls"))
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "regard train answer --pretrained" in ran.err


def test_a_model_trained_on_a_pretrained_vit_answers(regard_command, checkpoint, squares, tmp_path) -> None:
    path = checkpoint("registers")
    limits = ["--trainer.limit_train_batches", 1, "--trainer.limit_val_batches", 1, "--trainer.accelerator", "cpu"]
    run = ["train", "answer", "--pretrained", path, "--data", squares / "train.jsonl", "--out", tmp_path / "run"]
    ran = regard_command(*run, "--epochs", 1, "--batch_images", 2, "--held_out", 0.25, *limits)
    assert ran.code == 0, ran
    assert "image side: " in ran.err
    assert "is kept as it is" in ran.err
    trained = ImageQA.from_pretrained(tmp_path / "run").vit
    assert trained.config.registers == 2
    # One step at the learning rate of an untrained model would wreck it.
    untouched = ViT.from_pretrained(path).as_encoder().state_dict()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in trained.state_dict().items())
    picture, out = squares / "0.png", tmp_path / "ask.png"
    ran = regard_command("ask", picture, "what color is the square?", "--model", tmp_path / "run", "--out", out)
    assert ran.code == 0, ran


def test_an_unfrozen_image_side_is_trained_too(regard_command, checkpoint, squares, tmp_path) -> None:
    path = checkpoint("cls")
    limits = ["--trainer.limit_train_batches", 1, "--trainer.limit_val_batches", 1, "--trainer.accelerator", "cpu"]
    run = ["train", "answer", "--pretrained", path, "--freeze_vit", "false", "--data", squares / "train.jsonl"]
    ran = regard_command(
        *run, "--out", tmp_path / "run", "--epochs", 1, "--batch_images", 2, "--held_out", 0.25, *limits
    )
    assert ran.code == 0, ran
    assert "is trained too" in ran.err
    moved = ImageQA.from_pretrained(tmp_path / "run").vit.blocks[0].mlp.fc1.weight
    assert not torch.equal(moved, ViT.from_pretrained(path).blocks[0].mlp.fc1.weight)


def test_export_is_told_what_a_file_does_not_say_and_replaces_nothing_unasked(
    regard_command, checkpoint, tmp_path
) -> None:
    path = checkpoint("cls")
    ran = regard_command("export", path, "--to", "timm", "--out", tmp_path / "out", "--vit.norm_eps", 1e-5)
    assert ran.code == 0, ran
    assert ViT.from_pretrained(tmp_path / "out").config.norm_eps == 1e-5
    before = path.read_bytes()
    ran = regard_command("export", path, "--to", "dinov2", "--out", path)
    assert ran.code == 2
    assert "exists already" in ran.err
    assert path.read_bytes() == before
    ran = regard_command("export", path, "--to", "tim", "--out", tmp_path / "other")
    assert ran.code == 2
    assert "--to is 'tim'; choose one of timm, transformers" in ran.err
