"""We can tokenize anything: chop the image into patches, project each patch to a token.

B batch, C channels, P patch size, N patches, D width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit.errors import InputError


class PatchTokenizer(nn.Module):
    """Square patches of an image, each flattened and projected: `(B, C, height, width) -> (B, N, D)`.

    The projection is one Linear on unfolded patches; the weight of the usual convolution with stride P,
    `(D, C, P, P)`, loads into it as `weight.flatten(1)`.

    Args:
        patch_size: P in pixels.
        channels: C.
        dim: D.
        size_policy: for sides that P does not divide: `resize` to the nearest multiple (at least one patch),
            `crop` or `pad` (with 0, the mean colour) at the bottom and right, or `error`.
        bias: whether the projection has a bias.
    """

    def __init__(self, patch_size: int, channels: int, dim: int, size_policy: str = "resize", bias: bool = True):
        super().__init__()
        self.patch_size, self.channels, self.size_policy = patch_size, channels, size_policy
        self.proj = nn.Linear(channels * patch_size**2, dim, bias=bias)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """`images (B, C, height, width)` -> tokens `(B, N, D)` in reading order, and their grid (height, width)."""
        size = self.patch_size
        images = self.fit(images)
        grid = (images.shape[2] // size, images.shape[3] // size)
        patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C, gh, P, gw, P)
        patches_BNP = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.proj(patches_BNP.to(self.proj.weight.dtype)), grid

    def fit(self, images: Tensor) -> Tensor:
        """Apply the size policy: sides come out as multiples of the patch size."""
        if not isinstance(images, Tensor):
            raise InputError(
                f"images must be a tensor, not {type(images).__name__}; `preprocess` makes one of a picture"
            )
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise InputError(f"images must be (B, {self.channels}, height, width), not {tuple(images.shape)}")
        size = self.patch_size
        height, width = images.shape[2:]
        if min(height, width) == 0:
            raise InputError(f"images have no pixels: height {height}, width {width}")
        if height % size == 0 and width % size == 0:
            return images
        if self.size_policy == "resize":
            sides = [max(1, round(side / size)) * size for side in (height, width)]
            return F.interpolate(images.float(), sides, mode="bicubic", antialias=True).to(images.dtype)
        if self.size_policy == "pad":
            return F.pad(images, (0, -width % size, 0, -height % size))
        if self.size_policy == "crop" and min(height, width) >= size:
            return images[:, :, : height - height % size, : width - width % size]
        raise InputError(
            f"patches of {size} px do not divide an image of {height} x {width} px (size policy {self.size_policy!r});"
            f" resize the image or choose the policy 'resize' or 'pad'"
        )
