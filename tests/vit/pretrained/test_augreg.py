"""`.npz` files of Google's vision transformers, against timm's own reader and plain float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit import ViT
from regard.vit.config import PositionResize
from regard.vit.errors import InputError
from regard.vit.positions import resize_table

D, DEPTH, HEADS, PATCH, GRID, HIDDEN, CLASSES = 48, 3, 3, 4, 4, 80, 7
Arrays = dict[str, np.ndarray]
OLD, NEW = (1, 2, 3), (0, 1, 0)  # which attention, which second norm, which MLP


def npz_file(numbers: tuple[int, int, int] = OLD, pool: str = "cls", pre_logits: bool = False) -> Arrays:
    random = np.random.default_rng(0)

    def noise(*shape: int, scale: float = 0.5) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    def norm(name: str) -> Arrays:
        return {f"{name}/scale": 1 + noise(D, scale=0.2), f"{name}/bias": noise(D)}

    def dense(name: str, inputs: int, outputs: int) -> Arrays:
        return {f"{name}/kernel": noise(inputs, outputs, scale=inputs**-0.5), f"{name}/bias": noise(outputs)}

    def attention(name: str) -> Arrays:
        K = D // HEADS
        arrays = {f"{name}/out/kernel": noise(HEADS, K, D, scale=D**-0.5), f"{name}/out/bias": noise(D)}
        for part in ("query", "key", "value"):
            arrays |= {
                f"{name}/{part}/kernel": noise(D, HEADS, K, scale=D**-0.5),
                f"{name}/{part}/bias": noise(HEADS, K),
            }
        return arrays

    def mlp(name: str) -> Arrays:
        return dense(f"{name}/Dense_0", D, HIDDEN) | dense(f"{name}/Dense_1", HIDDEN, D)

    rows = GRID**2 + (pool == "cls")
    table = "Transformer/posembed_input/pos_embedding" if numbers == OLD else "pos_embedding"
    arrays = {
        "embedding/kernel": noise(PATCH, PATCH, 3, D, scale=0.15),
        "embedding/bias": noise(D),
        table: noise(1, rows, D),
    }
    if pool == "cls":
        arrays["cls"] = noise(1, 1, D)
    attend, second, last = numbers
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        arrays |= norm(f"{block}/LayerNorm_0") | attention(f"{block}/MultiHeadDotProductAttention_{attend}")
        arrays |= norm(f"{block}/LayerNorm_{second}") | mlp(f"{block}/MlpBlock_{last}")
    if pool == "map":
        arrays |= {"MAPHead_0/probe": noise(1, 1, D), **attention("MAPHead_0/MultiHeadDotProductAttention_0")}
        arrays |= norm("MAPHead_0/LayerNorm_0") | mlp("MAPHead_0/MlpBlock_0")
    if pre_logits:
        arrays |= dense("pre_logits", D, D)
    return arrays | norm("Transformer/encoder_norm") | dense("head", D, CLASSES)


def scanned(arrays: Arrays) -> Arrays:
    """All blocks along a first axis, as `nn.scan` leaves them."""
    first = "Transformer/encoderblock_0/"
    rest = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if name.startswith(first)]:
        rows = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(DEPTH)]
        rest[name.replace("encoderblock_0", "encoderblock", 1)] = np.stack(rows)
    return rest


def vit_of(arrays: Arrays, numbers: tuple[int, int, int] = OLD) -> Callable[[Tensor], dict[Any, Tensor]]:
    """What Google's code computes, in float64, as sums over named axes; positions zoomed by scipy, as there."""
    zoom = pytest.importorskip("scipy.ndimage", reason="scipy is not installed").zoom
    t = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    attend, second, last = numbers

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), t[name + "/scale"], t[name + "/bias"], 1e-6)

    def run(images: Tensor) -> dict[Any, Tensor]:
        height, width = images.shape[2] // PATCH, images.shape[3] // PATCH
        cut = images.double().unflatten(3, (width, PATCH)).unflatten(2, (height, PATCH))
        x = torch.einsum("bchpwq,pqcd->bhwd", cut, t["embedding/kernel"]) + t["embedding/bias"]
        rows = t.get("pos_embedding", t.get("Transformer/posembed_input/pos_embedding"))
        lead = rows.shape[1] - GRID**2
        grid = zoom(rows[0, lead:].reshape(GRID, GRID, D).numpy(), (height / GRID, width / GRID, 1), order=1)
        x = (x + torch.from_numpy(grid)).flatten(1, 2)
        if "cls" in t:
            at_cls = rows[:, :1] if lead else 0
            x = torch.cat(((t["cls"] + at_cls).expand(len(x), 1, D), x), dim=1)
        states = {}
        for i in range(DEPTH):
            block = f"Transformer/encoderblock_{i}"
            attention = f"{block}/MultiHeadDotProductAttention_{attend}"
            y = norm(x, f"{block}/LayerNorm_0")
            q, k, v = (
                torch.einsum("btd,dhk->bhtk", y, t[f"{attention}/{part}/kernel"])
                + t[f"{attention}/{part}/bias"][:, None]
                for part in ("query", "key", "value")
            )
            z = (q @ k.transpose(-1, -2) / (D // HEADS) ** 0.5).softmax(-1) @ v
            x = x + torch.einsum("bhtk,hkd->btd", z, t[f"{attention}/out/kernel"]) + t[f"{attention}/out/bias"]
            y = norm(x, f"{block}/LayerNorm_{second}")
            y = F.gelu(
                y @ t[f"{block}/MlpBlock_{last}/Dense_0/kernel"] + t[f"{block}/MlpBlock_{last}/Dense_0/bias"],
                approximate="tanh",
            )
            x = x + y @ t[f"{block}/MlpBlock_{last}/Dense_1/kernel"] + t[f"{block}/MlpBlock_{last}/Dense_1/bias"]
            states[i] = x
        return {0: states[0], 1: states[1], "final": norm(x, "Transformer/encoder_norm")}

    return run


@pytest.fixture
def write(tmp_path) -> Callable[[Arrays], Path]:
    def to_file(arrays: Arrays) -> Path:
        np.savez(tmp_path / "vit.npz", **arrays)
        return tmp_path / "vit.npz"

    return to_file


@pytest.mark.parametrize("numbers", [OLD, NEW], ids=["old numbers", "new numbers"])
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_npz_files_have_googles_numbers(write, agree, numbers, pool):
    arrays = npz_file(numbers, pool)
    vit = ViT.from_pretrained(write(arrays))
    assert (vit.report.layout, vit.config.heads, vit.config.activation) == ("augreg", HEADS, "gelu_tanh")
    assert vit.config.pooling == ("cls" if pool == "cls" else "mean")
    assert any("gelu_tanh" in note and "timm" in note for note in vit.report.assumed)
    agree(vit, vit_of(arrays, numbers))


def test_the_zoom_of_the_position_table_is_scipys_of_order_1():
    zoom = pytest.importorskip("scipy.ndimage", reason="scipy is not installed").zoom
    table = torch.randn(3 * 5, 8, dtype=torch.float64)
    recipe = PositionResize("bilinear", antialias=False, align_corners=True)
    for height, width in ((3, 5), (6, 4), (1, 9), (2, 2), (7, 1)):
        expected = zoom(table.view(3, 5, 8).numpy(), (height / 3, width / 5, 1), order=1)
        ours = resize_table(table, (3, 5), (height, width), recipe)
        torch.testing.assert_close(ours.view(height, width, 8), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numbers", [OLD, NEW], ids=["old numbers", "new numbers"])
def test_stacked_blocks_and_a_params_prefix_open_alike(write, agree, numbers):
    arrays = npz_file(numbers)
    stacked = {f"params/{name}": array for name, array in scanned(arrays).items()}
    optimizer = {f"opt/0/mu/{name}": array for name, array in scanned(arrays).items()}
    vit = ViT.from_pretrained(write({**stacked, **optimizer, "opt/0/count": np.array(7)}))
    assert {"prefix 'params/'", f"{DEPTH} blocks along the first axis"} <= set(vit.report.unwrapped)
    agree(vit, vit_of(arrays, numbers))


def test_a_class_token_without_a_row_in_the_table_is_big_visions(write, agree):
    arrays = npz_file(NEW, "gap") | {"cls": npz_file()["cls"]}
    vit = ViT.from_pretrained(write(arrays))
    assert (vit.config.position_rows, vit.config.pooling) == ("patches", "cls")
    agree(vit, vit_of(arrays, NEW))


def test_a_rectangular_table_takes_a_stated_size(write):
    arrays = npz_file()
    rows = arrays["Transformer/posembed_input/pos_embedding"]
    arrays["Transformer/posembed_input/pos_embedding"] = rows[:, : 1 + 2 * 5]
    with pytest.raises(InputError, match=r"\(8, 20\)"):
        ViT.from_pretrained(write(arrays))
    assert ViT.from_pretrained(write(arrays), image_size=(8, 20)).config.grid == (2, 5)


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_npz_files_have_timms_numbers_under_timms_activation(write, fill, agree, timm_tokens, pool):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    pooling = dict(global_pool="map", class_token=False) if pool == "map" else {}
    small = dict(
        embed_dim=D, depth=DEPTH, num_heads=HEADS, mlp_ratio=HIDDEN / D, patch_size=PATCH, img_size=GRID * PATCH
    )
    model = timm.create_model("vit_base_patch16_224", num_classes=CLASSES, dynamic_img_size=True, **small, **pooling)
    path = write(npz_file(NEW if pool == "map" else OLD, pool))
    fill(model).load_pretrained(str(path))
    vit = ViT.from_pretrained(path, activation="gelu", classes=CLASSES, position_resize="timm")
    assert vit.config.pooling == pool
    images = torch.randn(2, 3, 16, 16)
    agree(vit, timm_tokens(model))
    with torch.no_grad():
        theirs = model(images)
        assert (vit.classify(images) - theirs).norm() <= 1e-5 * theirs.norm()


def test_the_classifier_is_listed_and_kept_on_request(write):
    path = write(npz_file())
    assert set(ViT.from_pretrained(path).report.unused["classifier"]) == {"head/kernel", "head/bias"}
    assert ViT.from_pretrained(path, classes=CLASSES).head.weight.shape == (CLASSES, D)


def test_a_layer_before_the_classifier_is_listed_and_a_classifier_behind_it_refused(write):
    path = write(npz_file(pre_logits=True))
    vit = ViT.from_pretrained(path)
    assert vit.report.unused["layer before the classifier"] == ("pre_logits/kernel", "pre_logits/bias")
    with pytest.raises(InputError, match="pre_logits"):
        ViT.from_pretrained(path, classes=CLASSES)


def test_half_precision_that_numpy_does_not_know_is_read(write):
    arrays = npz_file()
    rounded = {n: torch.from_numpy(a).bfloat16() for n, a in arrays.items()}
    as_bytes = {n: t.view(torch.int16).numpy().view("V2") for n, t in rounded.items()}
    vit = ViT.from_pretrained(write(as_bytes))
    assert torch.equal(vit.cls, rounded["cls"].float().flatten())


def test_positions_without_a_table_are_refused(write):
    arrays = npz_file(NEW, "gap")
    del arrays["pos_embedding"]
    with pytest.raises(InputError, match=r"pos_embedding.*sincos2d"):
        ViT.from_pretrained(write(arrays))


def kinds(numbers: tuple[int, int, int], block: str) -> list[str]:
    attend, second, last = numbers
    attention = f"{block}/MultiHeadDotProductAttention_{attend}"
    return [
        f"{block}/LayerNorm_0/scale", f"{block}/LayerNorm_{second}/bias", f"{attention}/query/kernel",
        f"{attention}/key/bias", f"{attention}/value/kernel", f"{attention}/out/kernel", f"{attention}/out/bias",
        f"{block}/MlpBlock_{last}/Dense_0/kernel", f"{block}/MlpBlock_{last}/Dense_0/bias",
        f"{block}/MlpBlock_{last}/Dense_1/kernel", f"{block}/MlpBlock_{last}/Dense_1/bias",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["old", "new", "stacked"])
def test_four_wrong_files_of_each_tensor_are_told_by_their_own_names(write, four_wrong_files, form):
    numbers = OLD if form == "old" else NEW
    arrays = scanned(npz_file(numbers)) if form == "stacked" else npz_file(numbers)
    names = kinds(numbers, "Transformer/encoderblock" if form == "stacked" else "Transformer/encoderblock_0")
    if form == "old":
        names += ["embedding/kernel", "embedding/bias", "cls", "Transformer/encoder_norm/scale"]
        names += ["Transformer/posembed_input/pos_embedding"]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    four_wrong_files(tensors, lambda t: ViT.from_pretrained(write({n: a.numpy() for n, a in t.items()})), *names)


def test_wrong_parts_of_an_attention_pool_are_told(write, four_wrong_files):
    tensors = {name: torch.from_numpy(array) for name, array in npz_file(NEW, "map").items()}
    names = ("probe", "MultiHeadDotProductAttention_0/query/kernel", "LayerNorm_0/scale", "MlpBlock_0/Dense_1/bias")
    open_it = lambda t: ViT.from_pretrained(write({n: a.numpy() for n, a in t.items()}))  # noqa: E731
    four_wrong_files(tensors, open_it, *(f"MAPHead_0/{name}" for name in names))
