"""The computation itself as a file: ONNX and torch.export give our numbers, for any batch, without us."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.vit import PositionResize, ViT, ViTConfig
from regard.vit.errors import InputError
from regard.vit.pretrained.exports import graph
from regard.vit.values import from_json

SMALL: dict[str, Any] = dict(image_size=(24, 32), patch_size=8, dim=32, depth=1, heads=2, hidden_dim=48)
# fields of the configuration, the size that is exported where it is not the native one, dtype, and the outputs' names
CASES: dict[str, tuple[dict[str, Any], tuple[int, int] | None, torch.dtype, list[str]]] = {
    "plain": (dict(classes=5), None, torch.float32, ["cls", "patches", "pooled", "logits"]),
    "registers and layer scale, off the native size": (
        dict(registers=3, layer_scale=1.0, position_rows="cls+patches", position_resize=PositionResize(offset=0.1)),
        (40, 16), torch.float32, ["cls", "registers", "patches", "pooled"],
    ),
    "rope, off the native size": (
        dict(positions="rope", registers=2, registers_place="end", activation="swiglu"),
        (16, 40), torch.float32, ["cls", "registers", "patches", "pooled"],
    ),
    "clip in bf16": (
        dict(pre_norm=True, activation="quick_gelu", norm_place="pooled", norm_eps=1e-5),
        (32, 32), torch.bfloat16, ["cls", "patches", "pooled"],
    ),
    "siglip, sine and cosine": (
        dict(class_token=False, pooling="map", positions="sincos"), (16, 24), torch.float32, ["patches", "pooled"],
    ),
}  # fmt: skip
BAKED = ("resize", "upsample", "bicubic", "interpolate", "cos", "sin", "arange", "range")

Run = Callable[[Tensor], dict[str, Tensor]]


@pytest.fixture
def tiny(noisy: Callable[[Any], Any]) -> Callable[..., ViT]:
    return lambda dtype=torch.float32, **fields: noisy(ViT(ViTConfig(**SMALL | fields))).to(dtype)


def assert_agrees(vit: ViT, run: Run, size: tuple[int, int], names: list[str]) -> None:
    """At batches of 1 and 3, with the numbers of the model in fp32 at that size."""
    exact = vit.float().eval()
    for batch in (1, 3):
        images = torch.randn(batch, 3, *size)
        with torch.no_grad():
            tokens = exact(images)
            pooled = exact.pool(tokens)
        expected = {"cls": tokens.cls, "registers": tokens.registers, "patches": tokens.patches, "pooled": pooled}
        if exact.head is not None:
            expected["logits"] = exact.head(pooled)
        found = run(images)
        assert list(found) == names
        for name in names:
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=0)


def with_onnxruntime(path: Path) -> Run:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, map(torch.from_numpy, session.run(names, {"pixels": images.numpy()})), strict=True))

    return run


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_gives_our_numbers_at_two_batch_sizes(
    case: str, tiny: Callable[..., ViT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    fields, size, dtype, names = CASES[case]
    large = "siglip" in case  # as if protobuf could not hold it: its weights stand beside the file
    monkeypatch.setattr(graph, "PROTOBUF_LIMIT", 1000 if large else graph.PROTOBUF_LIMIT)
    vit = tiny(dtype, **fields)
    report = vit.export(tmp_path / "new" / "vit.onnx", "onnx", image_size=size)
    height, width = size or SMALL["image_size"]
    assert report.model == f"ONNX: pixels (batch, 3, {height}, {width}) -> {', '.join(names)}, fp32"
    assert report.notes[0].startswith("onnxruntime agrees to ")
    assert report.notes[1].startswith(f"it takes {height} x {width} px; this model's preprocess makes 224 x 224")
    assert_agrees(vit, with_onnxruntime(tmp_path / "new" / "vit.onnx"), (height, width), names)
    model = onnx.load(tmp_path / "new" / "vit.onnx")
    onnx.checker.check_model(model)
    (pixels,) = model.graph.input
    assert [side.dim_param or side.dim_value for side in pixels.type.tensor_type.shape.dim] == [
        "batch", 3, height, width,
    ]  # fmt: skip
    assert not {node.op_type.lower() for node in model.graph.node} & set(BAKED)
    told = {entry.key: entry.value for entry in model.metadata_props}
    config = from_json(json.loads(told["regard"]), ViTConfig, "metadata")
    assert config.image_size == config.preprocess.size == (height, width)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"vit.onnx", *(["vit.onnx.data"] if large else [])}
    assert ("the weights are in vit.onnx.data beside it, and must stay there" in report.notes) is large


@pytest.mark.parametrize("case", [case for case in CASES if "off the native" in case or "bf16" in case])
def test_the_program_of_torch_export_gives_our_numbers_at_two_batch_sizes(
    case: str, tiny: Callable[..., ViT], tmp_path: Path
) -> None:
    fields, size, dtype, names = CASES[case]
    vit = tiny(dtype, **fields)
    vit.export(tmp_path / "vit.pt2", "torch", image_size=size)
    extra = {"regard.json": ""}
    program = torch.export.load(tmp_path / "vit.pt2", extra_files=extra)
    assert_agrees(vit, program.module(), size or SMALL["image_size"], names)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called for op in BAKED if f"aten.{op}" in name or f"_{op}" in name]
    assert json.loads(extra["regard.json"])["image_size"] == list(size or SMALL["image_size"])
    with pytest.raises(Exception, match=r"size|shape|guard"):
        program.module()(torch.randn(1, 3, 64, 64))


def test_the_model_that_is_exported_stays_as_it_was(tiny: Callable[..., ViT], tmp_path: Path) -> None:
    vit = tiny(torch.bfloat16, positions="learned+rope").train()
    before, images = {name: tensor.clone() for name, tensor in vit.state_dict().items()}, torch.randn(1, 3, 40, 24)
    tokens = vit(images).patches
    vit.export(tmp_path / "vit.pt2", "torch", image_size=(16, 16))
    assert vit.training
    assert vit.config.image_size == SMALL["image_size"]
    assert all(torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())
    assert torch.equal(vit(images).patches, tokens)
    assert all(parameter.requires_grad for parameter in vit.parameters())


@pytest.mark.parametrize("absent", [["onnx"], ["onnx", "onnxscript"]])
def test_without_its_packages_onnx_is_told_how_to_get_them(
    absent: list[str], tiny: Callable[..., ViT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else find(name, *a))
    with pytest.raises(InputError) as caught:
        tiny().export(tmp_path / "vit.onnx", "onnx")
    assert str(caught.value) == f'onnx export needs {" and ".join(absent)}: pip install "regard[export]"'
    assert not list(tmp_path.iterdir())


def test_the_name_says_what_is_in_the_file(tiny: Callable[..., ViT], tmp_path: Path) -> None:
    for layout, suffix in (("onnx", ".onnx"), ("torch", ".pt2")):
        with pytest.raises(InputError, match=rf"{layout} writes one file; give it a name that ends in \{suffix}"):
            tiny().export(tmp_path / "vit.pth", layout)
        with pytest.raises(InputError, match=r"image_size \(20, 16\) is no multiple of the patches of 8 px"):
            tiny().export(tmp_path / f"vit{suffix}", layout, image_size=(20, 16))
        with pytest.raises(InputError, match=r"image_size is \(0, 16\); it must be \(height, width\) in pixels"):
            tiny().export(tmp_path / f"vit{suffix}", layout, image_size=(0, 16))
    assert not list(tmp_path.iterdir())


def test_a_program_that_computes_other_numbers_is_not_written(
    tiny: Callable[..., ViT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit.pt2").write_bytes(b"older")
    right = graph.TorchRun.__call__

    def wrong(self: Any, pixels: Tensor) -> dict[str, Tensor]:
        return {name: values + 0.01 for name, values in right(self, pixels).items()}

    monkeypatch.setattr(graph.TorchRun, "__call__", wrong)
    with pytest.raises(RuntimeError, match="torch computes other numbers"):
        tiny().export(tmp_path / "vit.pt2", "torch", overwrite=True)
    assert (tmp_path / "vit.pt2").read_bytes() == b"older"
    assert [file.name for file in tmp_path.iterdir()] == ["vit.pt2"]
