"""A model folder and all the ways it can be wrong."""

import dataclasses
import errno
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.vit import checkpoint
from regard.vit.config import PositionResize, RopeRecipe, ViTConfig
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.preprocess import Preprocess

# every field differs from its default
UNUSUAL = dict(
    image_size=(16, 40), patch_size=8, channels=1, dim=24, depth=2, heads=3, head_dim=4, hidden_dim=20, registers=2,
    registers_place="end", position_rows="cls+registers+patches",
    position_resize=PositionResize("bilinear", False, 0.1), rope=RopeRecipe("index", 50.0, (3, 4), (2.5,)),
    activation="swiglu", norm_eps=1e-3, qkv_bias=False, key_bias=False, qk_norm=True, attn_norm=True, mlp_norm=True,
    sink=True, layer_scale=0.1, drop_path=0.25, pre_norm=True, pooling="cls+mean", classes=5, size_policy="pad",
    preprocess=Preprocess((16, 40), "crop", 0.875, "bilinear", (0.5,), (0.25,), (1, 2, 3), "floor", "torch"),
)  # fmt: skip
# these exclude fields above, and get configurations of their own
OTHERS = [
    dict(positions="rope"), dict(positions="learned+rope"), dict(positions="sincos"), dict(positions="none"),
    dict(class_token=False), dict(norm_place="pooled", pooling="mean"), dict(qkv_bias=True, key_bias=False),
    dict(position_resize=PositionResize("bilinear", False, 0.0, True)),
]  # fmt: skip


def unusual(**changes: Any) -> ViTConfig:
    if changes.get("class_token") is False:
        changes["pooling"] = "map"
    return ViTConfig(**{**UNUSUAL, **changes})


def test_the_unusual_configuration_differs_from_the_default_everywhere():
    for field in dataclasses.fields(ViTConfig):
        if field.name not in ("positions", "class_token", "norm_place"):
            assert getattr(unusual(), field.name) != getattr(ViTConfig(), field.name), field.name
    for field in dataclasses.fields(Preprocess):
        assert getattr(unusual().preprocess, field.name) != getattr(Preprocess(), field.name), field.name
    for field in dataclasses.fields(RopeRecipe):
        assert getattr(unusual().rope, field.name) != getattr(RopeRecipe(), field.name), field.name
    everywhere = {name for changes in OTHERS for name in changes}
    assert {"positions", "class_token", "norm_place"} <= everywhere
    for field in dataclasses.fields(PositionResize):
        differing = [unusual(**changes).position_resize for changes in [{}, *OTHERS]]
        assert any(getattr(p, field.name) != getattr(PositionResize(), field.name) for p in differing), field.name


@pytest.fixture
def model(noisy) -> ViT:
    return noisy(ViT(unusual())).eval()


@pytest.fixture
def folder(model, tmp_path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def one_line(caught: Any, *words: str) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.parent.iterdir() if p != folder)


# round trip ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, *OTHERS], ids=str)
def test_saving_and_opening_is_bit_equal(noisy, tmp_path, changes):
    model = noisy(ViT(unusual(**changes))).eval()
    model.save_pretrained(tmp_path / "a" / "model")
    twin = ViT.from_pretrained(tmp_path / "a" / "model")
    assert twin.config == model.config
    assert hash(twin.config) == hash(model.config)
    assert not twin.training
    assert all(p.requires_grad for p in twin.parameters())
    images = torch.randn(2, 1, 24, 17)
    before, after = model(images), twin(images)
    assert torch.equal(before.patches, after.patches)
    assert torch.equal(before.registers, after.registers)
    assert torch.equal(model.pool(before), twin.pool(after))
    assert torch.equal(model.classify(images), twin.classify(images))
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in twin.named_parameters()}
    twin.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / "model" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["model"]


def test_the_precision_of_the_weights_is_kept(model, tmp_path):
    model.bfloat16().save_pretrained(tmp_path / "half")
    assert {p.dtype for p in ViT.from_pretrained(str(tmp_path / "half")).parameters()} == {torch.bfloat16}


