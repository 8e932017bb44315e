"""DINO, DINOv2, DINOv3 and MAE as their authors published them, and timm's numbers where it agrees with them."""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import published
import pytest
import torch
from torch import Tensor

from regard.vit import ViT
from regard.vit.config import PositionResize
from regard.vit.errors import InputError

D, HEADS, PATCH, REGISTERS = published.D, published.HEADS, published.PATCH, published.REGISTERS
DEPTH, HIDDEN, SIDE = published.DEPTH, published.HIDDEN, published.PATCH * published.GRID


@pytest.fixture
def opened(tmp_path) -> Callable[..., ViT]:
    def from_file(content: Any, **options: Any) -> ViT:
        path = tmp_path / "checkpoint.pth"
        torch.save(content, path)
        return ViT.from_pretrained(path, **options)

    return from_file


# DINO ----------------------------------------------------------------------------------------------------------------


def test_a_dino_training_checkpoint_gives_its_teacher_with_dinos_numbers(opened, agree):
    tensors = published.dino_file()
    vit = opened(published.dino_training(tensors), heads=HEADS)
    assert vit.report.layout == "dino"
    assert vit.config.preprocess.crop_ratio == 224 / 256
    agree(vit, published.with_table(tensors, offset=0.1))


def test_the_student_is_there_on_request(opened):
    tensors = published.dino_file()
    student = opened(published.dino_training(tensors), heads=HEADS, part="student")
    assert student.report.layout == "dino"
    torch.testing.assert_close(student.cls, 2 * tensors["cls_token"].flatten())
    with pytest.raises(InputError, match=r"no part 'studnt'.*teacher.*student"):
        opened(published.dino_training(tensors), heads=HEADS, part="studnt")


def test_a_plain_dino_file_opens_as_timms_says_so_and_gives_dinos_numbers_on_request(opened, agree):
    tensors = published.dino_file()
    vit = opened(tensors, heads=HEADS)
    assert vit.report.layout == "timm"
    assert any("DINO" in note and "dino" in note for note in vit.report.assumed)
    agree(vit, published.with_table(tensors, antialias=True))
    agree(opened(tensors, heads=HEADS, position_resize="dino"), published.with_table(tensors, offset=0.1))


def test_a_distilled_classifier_under_a_teacher_is_no_dino(opened):
    tensors = {**published.dino_file(), "head.weight": torch.randn(7, D), "head.bias": torch.randn(7)}
    vit = opened({"teacher": tensors, "student": tensors}, heads=HEADS, classes=7)
    assert (vit.report.layout, vit.config.classes) == ("timm", 7)


# DINOv2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["plain", "w12"])
@pytest.mark.parametrize("registers", [False, True])
def test_dinov2_has_its_authors_numbers(opened, agree, registers, mlp):
    tensors = published.dinov2_file(registers, mlp)
    vit = opened(tensors, heads=HEADS)
    assert vit.report.layout == "dinov2"
    assert vit.report.unused == {"mask token of the pretraining": ("mask_token",)}
    recipe = dict(antialias=True) if registers else dict(offset=0.1)
    agree(vit, published.with_table(tensors, **recipe))
    agree(opened(tensors, heads=HEADS, position_resize="timm"), published.with_table(tensors, antialias=True))
    theirs = opened(tensors, heads=HEADS, position_resize="transformers")
    agree(theirs, published.with_table(tensors, antialias=registers))


def test_a_self_trained_dinov2_with_chunked_blocks_opens(opened, agree):
    tensors = published.dinov2_file(registers=True)
    chunks = {0: 0, 1: 0, 2: 1}

    def chunked(name: str) -> str:
        first, _, rest = name.partition(".")
        return name if first != "blocks" else f"blocks.{chunks[int(rest[0])]}.{rest}"

    parts = {"teacher.backbone.": 1, "student.backbone.": 3}
    flat = {part + chunked(n): factor * t for part, factor in parts.items() for n, t in tensors.items()}
    heads = {
        f"{who}.{head}_head.mlp.0.weight": torch.ones(4, D)
        for who in ("teacher", "student")
        for head in ("dino", "ibot")
    }
    vit = opened({"model": {**flat, **heads, "dino_loss.center": torch.ones(1, 4)}, "iteration": 9}, heads=HEADS)
    assert vit.report.layout == "dinov2"
    assert {"chunks of blocks", "prefix 'teacher.backbone.'"} <= set(vit.report.unwrapped)
    agree(vit, published.with_table(tensors, antialias=True))
    alone = {"teacher": {"backbone." + chunked(n): t for n, t in tensors.items()}}
    agree(opened(alone, heads=HEADS), published.with_table(tensors, antialias=True))


