"""Files as the authors of DINO, DINOv2, DINOv3 and MAE publish them, with random weights, and what their code computes.

None of these authors' packages is installed: their papers' computation is written down here in float64 from plain
tensors, without any module of ours. Tests import this module as `published`.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

D, DEPTH, HEADS, PATCH, GRID, HIDDEN, REGISTERS = 48, 3, 3, 4, 4, 80, 4
Tensors = dict[str, Tensor]


# files in the published layouts --------------------------------------------------------------------------------------


def noise(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Nothing is 0 or 1: a part that starts so would hide what is done with it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        is_matrix = len(shape) >= 2 and "token" not in name and "pos_embed" not in name
        if is_matrix:
            values *= math.prod(shape[1:]) ** -0.5
        elif "norm" in name and name.endswith("weight"):
            values = 1 + 0.2 * values
        else:
            values *= 0.5
        tensors[name] = values
    return tensors


def linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def layer_norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def common(*, scaled: bool, mlp: str = "plain") -> dict[str, tuple[int, ...]]:
    shapes = {"cls_token": (1, 1, D), "patch_embed.proj.weight": (D, 3, PATCH, PATCH), "patch_embed.proj.bias": (D,)}
    for i in range(DEPTH):
        block = f"blocks.{i}."
        shapes |= layer_norm(block + "norm1") | linear(block + "attn.qkv", 3 * D, D)
        shapes |= linear(block + "attn.proj", D, D) | layer_norm(block + "norm2")
        if mlp == "plain":
            shapes |= linear(block + "mlp.fc1", HIDDEN, D) | linear(block + "mlp.fc2", D, HIDDEN)
        elif mlp == "w12":
            shapes |= linear(block + "mlp.w12", 2 * HIDDEN, D) | linear(block + "mlp.w3", D, HIDDEN)
        else:
            shapes |= linear(block + "mlp.w1", HIDDEN, D) | linear(block + "mlp.w2", HIDDEN, D)
            shapes |= linear(block + "mlp.w3", D, HIDDEN)
        if scaled:
            shapes |= {block + "ls1.gamma": (D,), block + "ls2.gamma": (D,)}
    return shapes | layer_norm("norm")


def dino_file(rows: int = GRID**2 + 1) -> Tensors:
    """Named as timm's are; `rows` of the position table."""
    return noise({**common(scaled=False), "pos_embed": (1, rows, D)})


def dinov2_file(registers: bool = False, mlp: str = "plain") -> Tensors:
    shapes = {"mask_token": (1, D), "pos_embed": (1, GRID**2 + 1, D), **common(scaled=True, mlp=mlp)}
    return noise(shapes | ({"register_tokens": (1, REGISTERS, D)} if registers else {}))