def test_a_file_of_mixed_precisions_opens_in_the_widest(folder):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    save_file({**tensors, name: tensors[name].half()}, folder / "model.safetensors")
    opened = ViT.from_pretrained(folder)
    assert {p.dtype for p in opened.parameters()} == {torch.float32}
    assert torch.isfinite(opened(torch.randn(1, 1, 16, 40)).patches).all()


def test_a_model_in_half_precision_takes_what_its_preprocessing_makes(model):
    images = torch.rand(1, 1, 16, 40)
    half = model.bfloat16()(images).patches
    assert half.dtype == torch.bfloat16


def test_a_precision_no_layer_computes_in_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "float8_e4m3fn", "convert the file")


def test_a_passport_of_an_impossible_size_is_refused(folder):
    passport = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**passport, "dim": 3 * 10**30}))
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "config.json", "no model can be built")


def test_a_passport_nested_without_end_is_refused(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "config.json", "not valid JSON")


def test_an_opened_model_does_not_hang_on_its_file(folder, model):
    twin = ViT.from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"gone")
    images = torch.randn(1, 1, 16, 40)
    assert torch.equal(twin(images).patches, model(images).patches)


def test_the_passport_states_format_kind_and_every_field(folder):
    passport = json.loads((folder / "config.json").read_text())
    assert passport["format"] == 2
    assert passport["kind"] == "ViTConfig"
    assert set(passport) == {"format", "kind", *(f.name for f in dataclasses.fields(ViTConfig))}


# tensors -------------------------------------------------------------------------------------------------------------


def edit(folder: Path, change: Any) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NAME = "blocks.1.attn.to_q.weight"
TENSOR_FAULTS = {
    "missing": (lambda t: t.pop(NAME), ("1 missing", NAME)),
    "renamed": (lambda t: t.update({"blocks.1.attn.q.weight": t.pop(NAME)}), (NAME, "blocks.1.attn.q.weight")),
    "unused": (lambda t: t.update(mask_token=torch.zeros(3)), ("1 unused", "mask_token")),
    "misshapen": (lambda t: t.update({NAME: t[NAME].T.contiguous()}), (NAME, "(24, 12)", "(12, 24)")),
    "not a number": (lambda t: t[NAME].view(-1)[5].fill_(torch.nan), (NAME, "not finite")),
    "infinite": (lambda t: t[NAME].view(-1)[5].fill_(torch.inf), (NAME, "not finite")),
    "whole numbers": (lambda t: t.update({NAME: t[NAME].long()}), (NAME, "int64")),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_wrong_tensor_is_named(folder, fault):
    change, words = TENSOR_FAULTS[fault]
    edit(folder, change)
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "model.safetensors", *words)


def test_many_missing_tensors_still_make_one_line(folder):
    edit(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith("blocks.0")])
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "missing", "more")


# passport ------------------------------------------------------------------------------------------------------------

PASSPORT_FAULTS = {
    "another format": (lambda p: p.update(format=3), ("format 3", "update Regard")),
    "another kind": (lambda p: p.update(kind="ImageQAConfig"), ("ImageQAConfig", "ViTConfig")),
    "unknown field": (lambda p: p.update(colour="red"), ("unknown field 'colour'",)),
    "missing field": (lambda p: p.pop("qk_norm"), ("'qk_norm'", "missing")),
    "a text for a number": (lambda p: p.update(dim="24"), ("dim", "'24'", "int")),
    "a flag for a number": (lambda p: p.update(depth=True), ("depth", "True")),
    "a number for a flag": (lambda p: p.update(qk_norm=1), ("qk_norm", "bool")),
    "a fraction for a whole number": (lambda p: p.update(dim=24.5), ("dim", "24.5")),
    "a number for a pair": (lambda p: p.update(image_size=16), ("image_size", "list")),
    "three for a pair": (lambda p: p.update(image_size=[16, 40, 3]), ("image_size", "2 values")),
    "an unknown choice": (lambda p: p.update(activation="relu"), ("activation", "'relu'", "quick_gelu")),
    "an impossible value": (lambda p: p.update(patch_size=0), ("patch_size", "at least 1")),
    "nested, of a wrong type": (lambda p: p["preprocess"].update(fit=3), ("preprocess", "fit")),
    "nested, unknown": (lambda p: p["position_resize"].update(align=True), ("position_resize", "'align'")),
    "nested, no object": (lambda p: p.update(preprocess=None), ("preprocess", "None")),
    "no passport": (lambda p: p.clear(), ("not a passport",)),
    "null for a number": (lambda p: p.update(dim=None), ("dim", "None")),
}


