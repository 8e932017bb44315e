"""CLIP's image tower as OpenAI and open_clip publish it, against timm's reading of the same file and plain float64."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError

D, DEPTH, HEADS, PATCH, GRID, HIDDEN = 64, 3, 2, 4, 4, 96
Tensors = dict[str, Tensor]


def clip_file(scaled: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, scale: float = 0.5) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def norm(name: str) -> Tensors:
        return {f"{name}.weight": 1 + noise(D, scale=0.2), f"{name}.bias": noise(D)}

    tensors = {
        "class_embedding": noise(D), "positional_embedding": noise(GRID**2 + 1, D), "proj": noise(D, 24),
        "conv1.weight": noise(D, 3, PATCH, PATCH, scale=0.15), **norm("ln_pre"), **norm("ln_post"),
    }  # fmt: skip
    for i in range(DEPTH):
        block = f"transformer.resblocks.{i}."
        tensors |= norm(block + "ln_1") | norm(block + "ln_2")
        tensors |= {
            block + "attn.in_proj_weight": noise(3 * D, D, scale=D**-0.5),
            block + "attn.in_proj_bias": noise(3 * D),
        }
        for name, outputs, inputs in (("attn.out_proj", D, D), ("mlp.c_fc", HIDDEN, D), ("mlp.c_proj", D, HIDDEN)):
            tensors |= {f"{block}{name}.weight": noise(outputs, inputs, scale=inputs**-0.5)}
            tensors |= {f"{block}{name}.bias": noise(outputs)}
        if scaled:
            tensors |= {block + "ls_1.gamma": noise(D), block + "ls_2.gamma": noise(D)}
    text = {"token_embedding.weight": noise(9, 8), "positional_embedding": noise(5, 8), "logit_scale": noise(1)[0]}
    text |= {"transformer.resblocks.0.attn.in_proj_weight": noise(24, 8), "ln_final.weight": noise(8)}
    return {**{f"visual.{name}": t for name, t in tensors.items()}, **text}


def clip(t: Tensors, quick: bool) -> Callable[[Tensor], dict[Any, Tensor]]:
    """What the paper's code computes, in float64, tokens first as there."""
    t = {name.removeprefix("visual."): tensor.double() for name, tensor in t.items() if name.startswith("visual.")}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), t[name + ".weight"], t[name + ".bias"], 1e-5)

    def run(images: Tensor) -> dict[Any, Tensor]:
        rows = t["positional_embedding"]
        new = (images.shape[2] // PATCH, images.shape[3] // PATCH)
        table = rows[1:].T.reshape(1, D, GRID, GRID)
        if new != (GRID, GRID):
            table = F.interpolate(table, size=new, mode="bicubic", antialias=True)
        patches = F.conv2d(images.double(), t["conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
        cls = (t["class_embedding"] + rows[0]).expand(len(images), 1, D)
        x = norm(torch.cat((cls, patches + table.flatten(2).transpose(1, 2)), dim=1), "ln_pre").transpose(0, 1)
        states = {}
        for i in range(DEPTH):
            b = f"transformer.resblocks.{i}."
            y = norm(x, b + "ln_1")
            y, _ = F.multi_head_attention_forward(
                y, y, y, D, HEADS, t[b + "attn.in_proj_weight"], t[b + "attn.in_proj_bias"], None, None, False, 0.0,
                t[b + "attn.out_proj.weight"], t[b + "attn.out_proj.bias"], training=False,
            )  # fmt: skip
            x = x + t.get(b + "ls_1.gamma", torch.ones(D)) * y
            y = F.linear(norm(x, b + "ln_2"), t[b + "mlp.c_fc.weight"], t[b + "mlp.c_fc.bias"])
            y = y * torch.sigmoid(1.702 * y) if quick else F.gelu(y)
            x = x + t.get(b + "ls_2.gamma", torch.ones(D)) * F.linear(
                y, t[b + "mlp.c_proj.weight"], t[b + "mlp.c_proj.bias"]
            )
            states[i] = x.transpose(0, 1)
        return {0: states[0], 1: states[1], "final": norm(states[DEPTH - 1], "ln_post")}

    return run


@pytest.fixture
def opened(tmp_path) -> Callable[..., ViT]:
    def from_file(tensors: Tensors, **options: Any) -> ViT:
        torch.save(tensors, tmp_path / "clip.pt")
        return ViT.from_pretrained(tmp_path / "clip.pt", **{"heads": HEADS, **options})

    return from_file


@pytest.fixture
def repository(tmp_path) -> Callable[..., ViT]:
    """A folder as open_clip publishes it."""

    def write(model: dict[str, Any], preprocess: Any = None, vision: Any = None) -> ViT:
        own = {
            "image_size": GRID * PATCH,
            "patch_size": PATCH,
            "width": D,
            "layers": DEPTH,
            "head_width": D // HEADS,
        }
        config = {"model_cfg": {"vision_cfg": {**own, **(vision or {})}, **model}, "preprocess_cfg": preprocess or {}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
        save_file(clip_file(), tmp_path / "open_clip_model.safetensors")
        return ViT.from_pretrained(tmp_path)

    return write


@pytest.mark.parametrize("scaled", [False, True])
def test_clip_has_its_authors_numbers(opened, agree, scaled):
    tensors = clip_file(scaled)
    vit = opened(tensors)
    assert vit.report.layout == "openai-clip"
    assert vit.report.unused["projection into the space that images and texts share"] == ("proj",)
    assert "token_embedding.weight" in vit.report.unused["beside the vision transformer"]
    agree(vit, clip(tensors, quick=True))


def test_a_tower_alone_opens_too(opened, agree):
    tensors = clip_file()
    alone = {name.removeprefix("visual."): t for name, t in tensors.items() if name.startswith("visual.")}
    agree(opened(alone), clip(tensors, quick=True))


def test_openais_half_precision_means_quick_gelu(opened, agree):
    half = {name: t.half() for name, t in clip_file().items()}
    vit = opened(half)
    assert vit.config.activation == "quick_gelu"
    assert vit.dtype == torch.float32
    agree(vit, clip(half, quick=True))


def test_where_nothing_tells_the_activation_the_report_says_what_was_assumed(opened, agree):
    vit = opened(clip_file())
    assert any("quick_gelu" in note and "OpenAI" in note for note in vit.report.assumed)
    plain = opened(clip_file(), activation="gelu")
    assert not any("gelu" in note for note in plain.report.assumed)
    agree(plain, clip(clip_file(), quick=False))


def test_open_clips_own_configuration_tells_activation_heads_and_preprocessing(repository, agree):
    vit = repository({"quick_gelu": True})
    assert not any("gelu" in note for note in vit.report.assumed)
    agree(vit, clip(clip_file(), quick=True))
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    vit = repository({}, {"mean": mean, "std": std, "interpolation": "bilinear", "resize_mode": "squash"})
    assert (vit.config.activation, vit.config.heads) == ("gelu", HEADS)
    stated = vit.config.preprocess
    assert (stated.mean, stated.std, stated.interpolation, stated.fit) == (mean, std, "bilinear", "squash")
    agree(vit, clip(clip_file(), quick=False))


STATED = {
    "pooling of the patches": (dict(pool_type="avg"), dict(pooling="mean", norm_place="tokens")),
    "norm after pooling": (dict(final_ln_after_pool=True), dict(pooling="cls", norm_place="pooled")),
    "eps": (dict(norm_kwargs={"eps": 1e-6}), dict(norm_eps=1e-6)),
    "tanh": (dict(act_kwargs={"approximate": "tanh"}), dict(activation="gelu_tanh")),
}


@pytest.mark.parametrize("what", STATED)
def test_what_open_clips_configuration_states_of_the_tower_is_kept(repository, what):
    said, expected = STATED[what]
    config = repository({}, vision=said).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("quick", [True, False])
def test_clip_has_timms_numbers(opened, agree, timm_tokens, quick):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from timm.models.vision_transformer import checkpoint_filter_fn

    name = "vit_base_patch32_clip_quickgelu_224" if quick else "vit_base_patch32_clip_224"
    small = dict(
        embed_dim=D, depth=DEPTH, num_heads=HEADS, mlp_ratio=HIDDEN / D, patch_size=PATCH, img_size=GRID * PATCH
    )
    model = timm.create_model(name, num_classes=0, dynamic_img_size=True, **small).eval()
    visual = {name: t for name, t in clip_file().items() if name.startswith("visual.") and name != "visual.proj"}
    model.load_state_dict(checkpoint_filter_fn(visual, model), strict=True)
    agree(opened(clip_file(), activation="quick_gelu" if quick else "gelu"), timm_tokens(model))


def test_transformers_recipe_is_there_by_name(opened, agree):
    vit = opened(clip_file(), position_resize="transformers")
    assert not vit.config.position_resize.antialias
    with pytest.raises(AssertionError, match="final at"):
        agree(vit, clip(clip_file(), quick=True))


def test_four_wrong_files_of_each_tensor_are_told(opened, four_wrong_files):
    block = "visual.transformer.resblocks.1."
    names = (
        "conv1.weight",
        "class_embedding",
        "positional_embedding",
        "ln_pre.weight",
        "ln_pre.bias",
        "ln_post.weight",
    )
    parts = (
        "ln_1.weight", "ln_1.bias", "attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight",
        "attn.out_proj.bias", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "ls_1.gamma",
    )  # fmt: skip
    every = [*(f"visual.{name}" for name in names), *(block + part for part in parts)]
    four_wrong_files(clip_file(scaled=True), opened, *every)


def test_a_tower_of_residual_convolutions_is_told(opened):
    resnet = {"visual.conv1.weight": torch.ones(8, 3, 3, 3), "visual.bn1.running_mean": torch.ones(8)}
    resnet |= {"visual.layer1.0.conv1.weight": torch.ones(8, 8, 1, 1), "token_embedding.weight": torch.ones(2, 2)}
    with pytest.raises(InputError, match="convolutional network"):
        opened(resnet)
