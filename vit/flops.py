"""What a ViT costs, from its configuration alone: multiply-adds of a forward pass, FLOPs of a training step.

Matrix products are counted, and nothing else: norms, activations, softmax and the optimizer are not, as usual where a
share of a device's peak is stated (Chowdhery et al., 2022, arXiv:2204.02311, appendix B). A multiply-add is two FLOPs.

D width, H heads, K head width, L layers, M inner width of the MLP, N patches, S = cls + registers + patches.
"""

from collections.abc import Sequence
from itertools import pairwise

from regard.vit.config import ViTConfig

DINO_HEAD = (2048, 2048, 256)
"""Inner widths of DINO's projection head (Caron et al., 2021, arXiv:2104.14294)."""


def forward_macs(config: ViTConfig, image_size: tuple[int, int] | None = None) -> int:
    """Multiply-adds of one image's forward pass, pooling and classifier included.

    `N D C P^2 + L (4 S D HK + 2 S^2 HK + 2 S D M) + pooling + classifier`; SwiGLU has 3 S D M. `image_size` is
    (height, width) in pixels, by default the native one; sides that the patch does not divide are counted as the size
    policy makes them.
    """
    dim, inner = config.dim, config.heads * config.width_of_head
    patches = _patches(config, image_size or config.image_size)
    tokens = patches + config.class_token + config.registers
    attention = 4 * tokens * dim * inner + 2 * tokens**2 * inner
    macs = patches * dim * config.channels * config.patch_size**2 + config.depth * (attention + tokens * _mlp(config))
    if config.pooling == "map":  # one query asks the patches
        macs += 2 * dim * inner + 2 * patches * dim * inner + 2 * patches * inner + _mlp(config)
    return macs + _pooled(config) * config.classes


def training_flops(config: ViTConfig, image_size: tuple[int, int] | None = None) -> int:
    """FLOPs of training on one image: the forward pass, and twice that for the two gradients of each product.

    The gradient on the pixels, which nobody computes, is counted too, as is the custom: below half a per cent at 224.
    """
    return 6 * forward_macs(config, image_size)


def distill_flops(
    config: ViTConfig,
    *,
    global_size: tuple[int, int] | None = None,
    local_size: tuple[int, int] = (96, 96),
    local_crops: int = 8,
    prototypes: int = 65536,
    head: Sequence[int] = DINO_HEAD,
) -> int:
    """FLOPs of one image in DINO: two global and `local_crops` local crops in the student, two global in the teacher.

    `2 (3 (2 Fg + V Fl + (2 + V) Hd) + 2 Fg + 2 Hd)` with the head's `Hd = D 2048 + 2048^2 + 2048 256 + 256 K`
    (Caron et al., 2021, arXiv:2104.14294). Sizes are (height, width) in pixels; K is `prototypes`, `head` the inner
    widths.
    """
    whole, part = forward_macs(config, global_size), forward_macs(config, local_size)
    projection = sum(before * after for before, after in pairwise((_pooled(config), *head, prototypes)))
    student = 2 * whole + local_crops * part + (2 + local_crops) * projection
    return 2 * (3 * student + 2 * whole + 2 * projection)


def _pooled(config: ViTConfig) -> int:
    """Width of the pooled vector."""
    return config.dim * (2 if config.pooling == "cls+mean" else 1)


def _mlp(config: ViTConfig) -> int:
    """Multiply-adds of the MLP for one token."""
    return (3 if config.activation == "swiglu" else 2) * config.dim * (config.hidden_dim or 4 * config.dim)


def _patches(config: ViTConfig, size: tuple[int, int]) -> int:
    side = config.patch_size
    to_patches = {"resize": lambda pixels: max(1, round(pixels / side)), "pad": lambda pixels: -(-pixels // side)}
    count = to_patches.get(config.size_policy, lambda pixels: pixels // side)
    return count(size[0]) * count(size[1])
