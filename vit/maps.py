"""Where a head looks: rows of the attention matrix, recomputed from that layer's own queries and keys.

The fused kernel runs as always and no hook is set. Only the rows asked for are computed, so memory is
O(rows x N). Each row is checked: its percentages times the values must give what the head really put out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from regard.vit.attention import Attention, KeysValues
from regard.vit.blocks import Block
from regard.vit.errors import InputError
from regard.vit.model import ViT
from regard.vit.preprocess import Picture

_BLOCK = 256  # queries whose rows are held at once


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention from Q query tokens, by the name of the token they look at; a row's parts sum to 1.

    Attributes:
        patches: `(B, L, H, Q, grid height, grid width)`.
        cls: mass on the class token `(B, L, H, Q)`, or None for a model without one.
        registers: mass on each register `(B, L, H, Q, R)`.
    """

    patches: Tensor
    cls: Tensor | None
    registers: Tensor


def checked_rows(attn: Attention, q: Tensor, kv: KeysValues, mask: Tensor | None = None) -> Tensor:
    """Rows of A `(B, H, T, N)` for the queries `q (B, H, T, K)`, proven against the heads' fused output.

    Raises RuntimeError where the rows do not reproduce it, which would mean a wrong map.
    """
    rows, real = attn.weights(q, kv.k, mask), attn.mix(q, kv, mask)
    if not rows.numel():
        return rows
    with torch.autocast(q.device.type, enabled=False):
        expected = rows @ kv.v.to(rows.dtype)
    # Half precision and TF32 round inputs and outputs; the bound follows the arithmetic that ran.
    exact = real.dtype in (torch.float32, torch.float64)
    tf32 = real.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    tolerance = 1e-4 if exact and not tf32 else 3e-2
    scale = kv.v.abs().amax().clamp_min(1e-12)
    worst = ((expected - real.to(rows.dtype)).abs().amax() / scale).item()
    if not worst <= tolerance:
        raise RuntimeError(f"attention rows differ from the head's output by {worst:.2g} of the largest value")
    return rows


@torch.no_grad()
def attention_rows(
    model: ViT,
    images: Tensor | Picture | Sequence[Picture],
    queries: Literal["cls", "registers", "patches"] = "cls",
    layers: int | list[int] | Literal["all"] = -1,
) -> AttentionRows:
    """Where the class token, the registers, or the patches on average look, for the named layers.

    `images` is a preprocessed float tensor `(B, C, height, width)`, or pictures as `Preprocess` takes them. `patches`
    gives one row, the mean of all patches' rows: what stands for the image in a model without a class token.

    Raises InputError for a query token that the model does not have or a layer that does not exist.
    """
    has_cls, registers = int(model.config.class_token), model.config.registers
    if queries not in ("cls", "registers", "patches"):
        raise InputError(f"queries {queries!r} is unknown; ask for 'cls', 'registers' or 'patches'")
    if not {"cls": has_cls, "registers": registers, "patches": 1}[queries]:
        raise InputError(f"this ViT has no {queries}: its special tokens are cls {has_cls}, registers {registers}")
    if not (isinstance(images, Tensor) and images.dim() == 4):
        images = model.preprocess(images).to(model.tokenizer.proj.weight)
    wanted = model.layer_numbers(layers)
    if not wanted:
        raise InputError("no layers were asked for; name at least one, or 'all'")
    found: dict[int, AttentionRows] = {}
    for layer, (x, grid) in enumerate(model.layers(images)):
        if layer in wanted:
            block = cast(Block, model.blocks[layer])
            q, kv = block.attn.project(block.norm1(x), rotary=model.rotary(grid, x.device))
            asked = model.name(torch.arange(x.shape[1], device=x.device)[None, :, None], grid)
            index = {"cls": asked.cls, "registers": asked.registers, "patches": asked.patches}[queries]
            assert index is not None
            rows = _rows(block.attn, q, kv, index.flatten(), mean=queries == "patches")
            found[layer] = split_rows(model, rows, grid)
    parts = [found[layer] for layer in wanted]
    return AttentionRows(
        torch.stack([p.patches for p in parts], dim=1),
        torch.stack([p.cls for p in parts if p.cls is not None], dim=1) if has_cls else None,
        torch.stack([p.registers for p in parts], dim=1),
    )


def _rows(attn: Attention, q: Tensor, kv: KeysValues, index: Tensor, mean: bool) -> Tensor:
    """Checked rows of the queries `index`, or their mean `(B, H, 1, N)`, of which no more than a block is held."""
    if not mean:
        return checked_rows(attn, q[:, :, index], kv)
    blocks = [checked_rows(attn, q[:, :, part], kv).sum(dim=2, keepdim=True) for part in index.split(_BLOCK)]
    return torch.stack(blocks).sum(dim=0) / len(index)


def split_rows(model: ViT, rows: Tensor, grid: tuple[int, int]) -> AttentionRows:
    """Name the columns of `rows (B, H, Q, S)` of one layer: `AttentionRows` without its L axis."""
    flat = model.name(rows.flatten(0, 2)[..., None], grid)  # the model's own layout of a sequence
    shape = rows.shape[:3]
    return AttentionRows(
        flat.patches[..., 0].unflatten(0, shape).unflatten(-1, grid),
        None if flat.cls is None else flat.cls[..., 0].unflatten(0, shape),
        flat.registers[..., 0].unflatten(0, shape),
    )
