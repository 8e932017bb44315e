"""The vision transformer: patches and a few named tokens, L blocks, a norm.

B batch, C channels, D width, H heads, L layers, N patches, R registers, S = cls + registers + patches.
"""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.vit import checkpoint, surgery
from regard.vit.blocks import POSITION_STD, Block, initialise
from regard.vit.config import PositionResize, ViTConfig, preset_config
from regard.vit.errors import InputError
from regard.vit.patches import PatchTokenizer
from regard.vit.pooling import Pool
from regard.vit.positions import Rope, resize_table, sincos_table
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained.report import ExportReport, LoadReport
from regard.vit.tokens import Tokens

ROPES_KEPT = 32  # grids whose rope is remembered


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
        self.positions = nn.Parameter(torch.empty(self._position_rows(), dim)) if config.has_table else None
        self.pre_norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        # Where the norm is the pooled vector's, the tokens leave as the last block made them.
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.norm_place == "tokens" else nn.Identity()
        self.pool = Pool(config)
        self.head = nn.Linear(self.pool.width, config.classes) if config.classes else None
        self.report: LoadReport | None = None  # where the weights came from
        self._ropes: dict[tuple[tuple[int, int], torch.device], Rope] = {}
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ViT":
        """A new ViT of a named size (`tiny`, `small`, `base`, `large`, `so400m`, `giant`), random weights.

        Any field of `ViTConfig` can be changed: `ViT.preset("small", patch_size=14, registers=4)`.
        """
        return cls(preset_config(name, **changes))

    @classmethod
    def from_pretrained(
        cls,
        source: "str | Path | nn.Module",
        *,
        classes: int | None = None,
        position_resize: str | PositionResize | None = None,
        image_size: tuple[int, int] | None = None,
        part: str | None = None,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> "ViT":
        """Open any pretrained vision transformer with the numbers its owner gets; `vit.report` tells what was done.

        `source` is a hub name (`facebook/dinov2-small`), a timm name (`vit_small_patch16_224.augreg_in1k`), a file
        (`.safetensors`, `.pth`, `.pt`, `.bin`, `.npz`, a Lightning `.ckpt`), a folder, or a live module of timm,
        transformers or torchvision. The layout is recognised from the tensors.

        Args:
            classes: keep the classifier, which must have so many classes, for `classify`.
            position_resize: resample the position table for other sizes as `timm`, `transformers`, `dinov2` or
                `torchvision` does; default: as the authors of the weights.
            image_size: native (height, width) in pixels, where the position table is of a grid that is not square.
            part: which weights of a checkpoint that holds several, such as `student`; default: the averaged ones.
            dtype: of the weights.
            changes: other fields of `ViTConfig`, such as `heads` or `activation`, which win over what was found.

        Raises InputError for any tensor that is missing, unknown, of another shape or not finite, for a file that
        would run code, and for a name that stands for nothing.
        """
        from regard.vit.pretrained.opening import open_vit

        changes["image_size"] = image_size
        vit = open_vit(source, classes=classes, position_resize=position_resize, part=part, dtype=dtype, **changes)
        assert isinstance(vit, cls)
        return vit

    def as_encoder(self) -> "ViT":
        """The same ViT for others to read its tokens: the final norm on all of them, no classifier, no pooling weights.

        The tensors are shared with this one. What had its norm on the pooled vector alone gives other tokens: normed.
        """
        pooling = "mean" if self.config.pooling == "map" else self.config.pooling
        place = "none" if self.config.norm_place == "none" else "tokens"
        config = dataclasses.replace(self.config, norm_place=place, pooling=pooling, classes=0)  # type: ignore[arg-type]
        with torch.device("meta"):
            encoder = ViT(config)
        own = {name.replace("pool.norm.", "norm."): tensor for name, tensor in self.state_dict(keep_vars=True).items()}
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(own[name].requires_grad)  # assigning would have changed the shared one
        encoder.load_state_dict({name: own[name] for name in encoder.state_dict()}, assign=True)
        encoder.report = self.report
        return encoder.train(self.training)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`: all that the numbers depend on."""
        checkpoint.save(folder, self.config, self)

    def export(
        self, path: str | Path, layout: str, *, image_size: tuple[int, int] | None = None, overwrite: bool = False
    ) -> ExportReport:
        """Write the model as another library opens it by itself, whole or not at all; the report says how to open it.

        `layout` is `timm` or `transformers` (a folder), `torchvision` or `dinov2` (a `.pth`), `onnx` (an `.onnx`) or
        `torch` (a `.pt2` of torch.export); the last two hold the computation itself, for one size and any batch.
        `image_size` (height, width) in pixels resamples the position table beforehand; default: the native size.
        `overwrite` replaces what stands at `path`.

        Raises InputError for a configuration that the target cannot express, naming the setting and who could.
        """
        from regard.vit.pretrained.exports import export

        return export(self, path, layout, image_size, overwrite)

    def with_registers(self, count: int = 4) -> "ViT":
        """A new ViT of the same weights with `count` register tokens (Darcet et al., 2024, arXiv:2309.16588).

        They stand after the class token, without a position, drawn from a truncated normal of 0.02. Every number
        changes at once, for all tokens now also attend to them (the patches of a DINOv2-S by a tenth); they take up
        the artifacts of the maps only once the model is trained further. All else is kept; this ViT stays as it is.

        Raises InputError for a model that has registers, and for a count below 1.
        """
        return surgery.with_registers(self, count)

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
    def dtype(self) -> torch.dtype:
        """What the residual stream is computed in: the dtype of the weights."""
        return self.tokenizer.proj.weight.dtype

    @property
    def preprocess(self) -> Preprocess:
        """Turns a picture into the tensor this model expects."""
        return self.config.preprocess

    def forward(self, images: Tensor, masked: tuple[Tensor, Tensor] | None = None) -> Tokens:
        """`images (B, C, height, width)`, preprocessed, to the last layer's tokens, normed as `norm_place` says.

        `masked` are bool `(B, N)` and a token `(D,)` that stands for the patches where it is True.
        Raises InputError for a wrong number of channels, or a size that the size policy `error` refuses.
        """
        x, grid = self.embed(images, masked)
        rotary = self.rotary(grid, x.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.name(self.norm(x), grid)

    def classify(self, images: Tensor) -> Tensor:
        """Logits `(B, classes)` of preprocessed images. Raises InputError for a model without a classifier."""
        if self.head is None:
            raise InputError("this ViT has no classifier; open it with classes=, or build it with ViTConfig.classes")
        return self.head(self.pool(self(images)))

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

    def embed(self, images: Tensor, masked: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Patches, class token and registers with their positions, `(B, S, D)`, and the grid."""
        patches, grid = self.tokenizer(images)
        if masked is not None:
            patches = torch.where(masked[0][..., None], masked[1].to(patches.dtype), patches)
        prefix = [t for t in (self.cls if self.cls is None else self.cls[None], self.registers) if t is not None]
        special = torch.cat(prefix) if prefix else patches.new_zeros(0, patches.shape[2])
        at_special, at_patches = self._position_tables(grid, patches.device)
        if at_special is not None:
            special = torch.cat((special[: len(at_special)] + at_special, special[len(at_special) :]))
        # The residual stream has the dtype of the weights, whatever autocast makes of the linear layers.
        patches, special = patches.to(self.dtype), special.to(self.dtype)
        if at_patches is not None:
            patches = patches + at_patches.to(patches.dtype)
        lead = self._leading
        special = special.expand(patches.shape[0], -1, -1)
        return self.pre_norm(torch.cat((special[:, :lead], patches, special[:, lead:]), dim=1)), grid

    def rotary(self, grid: tuple[int, int], device: torch.device) -> Rope | None:
        """The rope for this grid, or None where positions are of another kind."""
        config, lead = self.config, self._leading
        if not config.has_rope:
            return None
        after = config.class_token + config.registers - lead
        if torch.compiler.is_compiling():  # a compiled graph computes it inline, for any grid
            return Rope(grid, config.width_of_head, config.rope, lead, after, device)
        known = self._ropes.get((grid, device))
        if known is None:
            if len(self._ropes) >= ROPES_KEPT:
                self._ropes.clear()
            with torch.inference_mode(False), torch.no_grad():  # the next one to use it may be a training step
                known = self._ropes[grid, device] = Rope(grid, config.width_of_head, config.rope, lead, after, device)
        return known

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
