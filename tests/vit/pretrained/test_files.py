"""Reading a checkpoint of any form, and running none of it: what opens, what is refused, what is no checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.pretrained import files


def tensors(factor: float = 1.0) -> dict[str, Tensor]:
    return {name: factor * t for name, t in published.dino_file().items()}


def opened(path: Path, **options: Any) -> ViT:
    return ViT.from_pretrained(path, heads=published.HEADS, **options)


def one_line(caught: Any, *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def same(vit: ViT, factor: float = 1.0) -> None:
    assert torch.equal(vit.cls, tensors(factor)["cls_token"].flatten())


# every form ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pth", "model.bin", "no_suffix", "odd.safetensors", "last.ckpt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 2020"])
def test_a_file_of_torch_is_known_by_what_is_in_it(tmp_path, name, zipped):
    torch.save(tensors(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    same(opened(tmp_path / name))


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.npz"])
def test_safetensors_are_known_by_what_is_in_them(tmp_path, name):
    save_file(tensors(), tmp_path / name)
    same(opened(tmp_path / name))


def test_safetensors_that_begin_like_a_pickle_open(tmp_path):
    """The length of the header comes first, and its lowest byte may be any multiple of 8, 128 included."""
    path = tmp_path / "model.safetensors"
    for letters in range(0, 257, 8):
        save_file(tensors(), path, metadata={"note": "x" * letters})
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    same(opened(path))


def test_arrays_of_numpy_open(tmp_path):
    np.savez(tmp_path / "weights", **{name: t.numpy() for name, t in tensors().items()})
    same(opened(tmp_path / "weights.npz"))


def shards(folder: Path) -> Path:
    parts: dict[str, dict[str, Tensor]] = {"model-1-of-2.safetensors": {}, "model-2-of-2.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors().items()):
        parts[list(parts)[i % 2]][name] = tensor
    for file, content in parts.items():
        save_file(content, folder / file)
    index = {"weight_map": {name: file for file, content in parts.items() for name in content}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_put_together(tmp_path):
    same(opened(shards(tmp_path)))
    same(opened(tmp_path / "model.safetensors.index.json"))


def test_a_missing_or_incomplete_shard_is_named(tmp_path):
    index = shards(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "lost.weight": "model-1-of-2.safetensors"}}))
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    one_line(caught, "lost.weight", "model-1-of-2.safetensors")
    index.write_text(json.dumps(content))
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    one_line(caught, "model-2-of-2.safetensors", "not there")
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(InputError, match="not there"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "checkpoint.pth", "vit.npz"])
def test_a_folder_opens_by_the_weights_in_it(tmp_path, name):
    (tmp_path / "README.md").write_text("my model")
    save_file(tensors(), tmp_path / name)
    same(opened(tmp_path))


@pytest.mark.parametrize("holds", [[], ["README.md"], ["a.pth", "b.pth"]], ids=str)
def test_a_folder_without_weights_or_with_several_is_told(tmp_path, holds):
    for name in holds:
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    one_line(caught, "several files" if len(holds) == 2 else "no weights", *holds[:-1])


# wrappers and parts --------------------------------------------------------------------------------------------------

WRAPPED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "state_dict": lambda t: {"state_dict": t, "epoch": 3},
    "beside single numbers": lambda t: {"model": t, "epoch": torch.tensor(3), "best": torch.tensor(0.5)},
    "model in a module": lambda t: {"model": {"module": t}},
    "parallel": lambda t: {f"module.{n}": tensor for n, tensor in t.items()},
    "compiled in a trainer": lambda t: {"state_dict": {f"net._orig_mod.{n}": tensor for n, tensor in t.items()}},
    "a name of one's own": lambda t: {"my_network": t, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}},
    "averaged weights first": lambda t: {"model": {n: 2 * x for n, x in t.items()}, "model_ema": t},
    "settings of an average": lambda t: {"model": t, "ema": {"decay": 0.99}},
    "beside a convolutional network": lambda t: {
        **{f"vit.{n}": tensor for n, tensor in t.items()},
        "cnn.conv1.weight": torch.ones(8, 3, 7, 7), "cnn.layer1.0.conv1.weight": torch.ones(8, 8, 3, 3),
    },
}  # fmt: skip


@pytest.mark.parametrize("how", WRAPPED)
def test_wrappers_and_prefixes_come_off(tmp_path, how):
    torch.save(WRAPPED[how](tensors()), tmp_path / "x.pth")
    same(opened(tmp_path / "x.pth"))


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_part_is_chosen_by_name(tmp_path, form):
    both = {"teacher": tensors(), "student": tensors(2)}
    flat = {f"{part}.backbone.{name}": t for part, content in both.items() for name, t in content.items()}
    torch.save(both if form == "nested" else flat, tmp_path / "x.pth")
    same(opened(tmp_path / "x.pth"))
    same(opened(tmp_path / "x.pth", part="student"), 2)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth", part="pupil")
    one_line(caught, "'pupil'", "student")


def test_two_of_equal_standing_need_a_word(tmp_path):
    torch.save(
        {f"{part}.{n}": t for part in ("left.eye", "right.eye") for n, t in tensors().items()}, tmp_path / "x.pth"
    )
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth")
    one_line(caught, "'left.eye.'", "'right.eye.'", "part=")
    for part in ("left.eye.", "left.eye", "left"):
        assert "prefix 'left.eye.'" in opened(tmp_path / "x.pth", part=part).report.unwrapped


def test_errors_name_a_tensor_as_the_file_does(tmp_path):
    content = {f"net._orig_mod.{name}": t for name, t in tensors().items()}
    for name in ("blocks.1.norm2.bias", "patch_embed.proj.weight", "pos_embed"):
        torch.save({n: t for n, t in content.items() if not n.endswith(name)}, tmp_path / "x.pth")
        with pytest.raises(InputError) as caught:
            opened(tmp_path / "x.pth")
        one_line(caught, f"net.{name}")
    torch.save({**content, "net._orig_mod.blocks.0.lora": torch.ones(1)}, tmp_path / "x.pth")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth")
    one_line(caught, "net._orig_mod.blocks.0.lora")


# what is no checkpoint -----------------------------------------------------------------------------------------------


def test_a_whole_module_is_told_to_save_its_weights_alone(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pth")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth")
    one_line(caught, "Linear", "torch.save(model.state_dict(), path)")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused_for_it_is_a_program(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "ViT-B-32.pt")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "ViT-B-32.pt")
    one_line(caught, "TorchScript", "program", "refused")


NO_CHECKPOINTS = {
    "empty": (b"", "empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "Git LFS"),
    "page": (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "json": (b'{"a": 1}', "JSON"),
    "text": (b"hello", "neither safetensors"),
    "noise": (bytes(range(7, 200)), "neither safetensors"),
    "a few bytes of a pickle": (b"\x80\x02", "not a readable checkpoint"),
    "a few bytes of an archive": (b"PK\x03\x04" + bytes(40), "cut short"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
@pytest.mark.parametrize("name", ["model.safetensors", "x.pth", "x.npz"])
def test_what_is_no_checkpoint_is_one_line(tmp_path, kind, name):
    content, word = NO_CHECKPOINTS[kind]
    (tmp_path / name).write_bytes(content)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(InputError) as caught:
            opened(source)
        one_line(caught, name, word)


@pytest.mark.parametrize("keep", [5, 300, 0.5, -1])
@pytest.mark.parametrize("form", ["safetensors", "zip", "before 2020", "npz"])
def test_a_file_that_is_cut_short_is_one_line(tmp_path, form, keep):
    path = tmp_path / "x.npz"
    if form == "safetensors":
        save_file(tensors(), path)
    elif form == "npz":
        np.savez(path, **{name: t.numpy() for name, t in tensors().items()})
    else:
        torch.save(tensors(), path, _use_new_zipfile_serialization=form == "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught, str(path))


def named(*names: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors by name; `shapes` are of those whose shape is looked at."""
    return {name: torch.ones(2, 2) for name in names} | {n.replace("__", "."): torch.ones(s) for n, s in shapes.items()}


