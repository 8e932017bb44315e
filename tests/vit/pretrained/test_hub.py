"""Names on the hub and of timm, without a network: what is asked of the hub, and what is told when it gives nothing."""

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import published
import pytest
import torch
from safetensors.torch import save_file

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.pretrained import hub


class Hub:
    """Stands for huggingface_hub: repositories are folders, and a cache holds what was fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.online = folder, True
        self.listed: list[str] = []
        self.fetched: list[tuple[str, list[str]]] = []

    def add(self, name: str, *files: str) -> Path:
        place = self.folder / "hub" / name
        place.mkdir(parents=True)
        for file in files:
            tensors = published.dino_file()
            if file.endswith(".safetensors"):
                save_file(tensors, place / file)
            elif file.endswith((".bin", ".pth")):
                torch.save(tensors, place / file)
            elif file.endswith(".index.json"):
                names = dict.fromkeys(tensors, "model-1-of-1.safetensors")
                (place / file).write_text(json.dumps({"weight_map": names}))
            else:
                (place / file).write_text("{}")
        return place

    def model_info(self, name: str, **options: Any) -> Any:
        self.listed.append(name)
        if not self.online:
            raise ConnectionError("no route to the hub\nTry again")
        place = self.folder / "hub" / name
        if not place.is_dir():
            raise ValueError("404 Client Error.\nRepository Not Found")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file.name) for file in place.iterdir()])

    def snapshot_download(self, name: str, *, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        cached = self.folder / "cache" / name
        if local_files_only or not self.online:
            if not cached.is_dir():
                raise FileNotFoundError("not in the cache")
            return str(cached)
        self.fetched.append((name, allow_patterns))
        cached.mkdir(parents=True, exist_ok=True)
        for file in (self.folder / "hub" / name).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (cached / file.name).write_bytes(file.read_bytes())
        return str(cached)


@pytest.fixture
def the_hub(monkeypatch, tmp_path) -> Hub:
    stand_in = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "model_info", stand_in.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return stand_in


@pytest.fixture
def without_timm(monkeypatch) -> Callable[[str], None]:
    """timm is not there, or is there and cannot be imported."""
    real = builtins.__import__

    def remove(how: str) -> None:
        def refuse(name: str, *arguments: Any, **options: Any) -> Any:
            if name.split(".")[0] == "timm":
                raise (
                    ImportError("No module named 'timm'")
                    if how == "absent"
                    else RuntimeError("operator does not exist")
                )
            return real(name, *arguments, **options)

        for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", refuse)

    return remove


def opened(name: str) -> ViT:
    return ViT.from_pretrained(name, heads=published.HEADS)


def one_line(caught: Any, *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("name", ["someone/my.vit-small", "hf-hub:someone/my.vit-small", "hf_hub:someone/my.vit-small"])
def test_a_repository_opens_by_its_name(the_hub, name):
    the_hub.add("someone/my.vit-small", "README.md", "config.json", "model.safetensors")
    vit = opened(name)
    assert torch.equal(vit.cls, published.dino_file()["cls_token"].flatten())
    assert vit.report.source.startswith(name)
    assert the_hub.listed == ["someone/my.vit-small"]


HELD = {
    "all forms": (["model.safetensors", "pytorch_model.bin", "flax_model.msgpack"], ["model.safetensors"]),
    "old": (["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
    "shards": (
        ["model.safetensors.index.json", "model-1-of-1.safetensors", "pytorch_model.bin"],
        ["model.safetensors.index.json", "model-*.safetensors"],
    ),
    "one file of its own": (["dinov2_vits14_pretrain.pth"], ["dinov2_vits14_pretrain.pth"]),
    "one safe file of its own": (["weights.safetensors", "weights.pth"], ["weights.safetensors"]),
}


@pytest.mark.parametrize("held", HELD)
def test_one_file_with_weights_is_fetched_and_what_describes_it(the_hub, held):
    files, expected = HELD[held]
    the_hub.add("someone/vit", "config.json", "preprocessor_config.json", "modeling.py", *files)
    opened("someone/vit")
    ((_, patterns),) = the_hub.fetched
    assert [pattern for pattern in patterns if not pattern.endswith(("config.json", "tokenizer.json"))] == expected
    assert {"config.json", "preprocessor_config.json", "open_clip_config.json"} <= set(patterns)


@pytest.mark.parametrize("files", [["README.md"], ["a.pth", "b.pth"], ["training_args.bin", "config.json"]], ids=str)
def test_a_repository_without_weights_or_with_several_is_told_and_not_fetched(the_hub, files):
    the_hub.add("someone/vit", *files)
    with pytest.raises(InputError) as caught:
        opened("someone/vit")
    one_line(
        caught, "someone/vit", "several files" if len(files) == 2 and files[0] == "a.pth" else "no weights", files[0]
    )
    assert the_hub.fetched == []


def test_a_name_that_stands_for_nothing_is_one_line(the_hub):
    with pytest.raises(InputError) as caught:
        opened("someone/nothing")
    one_line(caught, "'someone/nothing'", "404")


def test_without_a_connection_what_was_fetched_before_opens(the_hub):
    the_hub.add("someone/vit", "config.json", "model.safetensors")
    first = opened("someone/vit")
    the_hub.online = False
    assert torch.equal(opened("someone/vit").cls, first.cls)
    with pytest.raises(InputError) as caught:
        opened("someone/other")
    one_line(caught, "'someone/other'", "no route to the hub")


def test_a_cache_that_holds_no_weights_is_no_answer(the_hub, tmp_path):
    (tmp_path / "cache" / "someone" / "vit").mkdir(parents=True)
    (tmp_path / "cache" / "someone" / "vit" / "config.json").write_text("{}")
    the_hub.online = False
    with pytest.raises(InputError, match="no route to the hub"):
        opened("someone/vit")


def test_a_folder_by_the_name_comes_before_the_hub(the_hub, tmp_path):
    (tmp_path / "someone").mkdir()
    the_hub.add("x", "model.safetensors").rename(tmp_path / "someone" / "vit")
    opened("someone/vit")
    assert the_hub.listed == []


# names of timm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm/vit_small_patch16_224.dino", "vit_small_patch16_224.dino"])
@pytest.mark.parametrize("how", ["there", "absent"])
def test_timms_name_with_a_tag_needs_no_timm(the_hub, without_timm, name, how):
    if how == "absent":
        without_timm(how)
    the_hub.add("timm/vit_small_patch16_224.dino", "config.json", "model.safetensors")
    opened(name)
    assert the_hub.listed == ["timm/vit_small_patch16_224.dino"]


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "timm/vit_small_patch16_224"])
def test_timm_adds_the_default_tag(the_hub, name):
    pytest.importorskip("timm", reason="timm is not installed")
    the_hub.add("timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "model.safetensors")
    opened(name)
    assert the_hub.listed == ["timm/vit_small_patch16_224.augreg_in21k_ft_in1k"]


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_a_name_without_a_tag_asks_for_it_where_timm_cannot_help(the_hub, without_timm, how):
    without_timm(how)
    with pytest.raises(InputError) as caught:
        opened("vit_small_patch16_224")
    one_line(caught, "'vit_small_patch16_224'", "tag", "install timm", "No module" if how == "absent" else "operator")
    assert the_hub.listed == []


@pytest.mark.parametrize("name", ["vit_giraffe_patch16_224", "vit_base_patch16_plus_240"])
def test_a_name_that_timm_does_not_know_or_has_no_weights_for_is_told(the_hub, name):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    if timm.is_model(name) and timm.models.get_pretrained_cfg(name).hf_hub_id:
        pytest.skip("this version of timm has weights for it")
    with pytest.raises(InputError) as caught:
        opened(name)
    one_line(caught, f"'{name}'", "timm has no weights")


@pytest.mark.parametrize("name", ["vit", "small", "Vit_Small", "vit small_1", "a/b/c", "./a_b", "~a/b_c", "timm/"])
def test_what_is_no_name_at_all_is_not_sought(the_hub, name):
    with pytest.raises(InputError) as caught:
        opened(name)
    one_line(caught, name)
    assert the_hub.listed == []


def test_hub_names_have_an_owner_and_a_name():
    assert all(map(hub.is_name, ("facebook/dinov2-small", "timm/vit_small_patch16_224.dino", "a/b")))
    assert not any(map(hub.is_name, ("a", "a/b/c", "/a/b", "./a", "~/a", "a b/c", "")))