# DINOv3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mlp", "masks", "periods"),
    [("plain", "key", "rounded"), ("w1", "all", "exact"), ("w1", "none", "rounded"), ("plain", "key", "exact")],
)
def test_dinov3_has_its_authors_numbers(opened, agree, mlp, masks, periods):
    tensors = published.dinov3_file(mlp, masks, periods)
    vit = opened(tensors, image_size=(SIDE, SIDE))
    assert vit.report.layout == "dinov3"
    assert (vit.config.heads, vit.config.registers, vit.config.norm_eps) == (HEADS, REGISTERS, 1e-5)
    assert vit.config.qkv_bias == (masks == "key")
    assert vit.config.qkv_bias <= (not vit.config.key_bias)
    assert (vit.config.rope.periods is None) == (periods == "exact")
    assert "local_cls_norm.weight" in vit.report.unused["norm that only training uses"]
    agree(vit, published.dinov3(tensors))


def test_a_dinov3_without_a_size_is_native_at_256(opened):
    vit = opened(published.dinov3_file())
    assert vit.config.image_size == vit.config.preprocess.size == (256, 256)
    assert (vit.config.preprocess.fit, vit.config.preprocess.interpolation) == ("squash", "bilinear")


def test_dinov3_says_that_satellite_weights_need_other_statistics(opened):
    assert any("satellite" in note for note in opened(published.dinov3_file()).report.assumed)
    own = dict(mean=(0.430, 0.411, 0.296), std=(0.213, 0.156, 0.143))
    vit = opened(published.dinov3_file(), preprocess=own)
    assert vit.config.preprocess.mean == own["mean"]


def test_a_norm_of_the_class_tokens_own_is_refused_for_it_would_change_the_numbers(opened):
    tensors = {**published.dinov3_file(), "cls_norm.weight": torch.ones(D), "cls_norm.bias": torch.zeros(D)}
    with pytest.raises(InputError, match=r"cls_norm\.weight"):
        opened(tensors)


# MAE -----------------------------------------------------------------------------------------------------------------


def test_mae_gives_its_encoder_with_its_authors_numbers(opened, agree):
    tensors = published.mae_file()
    vit = opened({"model": tensors, "epoch": 799, "args": argparse.Namespace(input_size=16)}, heads=HEADS)
    assert vit.report.layout == "mae"
    assert len(vit.report.unused["decoder of the pretraining"]) == len([n for n in tensors if n.startswith("decoder")])
    assert vit.config.position_resize == PositionResize("bicubic", antialias=False)
    agree(vit, published.with_table(tensors))
    agree(opened(tensors, heads=HEADS, position_resize="timm"), published.with_table(tensors, antialias=True))


# the same files in timm ----------------------------------------------------------------------------------------------


