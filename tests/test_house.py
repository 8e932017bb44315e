"""The walls of the house: imports go one way, and importing does nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOMS = {
    "vit": set(),
    "crossattn": {"vit"},
    "datasets": {"vit"},
    "train": {"vit", "crossattn", "datasets"},
}


def folder(room: str) -> Path:
    import importlib

    return Path(importlib.import_module(f"regard.{room}").__file__).parent


def imported(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    files = list(folder(room).rglob("*.py"))
    assert len(files) > 3
    for path in files:
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("regard.")}
        assert ours <= ROOMS[room] | {room}, f"{path} imports {ours - ROOMS[room] - {room}}"
        assert "regard" not in imported(path), f"{path} goes back to the front door"


@pytest.mark.parametrize("room", ["vit", "crossattn"])
def test_no_model_code_imports_lightning(room: str) -> None:
    for path in folder(room).rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"lightning", "pytorch_lightning", "torchmetrics"}
    loaded = run_python(f"import regard.{room}, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert not {name.split(".")[0] for name in json.loads(loaded)} & {"lightning", "pytorch_lightning", "torchmetrics"}


PROBE = """
import json, os, random, signal, socket, sys, warnings, logging, faulthandler

def refuse(*a, **k):
    raise AssertionError("the network was used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import numpy, torch, PIL.Image, PIL.ImageFile, matplotlib
def state():
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "grad": torch.is_grad_enabled(),
        "rng": [hash(torch.get_rng_state().numpy().tobytes()), hash(random.getstate()), str(numpy.random.get_state())],
        "environ": dict(os.environ),
        "warnings": [str(f) for f in warnings.filters],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "pillow": [PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES],
        "matplotlib": {k: str(v) for k, v in matplotlib.rcParams.items() if k != "backend"},
        "logging": [logging.getLogger().level, str(logging.getLogger().handlers)],
        "hook": [str(sys.excepthook), str(sys.displayhook)],
    }

before = state()
import regard, regard.vit, regard.crossattn, regard.datasets, regard.cli, regard.figures, regard.models
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def run_python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_importing_uses_no_network_and_changes_no_global_setting() -> None:
    assert json.loads(run_python(PROBE)) == []


def test_the_contract_of_names_is_kept() -> None:
    from regard.crossattn import ImageQA
    from regard.vit import ViT, attention_rows

    assert regard.ViT is ViT
    assert regard.ImageQA is ImageQA
    assert regard.attention_rows is attention_rows
    for name in regard.__all__:
        assert callable(getattr(regard, name)), name
    with pytest.raises(AttributeError, match="no attribute 'paint'"):
        regard.paint  # noqa: B018


def test_no_file_outgrows_one_idea() -> None:
    for room in (*ROOMS, "verbs"):
        for path in folder(room).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path
    for path in (folder("vit") / "model.py", folder("crossattn") / "model.py"):
        assert len(path.read_text().splitlines()) <= 340, path


def test_nothing_unpickles_code() -> None:
    for room in (*ROOMS, "verbs"):
        for path in folder(room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert given.get("weights_only") == "True", path
            assert not imported(path) & {"pickle", "dill", "joblib", "cloudpickle"}, path