TABLE = "attn.relative_position_bias_table"
BEIT = {**tensors(), **named(f"blocks.0.{TABLE}", "blocks.0.gamma_1")}
SWIN = named(f"layers.0.blocks.0.{TABLE}", patch_embed__proj__weight=(8, 3, 4, 4))
BERT = named("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.intermediate.dense.weight")
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
OTHERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "BEiT": (BEIT, ("relative_position_bias_table", "BEiT")),
    "Swin": (SWIN, ("Swin",)),
    "ResNet": (named("layer1.0.conv1.weight", "fc.weight", conv1__weight=(8, 3, 7, 7)), ("convolutional",)),
    "ConvNeXt": (named("stages.0.blocks.0.norm.weight", stem__0__weight=(8, 3, 4, 4)), ("stages",)),
    "BERT": (BERT, ("word_embeddings", "text model")),
    "an optimizer": (OPTIMIZER, ("no tensors by name", "param_groups")),
    "optimizer moments by name": ({f"exp_avg.{n}": t for n, t in tensors().items()}, ("optimizer",)),
    "numbers": ({"epoch": 3, "loss": 0.5}, ("no tensors by name", "epoch")),
    "a list": ([torch.ones(2)], ("no tensors by name", "list")),
    "one tensor": (torch.ones(2), ("no tensors by name", "Tensor")),
    "something else": (named("weight", "bias"), ("no vision transformer", "weight")),
    "no patch projection": ({n: t for n, t in tensors().items() if "patch" not in n}, ("patch_embed.proj.weight",)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_something_else_is_one_line_that_says_what(tmp_path, kind):
    content, words = OTHERS[kind]
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth")
    one_line(caught, "x.pth", *words)


@pytest.mark.parametrize("name", ["last.ckpt", "runs/last.ckpt", "a/b/model.safetensors", "vit.pth"])
def test_a_file_that_is_not_there_is_not_sought_on_the_hub(name):
    with pytest.raises(InputError) as caught:
        files.locate(name)
    one_line(caught, name, "no such file")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "x.pth").write_text("x")

    def refuse(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "x.pth")
    one_line(caught, "x.pth", "Permission denied")