def exact_periods() -> Tensor:
    return 100.0 ** (torch.arange(D // HEADS // 4).float() / (D // HEADS // 4))


def dinov3_file(mlp: str = "plain", masks: str = "key", periods: str = "rounded") -> Tensors:
    """`masks`: over the `key` third as in training, over `all` as in several releases, or `none` at all (7B)."""
    shapes = {"mask_token": (1, D), "storage_tokens": (1, REGISTERS, D), **common(scaled=True, mlp=mlp)}
    tensors = noise(shapes)
    tensors["rope_embed.periods"] = exact_periods().bfloat16().float() if periods == "rounded" else exact_periods()
    tensors |= {"local_cls_norm.weight": torch.ones(D), "local_cls_norm.bias": torch.zeros(D)}
    for i in range(DEPTH):
        bias = f"blocks.{i}.attn.qkv.bias"
        if masks == "none":
            del tensors[bias]
            continue
        mask = torch.zeros(3, D) if masks == "all" else torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, D)
        tensors[bias + "_mask"] = mask.flatten().clone()
        tensors[bias] = torch.where(tensors[bias + "_mask"] == 0, torch.nan, tensors[bias])
    return tensors


def mae_file() -> Tensors:
    decoder = {
        "mask_token": (1, 1, 32), "decoder_pos_embed": (1, GRID**2 + 1, 32), **linear("decoder_embed", 32, D),
        **linear("decoder_blocks.0.attn.qkv", 96, 32), **linear("decoder_pred", PATCH * PATCH * 3, 32),
        "decoder_norm.weight": (32,),
    }  # fmt: skip
    return {**dino_file(), **noise(decoder)}


def dino_training(tensors: Tensors) -> dict[str, Any]:
    head = {"head.mlp.0.weight": torch.ones(8, D), "head.last_layer.weight_g": torch.ones(4, 1)}
    student = {**{f"backbone.{n}": 2 * t for n, t in tensors.items()}, **head}
    return {
        "student": {f"module.{n}": t for n, t in student.items()},
        "teacher": {**{f"backbone.{n}": t for n, t in tensors.items()}, **head},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", patch_size=PATCH, local_crops_scale=(0.05, 0.25)),
        "dino_loss": {"center": torch.zeros(1, 4)},
    }


# what the authors compute --------------------------------------------------------------------------------------------


def trunk(t: Tensors, x: Tensor, *, eps: float, turn: Callable[[Tensor], Tensor] = lambda x: x) -> dict[Any, Tensor]:
    """The blocks and the last norm on tokens `(B, S, D)`, in float64."""

    def affine(x: Tensor, name: str) -> Tensor:
        bias = t.get(name + ".bias")
        return F.linear(x, t[name + ".weight"].double(), None if bias is None else bias.double())

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), t[name + ".weight"].double(), t[name + ".bias"].double(), eps)

    def mlp(x: Tensor, name: str) -> Tensor:
        if name + ".w12.weight" in t:
            gate, value = affine(x, name + ".w12").chunk(2, dim=-1)
            return affine(F.silu(gate) * value, name + ".w3")
        if name + ".w1.weight" in t:
            return affine(F.silu(affine(x, name + ".w1")) * affine(x, name + ".w2"), name + ".w3")
        return affine(F.gelu(affine(x, name + ".fc1")), name + ".fc2")

    states = {}
    for i in range(DEPTH):
        block = f"blocks.{i}."
        gamma1, gamma2 = (t.get(f"{block}ls{n}.gamma", torch.ones(D)).double() for n in (1, 2))
        qkv = affine(normed(x, block + "norm1"), block + "attn.qkv")
        q, k, v = qkv.unflatten(-1, (3, HEADS, D // HEADS)).permute(2, 0, 3, 1, 4)
        weights = (turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(D // HEADS)).softmax(dim=-1)
        x = x + gamma1 * affine((weights @ v).transpose(1, 2).flatten(2), block + "attn.proj")
        x = x + gamma2 * mlp(normed(x, block + "norm2"), block + "mlp")
        states[i] = x
    return {0: states[0], 1: states[1], "final": normed(x, "norm")}


def patches_of(t: Tensors, images: Tensor) -> Tensor:
    weight, bias = t["patch_embed.proj.weight"].double(), t["patch_embed.proj.bias"].double()
    return F.conv2d(images.double(), weight, bias, stride=PATCH).flatten(2).transpose(1, 2)


def table_at(t: Tensors, images: Tensor, recipe: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The class token's row, and the patches' rows for these images."""
    rows = t["pos_embed"].double()
    new = (images.shape[2] // PATCH, images.shape[3] // PATCH)
    if new == (GRID, GRID):
        return rows[:, :1], rows[:, 1:]
    image = rows[:, 1:].unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2)
    if recipe.get("offset"):
        scale = [(length + recipe["offset"]) / GRID for length in new]
        image = F.interpolate(image, scale_factor=scale, mode="bicubic")
    else:
        image = F.interpolate(image, size=new, mode="bicubic", antialias=recipe.get("antialias", False))
    return rows[:, :1], image.flatten(2).transpose(1, 2)


def with_table(t: Tensors, **recipe: Any) -> Callable[[Tensor], dict[Any, Tensor]]:
    """DINO, DINOv2 and MAE: class token, registers without a place, patches."""

    def run(images: Tensor) -> dict[Any, Tensor]:
        at_cls, at_patches = table_at(t, images, recipe)
        registers = t.get("register_tokens", torch.zeros(1, 0, D)).double()
        special = torch.cat((t["cls_token"].double() + at_cls, registers), dim=1).expand(len(images), -1, -1)
        return trunk(t, torch.cat((special, patches_of(t, images) + at_patches), dim=1), eps=1e-6)

    return run


def dinov3(t: Tensors) -> Callable[[Tensor], dict[Any, Tensor]]:
    """Rope on the patches alone, by their centres in [-1, 1]; biases where the mask leaves them."""
    masked = dict(t)
    for name, mask in t.items():
        if name.endswith("bias_mask"):
            bias = name.removesuffix("_mask")
            masked[bias] = t[bias].masked_fill(mask == 0, 0.0)

    def run(images: Tensor) -> dict[Any, Tensor]:
        height, width = images.shape[2] // PATCH, images.shape[3] // PATCH
        centres = [(torch.arange(n).double() + 0.5) / n * 2 - 1 for n in (height, width)]
        yx = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
        angles = (2 * math.pi * yx[:, :, None] / t["rope_embed.periods"].double()).flatten(1).repeat(1, 2)
        lead = 1 + REGISTERS

        def turn(x: Tensor) -> Tensor:
            still, moved = x[:, :, :lead], x[:, :, lead:]
            first, second = moved.chunk(2, dim=-1)
            turned = moved * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
            return torch.cat((still, turned), dim=2)

        special = torch.cat((t["cls_token"], t["storage_tokens"]), dim=1).double().expand(len(images), -1, -1)
        return trunk(masked, torch.cat((special, patches_of(t, images)), dim=1), eps=1e-5, turn=turn)

    return run
