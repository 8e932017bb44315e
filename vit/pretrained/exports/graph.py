"""The computation itself, for one image size and any batch: ONNX and torch.export.

What depends on the size alone is baked beforehand: the resampled position table and the rope's table are constants,
so that no runtime has to agree with torch on a bicubic filter. Everything is written in fp32.
"""

import importlib.util
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.files import write_atomically
from regard.vit.pretrained.exports import place
from regard.vit.pretrained.exports.tensors import native
from regard.vit.pretrained.report import ExportReport
from regard.vit.surgery import regridded
from regard.vit.values import to_json

if TYPE_CHECKING:
    from regard.vit.model import ViT

CLOSE = 1e-4  # how far a runtime may be from torch, of the largest number
PROTOBUF_LIMIT = 1_900_000_000  # bytes; a larger ONNX model keeps its weights in a file beside it


class _Named(nn.Module):
    """Images to the tokens by name, without those that the model does not have."""

    def __init__(self, vit: "ViT"):
        super().__init__()
        self.vit = vit
        rope = self.vit.rotary(self.vit.config.grid, torch.device("cpu"))
        self.vit.rotary = lambda grid, device: rope  # type: ignore[method-assign]

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        tokens = self.vit(pixels)
        pooled = self.vit.pool(tokens)
        named = {"cls": tokens.cls, "registers": tokens.registers, "patches": tokens.patches, "pooled": pooled}
        if self.vit.head is not None:
            named["logits"] = self.vit.head(pooled)
        return {name: values for name, values in named.items() if values is not None and values.shape[1]}


def write_onnx(vit: "ViT", path: Path, size: tuple[int, int]) -> ExportReport:
    """An `.onnx` of opset 18 with input `pixels` and the tokens as named outputs, checked with onnxruntime.

    Raises InputError where onnx or onnxscript is not installed.
    """
    place.check_file(path, "onnx", (".onnx",))
    absent = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if absent:
        raise InputError(f'onnx export needs {" and ".join(absent)}: pip install "regard[export]"')
    model, example, names = _prepared(vit, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=18,
            input_names=["pixels"],
            output_names=names,
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
        )
    assert program is not None
    program.model.metadata_props["regard"] = _passport(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    notes = _written(path, lambda file: program.save(file, external_data=weights > PROTOBUF_LIMIT), OnnxRun, model)
    notes += _size_note(vit, model)
    if weights > PROTOBUF_LIMIT:
        notes.append(f"the weights are in {path.name}.data beside it, and must stay there")
    code = f"named = onnxruntime.InferenceSession({str(path)!r}).run(None, {{'pixels': pixels}})"
    return ExportReport(str(path), "onnx", f"ONNX: {_signature(model, names)}", code, tuple(notes))


def write_torch(vit: "ViT", path: Path, size: tuple[int, int]) -> ExportReport:
    """A `.pt2` of torch.export: a program from `pixels` to a dict of the tokens by name."""
    place.check_file(path, "torch", (".pt2",))
    model, example, names = _prepared(vit, size)
    dynamic = {"pixels": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (example,), dynamic_shapes=dynamic, strict=False)
    extra = {"regard.json": _passport(model)}

    def save(file: Path) -> None:
        whole = io.BytesIO()
        torch.export.save(program, whole, extra_files=extra)
        write_atomically(file, lambda opened: opened.write(whole.getbuffer()))

    notes = [*_written(path, save, TorchRun, model), *_size_note(vit, model)]
    code = f"named = torch.export.load({str(path)!r}).module()(pixels)"
    return ExportReport(str(path), "torch", f"ExportedProgram: {_signature(model, names)}", code, tuple(notes))


def _prepared(vit: "ViT", size: tuple[int, int]) -> tuple[_Named, Tensor, list[str]]:
    """A copy in fp32 whose native size is this one, an example of its input, and the names of its outputs."""
    model = _Named(regridded(vit, size, torch.float32).cpu().eval().requires_grad_(False))
    # A batch of 1 would be taken for a constant.
    example = torch.zeros(2, vit.config.channels, *native(model.vit.config))
    with torch.no_grad():
        return model, example, list(model(example))


def _passport(model: _Named) -> str:
    """What a program that feeds it must know of the model: its configuration with the preprocessing."""
    return json.dumps(to_json(model.vit.config))


def _signature(model: _Named, names: list[str]) -> str:
    channels, (height, width) = model.vit.config.channels, native(model.vit.config)
    return f"pixels (batch, {channels}, {height}, {width}) -> {', '.join(names)}, fp32"


def _size_note(vit: "ViT", model: _Named) -> list[str]:
    own, size = vit.preprocess.size, native(model.vit.config)
    if own in (None, size):
        return []
    return [
        f"it takes {size[0]} x {size[1]} px; this model's preprocess makes {own[0]} x {own[1]}, for image_size={own}"
    ]


class OnnxRun:
    """Runs a file with onnxruntime."""

    runtime = "onnxruntime"

    def __init__(self, file: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {"pixels": pixels.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}


class TorchRun:
    """Runs a file with torch.export."""

    runtime = "torch"

    def __init__(self, file: Path):
        self.program = torch.export.load(file).module()

    def __call__(self, pixels: Tensor) -> Mapping[str, Tensor]:
        return self.program(pixels)


def _written(path: Path, save: Callable[[Path], object], run: Callable[[Path], Any], model: _Named) -> list[str]:
    """Save beside the path, run what was saved at two batch sizes, and only then give it the name.

    Raises RuntimeError where a runtime computes something else; no file is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        save(fresh / path.name)
        note = _checked(fresh / path.name, run, model)
        # What an ONNX file refers to must be there before it.
        for file in sorted(fresh.iterdir(), key=lambda file: file.name == path.name):
            with file.open("rb") as whole:
                os.fsync(whole.fileno())
            os.replace(file, path.parent / file.name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return [note]


def _checked(file: Path, run: Callable[[Path], Any], model: _Named) -> str:
    runtime = run.runtime  # type: ignore[attr-defined]
    if importlib.util.find_spec(runtime) is None:
        return f"not checked: {runtime} is not installed"
    opened, apart = run(file), []
    for batch in (1, 3):
        generator = torch.Generator().manual_seed(batch)
        pixels = torch.randn(batch, model.vit.config.channels, *native(model.vit.config), generator=generator)
        with torch.no_grad():
            expected, found = model(pixels), opened(pixels)
        if list(expected) != list(found):
            raise RuntimeError(f"{runtime} names the outputs {', '.join(found)} instead of {', '.join(expected)}")
        for name, values in expected.items():
            apart.append((found[name] - values).abs().max() / values.abs().max().clamp(min=1e-6))
    worst = float(torch.stack(apart).max())  # NaN where one is
    if not worst <= CLOSE:
        raise RuntimeError(f"{runtime} computes other numbers, {worst:.1g} of the largest: not written")
    return f"{runtime} agrees to {worst:.1g} of the largest number, at batches of 1 and 3"
