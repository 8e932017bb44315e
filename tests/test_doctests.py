"""Every example in a docstring runs, and every module imports with the base install alone."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
EXTRAS = {"gradio", "webdataset", "transformers", "timm", "onnx", "onnxruntime", "easy_vqa"}


def modules() -> list[str]:
    """All modules of all packages; a package is asked for its own folder, since the rooms lie side by side."""
    found = []
    for package in PACKAGES:
        found.append(package)
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            found.append(module.name)
    return sorted(set(found))


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_orange_look_up_is_among_the_examples():
    module = importlib.import_module("regard.vit.attention")
    (example,) = [t for t in doctest.DocTestFinder().find(module) if t.name.endswith(".look_up")]
    assert "orange" in "".join(e.source for e in example.examples)


def imported_at_once(source: str) -> set[str]:
    """Top-level names of what a module imports when it is imported, not inside its functions."""
    names, waiting = set(), list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return {name.split(".")[0] for name in names}


def test_no_module_needs_an_extra_to_be_imported():
    assert imported_at_once("import a.b\nif 1:\n  from c.d import e\ndef f():\n  import g") == {"a", "c"}
    for name in modules():
        path = importlib.import_module(name).__file__
        assert path is not None
        assert not imported_at_once(Path(path).read_text()) & EXTRAS, name


@pytest.mark.slow
def test_no_module_asks_the_network_when_it_is_imported():
    script = (
        "import importlib, socket\n"
        "def refuse(*a, **k): raise SystemExit('network at import time')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"for name in {[m for m in modules() if not m.endswith('__main__')]!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr[-1000:]


def test_the_vit_room_imports_no_other_room_and_no_lightning():
    script = (
        "import sys, regard.vit\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('lightning', 'pytorch_lightning', 'huggingface_hub')\n"
        "       or m.startswith(('regard.crossattn', 'regard.train', 'regard.datasets'))]\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr[-1000:]
