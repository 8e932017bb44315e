"""The vision transformer: patches and a few named tokens, L blocks, a norm.

B batch, C channels, D width, H heads, L layers, N patches, R registers, S = cls + registers + patches.
"""

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.vit import checkpoint
from regard.vit.blocks import POSITION_STD, Block, initialise
from regard.vit.config import ViTConfig, preset_config
from regard.vit.errors import InputError
from regard.vit.patches import PatchTokenizer
from regard.vit.pooling import Pool
from regard.vit.positions import Rope, resize_table, sincos_table
from regard.vit.preprocess import Preprocess
from regard.vit.tokens import Tokens


class ViT(nn.Module):
    """A vision transformer for images of any size: `(B, C, height, width) -> Tokens`."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        self.tokenizer = PatchTokenizer(
            config.patch_size, config.channels, dim, config.size_policy, not config.pre_norm
        )
        self.cls = nn.Parameter(torch.empty(dim)) if config.class_token else None
        self.registers = nn.Parameter(torch.empty(config.registers, dim)) if config.registers else None
        self.positions = (
            nn.Parameter(torch.empty(self._position_rows(), dim)) if config.positions == "learned" else None
        )
        self.pre_norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.pool = Pool(config)
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ViT":
        """A new ViT of a named size (`tiny`, `small`, `base`, `large`, `so400m`, `giant`), random weights.

        Any field of `ViTConfig` can be changed: `ViT.preset("small", patch_size=14, registers=4)`.
        """
        return cls(preset_config(name, **changes))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "ViT":
        """Open a folder, or a hub repository, written by `save_pretrained`.

        Raises InputError for anything missing, unused, renamed, of another shape, or pickled.
        """
        return checkpoint.load(checkpoint.find(source), ViTConfig, cls)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`: all that the numbers depend on."""
        checkpoint.save(folder, self.config, self)

    def reset_parameters(self) -> None:
        """Initialise every weight: Xavier for Linear, 0 for biases, 1 for norms, normal for tokens and positions."""
        initialise(self)
        latent = None if self.pool.asker is None else self.pool.asker.latent
        for table in (self.cls, self.registers, latent):
            if table is not None:
                nn.init.trunc_normal_(table, std=0.02)
        if self.positions is not None:
            nn.init.trunc_normal_(self.positions, std=POSITION_STD)

    @property
    def preprocess(self) -> Preprocess:
        """Turns a picture into the tensor this model expects."""
        return self.config.preprocess

    def forward(self, images: Tensor) -> Tokens:
        """`images (B, C, height, width)`, preprocessed, to the normed tokens of the last layer.

        Raises InputError for a wrong number of channels, or a size that the size policy `error` refuses.
        """
        x, grid = self.embed(images)
        rotary = self.rotary(grid, x.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.name(self.norm(x), grid)

    def intermediates(
        self, images: Tensor, layers: int | Sequence[int] | Literal["all"], *, norm: bool = False
    ) -> list[Tokens]:
        """Tokens after the named layers; 0 is the first, -1 the last, `"all"` every one, in the order asked for.

        `norm=True` passes each through the final norm, so that the last one equals what `forward` returns.
        Raises InputError for a layer that does not exist.
        """
        wanted = self.layer_numbers(layers)
        kept: dict[int, Tokens] = {}
        for layer, (x, grid) in enumerate(self.layers(images), start=-1):
            if layer in wanted:
                kept[layer] = self.name(self.norm(x) if norm else x, grid)
        return [kept[layer] for layer in wanted]

    def layers(self, images: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """The residual stream as it passes: before the first block, then after each, `(B, S, D)` and the grid."""
        x, grid = self.embed(images)
        rotary = self.rotary(grid, x.device)
        yield x, grid
        for block in self.blocks:
            x = block(x, rotary)
            yield x, grid

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Patches, class token and registers with their positions, `(B, S, D)`, and the grid."""
        patches, grid = self.tokenizer(images)
        prefix = [t for t in (self.cls if self.cls is None else self.cls[None], self.registers) if t is not None]
        special = torch.cat(prefix) if prefix else patches.new_zeros(0, patches.shape[2])
        at_special, at_patches = self._position_tables(grid, patches.device)
        if at_special is not None:
            special = torch.cat((special[: len(at_special)] + at_special, special[len(at_special) :]))
        # The residual stream has the dtype of the weights, whatever autocast makes of the linear layers.
        patches, special = patches.to(self.norm.weight.dtype), special.to(self.norm.weight.dtype)
        if at_patches is not None:
            patches = patches + at_patches.to(patches.dtype)
        lead = self._leading
        special = special.expand(patches.shape[0], -1, -1)
        return self.pre_norm(torch.cat((special[:, :lead], patches, special[:, lead:]), dim=1)), grid

    def rotary(self, grid: tuple[int, int], device: torch.device) -> Rope | None:
        """The rope for this grid, or None where positions are of another kind."""
        if self.config.positions != "rope":
            return None
        config, lead = self.config, self._leading
        after = config.class_token + config.registers - lead
        return Rope(grid, config.width_of_head, config.rope_base, lead, after, device)

    def name(self, x: Tensor, grid: tuple[int, int]) -> Tokens:
        """Split a sequence `(B, S, D)` into its named tokens."""
        lead, count = self._leading, grid[0] * grid[1]
        special = torch.cat((x[:, :lead], x[:, lead + count :]), dim=1)
        has_cls = int(self.config.class_token)
        return Tokens(special[:, 0] if has_cls else None, special[:, has_cls:], x[:, lead : lead + count], grid)

    def layer_numbers(self, layers: int | Sequence[int] | Literal["all"]) -> list[int]:
        """Layer numbers counted from 0. Raises InputError for one that does not exist."""
        depth = self.config.depth
        if layers == "all":
            return list(range(depth))
        try:
            asked: Sequence[Any] = layers if isinstance(layers, Sequence) else [layers]
            wanted = [operator.index(layer) for layer in asked]
        except TypeError as error:
            raise InputError(f"layers {layers!r} is neither a number, a list of numbers, nor 'all'") from error
        for layer in wanted:
            if not -depth <= layer < depth:
                raise InputError(
                    f"layer {layer} does not exist: this ViT has {depth}, 0 to {depth - 1} or -{depth} to -1"
                )
        return [layer % depth for layer in wanted]

    @property
    def _leading(self) -> int:
        """How many special tokens stand before the patches."""
        config = self.config
        return config.class_token + (config.registers if config.registers_place == "after_cls" else 0)

    def _position_rows(self) -> int:
        """Rows of the learned table that belong to special tokens, then one per patch of the native grid."""
        grid = self.config.grid
        return self._special_rows() + grid[0] * grid[1]

    def _special_rows(self) -> int:
        has_cls = int(self.config.class_token)
        return {"patches": 0, "cls+patches": has_cls}.get(self.config.position_rows, has_cls + self.config.registers)

    def _position_tables(self, grid: tuple[int, int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.positions is not None:
            special = self._special_rows()
            table = resize_table(self.positions[special:], self.config.grid, grid, self.config.position_resize)
            return (self.positions[:special] if special else None), table
        if self.config.positions == "sincos":
            return None, sincos_table(grid, self.config.grid, self.config.dim, device)
        return None, None
