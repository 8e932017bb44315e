"""`regard export` writes what `ViT.export` writes, tells how to open it, and says in one line what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regard
from regard.crossattn import ImageQA
from regard.vit import ViT, ViTConfig

Command = Callable[..., "object"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small ViT with registers, saved."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 32), patch_size=8, dim=32, depth=2, heads=2, hidden_dim=64, registers=2)
    ViT(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_it_writes_a_folder_and_tells_how_to_open_it(regard_command: Command, folder: Path, tmp_path: Path) -> None:
    ran = regard_command("export", folder, "--to", "timm", "--out", tmp_path / "new" / "timm")
    assert ran.code == 0, ran.err
    read, wrote, opens = ran.out.splitlines()
    assert read.startswith(f"{folder}: regard layout, ")
    assert wrote == f"{tmp_path / 'new' / 'timm'}: timm, VisionTransformer, as vit_base_patch16_224 with arguments"
    assert opens == f"open it: model = timm.create_model('local-dir:{tmp_path}/new/timm', pretrained=True)"
    vit, back = ViT.from_pretrained(folder), ViT.from_pretrained(tmp_path / "new" / "timm")
    images = torch.randn(1, 3, 32, 48)
    assert torch.equal(vit(images).patches, back(images).patches)


def test_notes_are_told_in_words_and_as_json(regard_command: Command, folder: Path, tmp_path: Path) -> None:
    ran = regard_command("export", folder, "--to", "transformers", "--out", tmp_path / "a", "--json")
    told = json.loads(ran.out)
    assert (told["layout"], told["model"]) == ("transformers", "Dinov2WithRegistersModel")
    assert told["code"] == f"model = transformers.AutoModel.from_pretrained('{tmp_path}/a')"
    assert (told["source"], told["source_layout"], told["path"]) == (str(folder), "regard", f"{tmp_path}/a")
    words = regard_command("export", folder, "--to", "transformers", "--out", tmp_path / "a", "--overwrite", "true").out
    assert told["notes"]
    for note in told["notes"]:
        assert f"  note: {note}" in words.splitlines()


def test_the_function_and_the_command_say_the_same(regard_command: Command, folder: Path, tmp_path: Path) -> None:
    called = regard.export(folder, to="dinov2", out=tmp_path / "a.pth")
    ran = regard_command(
        "export", folder, "--to", "dinov2", "--out", tmp_path / "a.pth", "--overwrite", "true", "--json"
    )
    assert json.loads(ran.out) == json.loads(json.dumps(called.as_dict()))


@pytest.mark.parametrize("size", [["--image_size", "16", "48"], ["--image_size", "[16, 48]"], ["--image_size=[16,48]"]])
def test_a_size_is_two_numbers_or_a_list(
    size: list[str], regard_command: Command, folder: Path, tmp_path: Path
) -> None:
    ran = regard_command("export", folder, *size, "--to", "timm", "--out", tmp_path / "a")
    assert ran.code == 0, ran.err
    back = ViT.from_pretrained(tmp_path / "a")
    assert back.config.image_size == (16, 48)
    images = torch.randn(1, 3, 16, 48)
    assert torch.equal(ViT.from_pretrained(folder)(images).patches, back(images).patches)


def test_a_program_of_torch_export_comes_out_of_any_checkpoint(
    regard_command: Command, folder: Path, tmp_path: Path
) -> None:
    ViT.from_pretrained(folder).export(tmp_path / "timm", "timm")
    ran = regard_command(
        "export", tmp_path / "timm", "--to", "torch", "--out", tmp_path / "a.pt2", "--image_size", 16, 24
    )
    assert ran.code == 0, ran.err
    assert "timm layout" in ran.out
    program = torch.export.load(tmp_path / "a.pt2").module()
    images = torch.randn(4, 3, 16, 24)
    with torch.no_grad():
        tokens = ViT.from_pretrained(folder)(images)
    torch.testing.assert_close(program(images)["registers"], tokens.registers, atol=1e-5, rtol=1e-5)


def test_the_image_side_of_a_model_that_answers_questions_leaves_too(
    regard_command: Command, trained: Path, tmp_path: Path
) -> None:
    ran = regard_command("export", trained, "--to", "timm", "--out", tmp_path / "a")
    assert ran.code == 0, ran.err
    vit, back = ImageQA.from_pretrained(trained / "model").vit, ViT.from_pretrained(tmp_path / "a")
    images = torch.randn(1, 3, *vit.config.image_size)
    assert torch.equal(vit(images).patches, back(images).patches)


def test_mistakes_are_one_line(regard_command: Command, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, words in (
        ((folder, "--to", "torchvision", "--out", out), "torchvision cannot hold this model"),
        ((folder, "--to", "torchvision", "--out", out), "no registers 2; timm, transformers, dinov2, onnx, torch can"),
        ((folder, "--to", "keras", "--out", out), "keras"),
        ((folder, "--to", "timm"), "out"),
        (("--to", "timm", "--out", out), "model"),
        ((folder, "--to", "timm", "--out", folder), "exists already; choose another place"),
        ((folder, "--to", "timm", "--out", folder, "--overwrite", "true"), "a model that Regard saved is there"),
        ((folder, "--to", "onnx", "--out", out), "onnx writes one file; give it a name that ends in .onnx"),
        ((folder, "--to", "timm", "--out", out, "--image_size", 30, 32), "is no multiple of the patches of 8 px"),
        ((folder, "--to", "timm", "--out", out, "--image_size", 32), "image_size"),
        ((folder, "--to", "timm", "--out", out, "--image_size"), "image_size"),
        ((folder, "--to", "timm", "--out", ""), "is no path"),
        ((tmp_path / "nothing", "--to", "timm", "--out", out), "nothing"),
    ):
        ran = regard_command("export", *arguments)
        assert ran.code == 2, (arguments, ran)
        assert words in ran.err
        assert ran.err.startswith("regard: error: ")
        assert len(ran.err.splitlines()) == 1, ran.err
        assert not ran.out
    assert {file.name for file in tmp_path.iterdir()} == {"vit"}


def test_the_verb_is_listed(regard_command: Command) -> None:
    assert "  export MODEL " in regard_command("--help").out
    told = regard_command("export", "--help").out
    for word in ("--to", "--out", "--image_size", "--json"):
        assert word in told
    assert "export" in regard.__all__
    assert "export" in regard.doctor().extras