def timms(name: str, tensors: dict[str, Tensor], family: str, **made: Any) -> Callable[[Tensor], dict[Any, Tensor]]:
    """The numbers of timm's model with a file as its own converter reads it."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    filters = importlib.import_module(f"timm.models.{family}").checkpoint_filter_fn
    small = dict(embed_dim=D, depth=DEPTH, num_heads=HEADS, patch_size=PATCH, img_size=SIDE)
    model = timm.create_model(name, num_classes=0, **{**small, "mlp_ratio": HIDDEN / D, **made}).eval()
    clean = {n: t.nan_to_num() if n.endswith("qkv.bias") else t for n, t in tensors.items()}
    model.load_state_dict(filters(clean, model), strict=True)

    def run(images: Tensor) -> dict[Any, Tensor]:
        final, inner = model.forward_intermediates(
            images, indices=[0, 1], norm=False, return_prefix_tokens=True, output_fmt="NLC"
        )
        return {"final": final, **{i: torch.cat((prefix, patches), dim=1) for i, (patches, prefix) in enumerate(inner)}}

    return run


NATIVE = [(SIDE, SIDE)]


@pytest.mark.parametrize("registers", [False, True])
def test_at_its_native_size_dinov2_has_timms_numbers_too(opened, agree, registers):
    tensors = published.dinov2_file(registers)
    name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    agree(opened(tensors, heads=HEADS), timms(name, tensors, "vision_transformer"), only=NATIVE)


def test_dinov2_giant_has_timms_numbers_too(opened, agree):
    tensors = published.dinov2_file(mlp="w12")
    theirs = timms("vit_giant_patch14_dinov2", tensors, "vision_transformer", mlp_ratio=2 * HIDDEN / D)
    agree(opened(tensors, heads=HEADS), theirs, only=NATIVE)


def test_dinov3_has_timms_numbers_too(opened, agree):
    tensors = published.dinov3_file(periods="exact")
    theirs = timms("vit_small_patch16_dinov3_qkvb", tensors, "eva", dynamic_img_size=True)
    agree(opened(tensors, image_size=NATIVE[0]), theirs, only=[*NATIVE, (24, 12)])


def test_mae_has_timms_numbers_too(opened, agree):
    tensors = {n: t for n, t in published.mae_file().items() if not n.startswith(("decoder", "mask"))}
    agree(
        opened(published.mae_file(), heads=HEADS),
        timms("vit_base_patch16_224", tensors, "vision_transformer"),
        only=NATIVE,
    )


# wrong files ---------------------------------------------------------------------------------------------------------

COMMON = ("blocks.1.attn.qkv.weight", "blocks.2.attn.qkv.bias", "cls_token", "patch_embed.proj.weight", "norm.weight")
# Under names that all of them have, and by rules that they share: tried out on two.
SHARED = (
    *COMMON, "blocks.0.norm1.weight", "blocks.1.norm1.bias", "blocks.1.attn.proj.weight", "blocks.0.attn.proj.bias",
    "blocks.1.norm2.weight", "blocks.0.norm2.bias", "norm.bias", "patch_embed.proj.bias", "blocks.0.mlp.fc1.weight",
    "blocks.1.mlp.fc1.bias", "blocks.1.mlp.fc2.weight", "blocks.0.mlp.fc2.bias",
)  # fmt: skip
SCALES = ("blocks.0.ls1.gamma", "blocks.2.ls2.gamma")
GATED_V2 = tuple(
    f"blocks.{i}.mlp.{part}" for i in (0, 2) for part in ("w12.weight", "w12.bias", "w3.weight", "w3.bias")
)
GATED_V3 = tuple(f"blocks.0.mlp.w{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias"))
WRONG: dict[str, tuple[Callable[[], dict[str, Tensor]], tuple[str, ...]]] = {
    "dino": (lambda: published.dino_training(published.dino_file())["teacher"], ("pos_embed", *SHARED)),
    "dinov2": (
        published.dinov2_file,
        ("pos_embed", *COMMON, *SCALES, "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"),
    ),
    "dinov2 giant": (lambda: published.dinov2_file(True, "w12"), ("pos_embed", *COMMON, *GATED_V2)),
    "dinov3": (published.dinov3_file, ("storage_tokens", "rope_embed.periods", *SHARED, *SCALES)),
    "dinov3 gated": (lambda: published.dinov3_file("w1"), ("storage_tokens", "rope_embed.periods", *GATED_V3)),
    "mae": (published.mae_file, ("pos_embed", *COMMON, "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")),
}


@pytest.mark.parametrize("kind", WRONG)
def test_four_wrong_files_of_each_tensor_are_told_by_their_own_names(opened, four_wrong_files, kind):
    make, names = WRONG[kind]
    options = {} if kind.startswith("dinov3") else dict(heads=HEADS)
    prefix = "backbone." if kind == "dino" else ""
    four_wrong_files(make(), lambda content: opened(content, **options), *(prefix + name for name in names))


@pytest.mark.parametrize("what", ["deleted", "renamed", "misshapen", "not finite", "halves"])
def test_a_wrong_bias_mask_is_told(opened, what):
    tensors, name = published.dinov3_file(), "blocks.1.attn.qkv.bias_mask"
    mask = tensors.pop(name)
    if what == "renamed":
        tensors[name + "_odd"] = mask
    elif what != "deleted":
        wrong = {"misshapen": torch.cat((mask, mask[:1])), "not finite": mask * torch.nan, "halves": mask * 0.5}
        tensors[name] = wrong[what]
    with pytest.raises(InputError) as caught:
        opened(tensors)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deleted_registers_of_dinov2_cannot_be_found_but_are_owned_up_to(opened):
    tensors = published.dinov2_file(registers=True)
    del tensors["register_tokens"]
    assert any("register_tokens" in note for note in opened(tensors, heads=HEADS).report.assumed)
    for wrong in (torch.zeros(1, REGISTERS, D + 1), torch.full((1, REGISTERS, D), torch.nan)):
        with pytest.raises(InputError, match="register_tokens"):
            opened({**tensors, "register_tokens": wrong}, heads=HEADS)
    with pytest.raises(InputError, match="register_tokens_odd"):
        opened({**tensors, "register_tokens_odd": torch.zeros(1, REGISTERS, D)}, heads=HEADS)
