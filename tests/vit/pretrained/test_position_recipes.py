"""How a position table is resampled off the native size: as the authors, as timm, and as transformers do it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pos_embed = pytest.importorskip("timm.layers.pos_embed", reason="timm is not installed")

PATCH, SIDE = 16, 6
SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=SIDE * PATCH, patch_size=PATCH)
MLP, RATIO = {**SMALL, "intermediate_size": 96}, {**SMALL, "mlp_ratio": 2}
OWNERS = {
    "vit": ("ViTModel", "ViTConfig", MLP),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", MLP),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", MLP),
    "dinov2": ("Dinov2Model", "Dinov2Config", RATIO),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", RATIO),
}
SIZES = [(96, 96), (64, 64), (160, 160), (112, 64), (16, 144)]


def built(family: str):
    model, config, fields = OWNERS[family]
    return getattr(transformers, model)(getattr(transformers, config)(**fields))


def tokens(model, images: Tensor) -> Tensor:
    flags = {} if "Dinov2" in type(model).__name__ else {"interpolate_pos_encoding": True}
    out = model(images, **flags).last_hidden_state
    return model.post_layernorm(out) if hasattr(model, "pre_layrnorm") else out


def resampled_by(model, resample) -> None:
    """Let transformers' own model use another table than the one it would make: `resample(table, grid)`."""
    own = model.embeddings
    table = own.position_embeddings if hasattr(own, "position_embeddings") else own.position_embedding.weight[None]
    lead = table.shape[1] - SIDE**2

    def interpolate(embeddings: Tensor, height: int, width: int) -> Tensor:
        patches = resample(table[0, lead:].detach(), (height // PATCH, width // PATCH))
        return torch.cat((table[:, :lead], patches[None]), dim=1)

    own.interpolate_pos_encoding = interpolate


def authors(table: Tensor, grid: tuple[int, int], offset: float = 0.1) -> Tensor:
    """DINO's and DINOv2's recipe in float64: Keys' cubic with a = -0.75, the step of the grid (new + 0.1) / old."""

    def taps(new: int) -> np.ndarray:
        rows = np.zeros((new, SIDE))
        for i in range(new):
            place = (i + 0.5) * SIDE / (new + offset) - 0.5
            for k in range(int(np.floor(place)) - 1, int(np.floor(place)) + 3):
                x = abs(place - k)
                near, far = 1.25 * x**3 - 2.25 * x**2 + 1, -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
                rows[i, min(max(k, 0), SIDE - 1)] += near if x <= 1 else far
        return rows

    image = table.double().numpy().reshape(SIDE, SIDE, -1)
    out = image if grid == (SIDE, SIDE) else np.einsum("yh,xw,hwd->yxd", taps(grid[0]), taps(grid[1]), image)
    return torch.from_numpy(out.reshape(grid[0] * grid[1], -1)).float()


def timms(table: Tensor, grid: tuple[int, int]) -> Tensor:
    return pos_embed.resample_abs_pos_embed(table[None], grid, num_prefix_tokens=0)[0]


def assert_same(vit: ViT, model, sizes=SIZES) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        images = torch.randn(2, 3, *size, generator=generator)
        with torch.no_grad():
            theirs, ours = tokens(model, images), vit(images)
        whole = torch.cat([*([] if ours.cls is None else [ours.cls[:, None]]), ours.registers, ours.patches], dim=1)
        error = (whole - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert error.max() <= 1e-5, f"{size}: {error.max():.2g}"


@pytest.mark.parametrize("family", OWNERS)
def test_each_recipe_by_name_is_its_owners(family, fill):
    model = fill(built(family))
    assert_same(ViT.from_pretrained(model, position_resize="transformers"), model)
    default = ViT.from_pretrained(model)
    if family != "dinov2":
        assert_same(default, model)
    resampled_by(model, timms)
    assert_same(ViT.from_pretrained(model, position_resize="timm"), model)
    if family == "dinov2":
        resampled_by(model, authors)
        assert_same(default, model)
        assert_same(ViT.from_pretrained(model, position_resize="dinov2"), model)


def test_the_three_ways_with_dinov2_agree_at_its_own_size_and_part_at_any_other(fill):
    model = fill(built("dinov2"))
    ways = {name: ViT.from_pretrained(model, position_resize=name) for name in (None, "timm", "transformers")}
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        images = torch.randn(2, 3, *size, generator=generator)
        with torch.no_grad():
            found = {name: vit(images).patches for name, vit in ways.items()}
        pairs = ((None, "timm"), (None, "transformers"), ("timm", "transformers"))
        apart = [float((found[a] - found[b]).norm() / found[a].norm()) for a, b in pairs]
        # torch's cubic has another slope with antialias than without: timm's way differs on larger grids too.
        assert max(apart) == 0.0 if size == (SIDE * PATCH, SIDE * PATCH) else min(apart) > 1e-3


def test_the_recipe_is_part_of_the_passport(fill, tmp_path):
    vit = ViT.from_pretrained(fill(built("dinov2")), position_resize="timm")
    vit.save_pretrained(tmp_path)
    assert ViT.from_pretrained(tmp_path).config.position_resize == vit.config.position_resize
    assert vit.config.position_resize.antialias


def test_a_recipe_that_a_layout_has_not_is_refused(fill):
    with pytest.raises(InputError, match="the transformers_vit layout has no position_resize 'torchvision'"):
        ViT.from_pretrained(built("vit"), position_resize="torchvision")