@pytest.mark.parametrize("fault", PASSPORT_FAULTS)
def test_a_wrong_passport_is_one_line_that_names_the_field(folder, fault):
    change, words = PASSPORT_FAULTS[fault]
    passport = json.loads((folder / "config.json").read_text())
    change(passport)
    (folder / "config.json").write_text(json.dumps(passport))
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "config.json", *words)


@pytest.mark.parametrize("text", [b"{", b"", b"[1, 2]", b"\xff\xfe\x00", b"3", b'{"format": 1'])
def test_broken_json_is_one_line(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, name, "missing")


# files that are no safetensors ---------------------------------------------------------------------------------------


class Trap:
    """A pickle that creates a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_is_refused_and_nothing_in_it_runs(folder, tmp_path, protocol):
    trap = pickle.dumps(Trap(tmp_path / "sprung"), protocol)
    (folder / "model.safetensors").write_bytes(trap)
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "model.safetensors")
    assert ("looks like a pickle" in str(caught.value)) == (protocol >= 2)  # older ones have no mark of their own
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap would have worked"


def test_a_torch_file_is_refused_and_nothing_in_it_runs(folder, tmp_path):
    torch.save({"weight": Trap(tmp_path / "sprung")}, folder / "model.safetensors")
    with pytest.raises(InputError, match="looks like a pickle"):
        ViT.from_pretrained(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_one_line(folder, keep):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder)
    one_line(caught, "model.safetensors", "safetensors file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_in_place_of_a_folder_is_refused(folder, name):
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(folder / name)
    one_line(caught, "a model is a folder")


# names on the hub ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "/nowhere/model", "./x/y", "../up", "owner/", "~nobody/x"])
def test_what_is_neither_folder_nor_hub_name_is_not_sought_on_the_hub(monkeypatch, name):
    for function in ("model_info", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, function, lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(name)
    one_line(caught, name)


def hub_faults() -> dict[str, BaseException]:
    from huggingface_hub import errors

    http = pytest.importorskip(errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0])  # the client of this version
    response = http.Response(404, request=http.Request("GET", "http://hub/x"))
    return {
        "404": errors.RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found", response=response),
        "gated": errors.GatedRepoError("403 Client Error.\n\nAccess is restricted", response=response),
        "no network": errors.LocalEntryNotFoundError("Cannot find the snapshot on the disk.\nTry again"),
        "offline": errors.OfflineModeIsEnabled("offline mode is enabled"),
        "a bad name": errors.HFValidationError("Repo id must use alphanumeric chars"),
        "a proxy": http.ProxyError("403 Forbidden"),
        "a dropped connection": http.ReadError(""),
        "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    }


@pytest.mark.parametrize("open_it", [ViT.from_pretrained, checkpoint.find], ids=["ViT", "find"])
@pytest.mark.parametrize("fault", hub_faults())
def test_what_the_hub_does_not_give_is_one_line(monkeypatch, fault, open_it):
    error = hub_faults()[fault]

    def refuse(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "model_info", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InputError) as caught:
        open_it("someone/no-such-model")
    one_line(caught, "'someone/no-such-model'", (str(error).splitlines() or [type(error).__name__])[0])
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("open_it", [ViT.from_pretrained, checkpoint.find], ids=["ViT", "find"])
def test_only_the_files_of_a_model_are_fetched(monkeypatch, folder, model, open_it):
    asked = {}

    def give(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        return str(folder)

    def listed(name: str) -> Any:
        names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "setup.py", "tokenizer.json"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub, "model_info", listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    opened = open_it("someone/model")
    assert (opened.config if isinstance(opened, ViT) else ViT.from_pretrained(opened).config) == model.config
    assert asked["name"] == "someone/model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(asked["allow_patterns"])
    assert not [p for p in asked["allow_patterns"] if "*" in p or p.endswith((".bin", ".pt", ".py", ".pkl"))]


# saving over what is there -------------------------------------------------------------------------------------------


def test_an_older_model_is_replaced_whole(folder, noisy):
    (folder / "tokenizer.json").write_text("{}")
    newer = noisy(ViT(unusual(depth=1))).eval()
    with pytest.raises(InputError, match="no saved model"):  # a ViT writes no tokenizer: this is something else
        newer.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    newer.save_pretrained(folder)
    assert ViT.from_pretrained(folder).config.depth == 1
    assert leftovers(folder) == []


def test_an_empty_folder_is_filled_and_a_link_followed(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_foreign_folder_is_refused_and_untouched(model, tmp_path, kind):
    place = tmp_path / "thesis"
    if kind == "folder":
        place.mkdir()
        (place / "config.json").write_text("mine")
        (place / "chapter.tex").write_text("years of work")
    else:
        place.write_text("years of work")
    with pytest.raises(InputError) as caught:
        model.save_pretrained(place)
    one_line(caught, "thesis", "another folder")
    if kind == "folder":
        assert {p.name: p.read_text() for p in place.iterdir()} == {
            "config.json": "mine",
            "chapter.tex": "years of work",
        }
    else:
        assert place.read_text() == "years of work"
    assert leftovers(place) == []


def still_opens(folder: Path, model: ViT) -> None:
    assert ViT.from_pretrained(folder).config.depth == 2
    assert torch.equal(ViT.from_pretrained(folder).cls, model.cls)
    assert leftovers(folder) == []


@pytest.mark.parametrize("step", ["fsync", "replace", "second file", "rename of the new", "rename of the old", "extra"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(folder, model, noisy, monkeypatch, step, error):
    newer = noisy(ViT(unusual(depth=1)))
    calls = {"fsync": 0, "rename": 0}
    fsync, rename = os.fsync, Path.rename

    def failing(*arguments: Any) -> None:
        raise error

    def failing_fsync(handle: int) -> None:
        calls["fsync"] += 1
        if calls["fsync"] == 2:
            raise error
        fsync(handle)

    def failing_rename(path: Path, target: Path) -> Path:
        calls["rename"] += 1
        if calls["rename"] == {"rename of the old": 1, "rename of the new": 2}[step]:
            raise error
        return rename(path, target)

    with monkeypatch.context() as patch:
        if step.startswith("rename"):
            patch.setattr(Path, "rename", failing_rename)
        elif step == "second file":
            patch.setattr(os, "fsync", failing_fsync)
        elif step != "extra":
            patch.setattr(os, step, failing)
        extra = {"tokenizer.json": failing} if step == "extra" else None
        with pytest.raises(type(error)):
            checkpoint.save(folder, newer.config, newer, extra)
    still_opens(folder, model)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="root may write anywhere")
def test_saving_where_nothing_can_be_written_is_a_plain_error(model, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "model", Path("/proc/self/model")):
        with pytest.raises((OSError, InputError)) as caught:
            model.save_pretrained(place)
        one_line(caught)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_extra_files_travel_along(model, tmp_path):
    checkpoint.save(tmp_path / "m", model.config, model, {"tokenizer.json": lambda path: path.write_text("{}")})
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    checkpoint.save(tmp_path / "m", model.config, model, {"tokenizer.json": lambda path: path.write_text("[]")})
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "[]"
