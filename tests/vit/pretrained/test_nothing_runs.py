"""A checkpoint is read, and none of it runs: code is refused by name, settings of any library are values."""

import argparse
import collections
import dataclasses
import datetime
import functools
import io
import os
import pathlib
import pickle
import shutil
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.pretrained import torch_file


def tensors(rows: int = published.GRID**2 + 1) -> dict[str, Tensor]:
    return published.dino_file(rows)


def opened(path: Path) -> ViT:
    return ViT.from_pretrained(path, heads=published.HEADS)


def one_line(caught: Any, *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def same(vit: ViT) -> None:
    assert torch.equal(vit.cls, tensors()["cls_token"].flatten())


class Call:
    """Pickled as a call of a function, which is made when the pickle is opened."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


TRAPS: dict[str, Callable[[Path], Any]] = {
    f"{os.mkdir.__module__}.mkdir": lambda mark: Call(os.mkdir, str(mark)),
    f"{os.system.__module__}.system": lambda mark: Call(os.system, f"mkdir {mark}"),
    "builtins.eval": lambda mark: Call(eval, f"__import__('os').mkdir({str(mark)!r})"),
    "builtins.exec": lambda mark: Call(exec, f"import os; os.mkdir({str(mark)!r})"),
    "shutil.copytree": lambda mark: Call(shutil.copytree, str(mark.parent), str(mark)),
}


def tarred(content: Any, path: Path, protocol: int) -> None:
    """As torch wrote before version 0.2: an archive of pickles."""
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(content, protocol)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


FORMS: dict[str, Callable[[Any, Path], None]] = {
    **{f"pickle {p}": lambda content, path, p=p: path.write_bytes(pickle.dumps(content, p)) for p in range(6)},  # type: ignore[misc]
    "zip": lambda content, path: torch.save(content, path),
    "zip, protocol 4": lambda content, path: torch.save(content, path, pickle_protocol=4),
    "before 2020": lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False),
    "before 2017": lambda content, path: tarred(content, path, 2),
    "numpy": lambda content, path: np.savez(path, weight=np.array([content], dtype=object)),
}  # fmt: skip
NAMELESS = ("pickle 0", "pickle 1", "before 2017", "numpy")  # refused before anything in them is looked at


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trap", TRAPS)
def test_a_pickle_with_code_is_refused_by_name_and_runs_nothing(tmp_path, form, trap):
    mark, path = tmp_path / "sprung", tmp_path / "x.npz"
    weights = {} if form.startswith("pickle") else tensors()  # a tensor in a plain pickle is a call as well
    FORMS[form]({"state_dict": weights, "callbacks": [TRAPS[trap](mark)]}, path)
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught, str(path))
    if form not in NAMELESS:
        one_line(caught, trap, "refused", "torch.save(model.state_dict(), path)")
    assert not mark.exists()


@pytest.mark.parametrize("trap", TRAPS)
def test_the_traps_would_have_worked(tmp_path, trap):
    pickle.loads(pickle.dumps(TRAPS[trap](tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


def pretend(module: str, name: str, **members: Any) -> Any:
    """A class that pickles as if it came from a module that this process does not have."""
    return type(name, (), {"__module__": module, "__qualname__": name, **members})


@pytest.fixture
def absent(monkeypatch) -> Callable[[Any], None]:
    """Makes the modules of classes importable while something is saved; they spring when anything is taken later."""

    def provide(*kinds: type) -> None:
        for kind in kinds:
            parts = kind.__module__.split(".")
            for i in range(1, len(parts) + 1):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
            setattr(sys.modules[kind.__module__], kind.__name__, kind)

    return provide


@pytest.mark.parametrize(
    "module", ["omegaconf.dictconfig", "lightning.pytorch.core", "yacs.config", "my_project.models"]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 2020"])
def test_what_stands_in_for_another_librarys_object_runs_nothing_of_it(tmp_path, absent, monkeypatch, module, zipped):
    sprung: list[str] = []

    def spring(self: Any, *arguments: Any) -> None:
        sprung.append("methods")

    kind = pretend(module, "Conf", __init__=spring, __setstate__=spring, __getstate__=lambda self: {"size": 3})
    absent(kind)
    content = kind.__new__(kind)
    torch.save({"state_dict": tensors(), "config": content}, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)
    (tmp_path / module.split(".")[0]).mkdir()
    (tmp_path / module.split(".")[0] / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
        monkeypatch.delitem(sys.modules, name)
    same(opened(tmp_path / "x.ckpt"))
    assert sprung == []
    assert module.split(".")[0] not in sys.modules


def test_a_call_that_a_settings_library_asks_for_is_remembered_and_not_made(tmp_path):
    done: list[str] = []

    def run(*arguments: Any) -> dict:
        done.append("ran")
        return {}

    run.__module__, run.__qualname__, run.__name__ = "omegaconf.base", "run", "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("omegaconf", "omegaconf.base"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["omegaconf.base"].run = run  # type: ignore[attr-defined]
        torch.save({"state_dict": tensors(), "config": Call(run, "rm -rf")}, tmp_path / "x.ckpt")
        same(opened(tmp_path / "x.ckpt"))  # even where the library is there
    assert done == []


def test_a_stand_in_keeps_values_and_nothing_else():
    stand_in = torch_file.Inert("arguments")
    assert vars(stand_in) == {}
    stand_in.__setstate__(({"size": 3}, {"slot": 4}))
    assert vars(stand_in) == {"size": 3, "slot": 4}
    assert not [
        name for name in vars(torch_file.Inert) if callable(getattr(stand_in, name)) and not name.startswith("__")
    ]


@dataclasses.dataclass
class Options:
    image_size: Any = (8, 20)
    path: Any = None


HOLDERS: dict[str, Callable[[], Any]] = {
    "nested dicts": lambda: {"data": {"train": {"img_size": [8, 20]}}},
    "namespace": lambda: argparse.Namespace(lr=0.1, data=argparse.Namespace(input_size=(3, 8, 20))),
    "dataclass": Options,
    "default dict": lambda: collections.defaultdict(list, resolution=(8, 20)),
    "deque": lambda: collections.deque([{"size": "8x20"}], maxlen=3),
    "partial": lambda: functools.partial(dict, image_size=(8, 20)),
    "a path beside": lambda: {"root": pathlib.Path("data"), "IMG_SIZE": "8, 20"},
    "a foreign path beside": lambda: {"root": pathlib.PureWindowsPath("c:/data"), "img_size": "(8, 20)"},
    "numpy beside": lambda: {"lr": np.float64(0.1), "rng": np.arange(3), "on": np.bool_(True), "image_shape": (8, 20)},
    "times beside": lambda: {"at": datetime.datetime(2020, 1, 1), "for": datetime.timedelta(2), "img_size": (8, 20)},
    "height and width": lambda: {"model": {"image_height": 8, "image_width": 20}},
    "letters": lambda: {"img_h": 8, "img_w": 20},
    "one of several": lambda: {"img_size": 224, "teacher": {"img_size": (8, 20)}, "crop_size": 12},
    "a class beside": lambda: {"optimizer": torch.optim.AdamW, "img_size": (8, 20)},
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 2020"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_hyper_parameters_of_any_holder_open_and_tell_the_size(tmp_path, holder, zipped):
    content = {"state_dict": tensors(rows=11), "hyper_parameters": {"config": HOLDERS[holder]()}}
    torch.save(content, tmp_path / "last.ckpt", _use_new_zipfile_serialization=zipped)
    vit = opened(tmp_path / "last.ckpt")
    assert vit.config.image_size == (8, 20)
    assert any("(8, 20)" in note and "hyper-parameters" in note for note in vit.report.assumed)


def test_a_loss_among_the_hyper_parameters_does_no_harm(tmp_path):
    hyper_parameters = {"loss": torch.nn.CrossEntropyLoss(), "net": torch.nn.Linear(2, 2), "img_size": (8, 20)}
    torch.save({"state_dict": tensors(rows=11), "hyper_parameters": hyper_parameters}, tmp_path / "last.ckpt")
    assert opened(tmp_path / "last.ckpt").config.image_size == (8, 20)


def omegaconf_like(absent: Any, values: dict[str, Any]) -> Any:
    """Nodes as omegaconf pickles them: each value in a node of its own, every node with its parent."""
    node, mapping, sequence = (pretend("omegaconf.nodes", name) for name in ("AnyNode", "DictConfig", "ListConfig"))
    absent(node, mapping, sequence)

    def wrapped(value: Any, parent: Any) -> Any:
        made = (mapping if isinstance(value, dict) else sequence if isinstance(value, list) else node)()
        inner = {k: wrapped(v, made) for k, v in value.items()} if isinstance(value, dict) else value
        inner = [wrapped(v, made) for v in value] if isinstance(value, list) else inner
        made.__dict__.update({"_parent": parent, "_val" if inner is value else "_content": inner})
        return made

    for kind in (node, mapping, sequence):
        setattr(sys.modules["omegaconf.nodes"], kind.__name__, kind)
    return wrapped(values, None)


def test_settings_of_omegaconf_open_without_it(tmp_path, absent):
    config = omegaconf_like(absent, {"data": {"img_size": [8, 20], "name": None}})
    torch.save({"state_dict": tensors(rows=11), "hyper_parameters": config}, tmp_path / "last.ckpt")
    assert opened(tmp_path / "last.ckpt").config.image_size == (8, 20)


@pytest.mark.parametrize(
    "module", ["lightning.fabric.utilities.data:AttributeDict", "yacs.config:CfgNode", "addict:Dict"]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 2020"])
def test_dicts_of_other_libraries_open_without_them(tmp_path, monkeypatch, module, zipped):
    where, name = module.split(":")
    kind = type(name, (dict,), {"__module__": where, "__qualname__": name})
    with monkeypatch.context() as patch:
        parts = where.split(".")
        for i in range(1, len(parts) + 1):
            patch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
        setattr(sys.modules[where], name, kind)
        config = kind(data=kind(img_size=(8, 20)))
        config.__dict__["__frozen__"] = True
        content = {"state_dict": tensors(rows=11), "hyper_parameters": config}
        torch.save(content, tmp_path / "last.ckpt", _use_new_zipfile_serialization=zipped)
    assert opened(tmp_path / "last.ckpt").config.image_size == (8, 20)


def test_hyper_parameters_that_hold_themselves_end(tmp_path):
    loop: dict[str, Any] = {"img_size": 7}
    loop["again"] = [loop, {"deeper": loop}]
    torch.save({"state_dict": tensors(), "hyper_parameters": loop}, tmp_path / "x.ckpt")
    same(opened(tmp_path / "x.ckpt"))
