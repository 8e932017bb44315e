"""`ViTConfig`, all that a ViT's numbers depend on besides its weights, and the presets by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.vit.errors import InputError, check_choices
from regard.vit.preprocess import Preprocess, check_size
from regard.vit.values import LATER, changed

Positions = Literal["learned", "sincos", "rope", "learned+rope", "none"]
PositionRows = Literal["patches", "cls+patches", "cls+registers+patches"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
Pooling = Literal["cls", "mean", "cls+mean", "map"]
SizePolicy = Literal["resize", "crop", "pad", "error"]
RegistersPlace = Literal["after_cls", "end"]
PositionMode = Literal["bicubic", "bilinear"]
NormPlace = Literal["tokens", "pooled", "none"]
RopeCoordinates = Literal["centred", "index"]


@dataclass(frozen=True)
class PositionResize:
    """How a learned position table is resampled to another grid.

    `offset` is DINO's: the scale factor is (new + offset) / old instead of the plain ratio of sizes.
    `align_corners` lets the corner patches keep their place, as torchvision and big_vision do.
    """

    mode: PositionMode = "bicubic"
    antialias: bool = True
    offset: float = 0.0
    align_corners: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "mode")
        if self.align_corners and (self.antialias or self.offset):
            raise InputError("PositionResize.align_corners goes with neither antialias nor offset")


@dataclass(frozen=True)
class RopeRecipe:
    """What rotary positions turn by: per axis, coordinate / period, for K/4 periods.

    Attributes:
        coordinates: `centred` are patch centres in [-1, 1] per axis, in turns of 2 pi (DINOv3, arXiv:2508.10104);
            `index` are patch numbers from 0 (EVA-02, arXiv:2303.11331).
        base: periods run geometrically from 1 towards it.
        reference: with `index`, the (height, width) of the grid whose numbers any other grid is stretched to;
            None for the patch numbers themselves.
        periods: the K/4 periods as a checkpoint states them, where they are not what `base` gives exactly.
    """

    coordinates: RopeCoordinates = "centred"
    base: float = 100.0
    reference: tuple[int, int] | None = None
    periods: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_choices(self, "coordinates")
        if not self.base > 0 or not all(period > 0 for period in self.periods or ()):
            raise InputError(f"RopeRecipe.base {self.base} and every one of periods {self.periods} must be above 0")
        if self.reference is not None:
            check_size("RopeRecipe.reference", self.reference)
            if self.coordinates == "centred":
                raise InputError("RopeRecipe.reference goes with coordinates 'index'; centred ones need none")


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer (Dosovitskiy et al., 2021, arXiv:2010.11929), with registers (Darcet et al., 2024).

    Attributes:
        image_size: native (height, width) in pixels; any other size works too.
        patch_size: side of a square patch in pixels.
        channels: colour channels of the input.
        dim: width D of a token.
        depth: number of blocks L.
        heads: attention heads H.
        head_dim: width K of a head; None means dim // heads.
        hidden_dim: inner width of the MLP; None means 4 * dim.
        class_token: whether a class token leads the sequence.
        registers: number of blank register tokens R.
        registers_place: `after_cls` (before the patches) or `end`.
        positions: `learned` table, fixed `sincos`, `rope` on queries and keys, `learned+rope`, or `none`.
        position_rows: which tokens a learned table has rows for.
        position_resize: how a learned table is resampled to another grid.
        rope: what rotary positions turn by.
        activation: `gelu`, `gelu_tanh`, `quick_gelu`, or the gated `swiglu`.
        norm_eps: eps of every LayerNorm.
        qkv_bias: biases on the query, key and value projections.
        key_bias: False leaves the key projection alone without one.
        qk_norm: LayerNorm on each head's queries and keys.
        attn_norm: LayerNorm on the joined heads before their output projection (sub-LN).
        mlp_norm: LayerNorm on the MLP's inner layer (sub-LN).
        sink: a learned logit per head that takes part in the softmax and hands over nothing (gpt-oss, 2025).
        layer_scale: initial LayerScale (Touvron et al., 2021), None for none.
        drop_path: stochastic depth rate of the last block; earlier blocks get less, linearly.
        pre_norm: a LayerNorm before the first block, as CLIP has; the patch projection then has no bias.
        norm_place: whether the final LayerNorm is on all `tokens` or only on what is `pooled`; or there is `none`.
        pooling: `cls`, `mean` of patches, `cls+mean` side by side, or `map` (a learned query asks the patches).
        classes: outputs of a linear classifier on the pooled vector; 0 for none.
        size_policy: what to do with sizes that the patch does not divide: `resize` to the nearest multiple,
            `crop` or `pad` bottom and right, or `error`.
        preprocess: how an image becomes the tensor this model expects.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16
    channels: int = 3
    dim: int = 384
    depth: int = 12
    heads: int = 6
    head_dim: int | None = None
    hidden_dim: int | None = None
    class_token: bool = True
    registers: int = 0
    registers_place: RegistersPlace = "after_cls"
    positions: Positions = "learned"
    position_rows: PositionRows = "patches"
    position_resize: PositionResize = PositionResize()
    rope: RopeRecipe = RopeRecipe()
    activation: Activation = "gelu"
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: bool = False
    attn_norm: bool = False
    mlp_norm: bool = False
    sink: bool = field(default=False, metadata=LATER)
    layer_scale: float | None = None
    drop_path: float = 0.0
    pre_norm: bool = False
    norm_place: NormPlace = "tokens"
    pooling: Pooling = "cls"
    classes: int = 0
    size_policy: SizePolicy = "resize"
    preprocess: Preprocess = field(default_factory=Preprocess)

    def __post_init__(self) -> None:
        check_choices(self, "positions", "position_rows", "registers_place", "activation")
        check_choices(self, "norm_place", "pooling", "size_policy")
        for name in ("patch_size", "channels", "dim", "depth", "heads", "head_dim", "hidden_dim"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"ViTConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("norm_eps", "registers", "classes"):
            if not getattr(self, name) >= 0:
                raise InputError(f"ViTConfig.{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0.0 <= self.drop_path < 1.0:
            raise InputError(f"ViTConfig.drop_path is {self.drop_path}; it must lie in [0, 1)")
        if self.head_dim is None and self.dim % self.heads:
            raise InputError(f"ViTConfig.dim {self.dim} is no multiple of heads {self.heads}; set head_dim")
        check_size("ViTConfig.image_size", self.image_size)
        if min(self.image_size) < self.patch_size:
            raise InputError(f"ViTConfig.image_size {self.image_size} is smaller than patch_size {self.patch_size}")
        if "cls" in self.pooling and not self.class_token:
            raise InputError(f"ViTConfig.pooling {self.pooling!r} needs class_token=True; use 'mean' or 'map'")
        if self.positions == "sincos" and self.dim % 4:
            raise InputError(f"ViTConfig.dim {self.dim} must be a multiple of 4 for sincos positions")
        if self.has_rope and self.width_of_head % 4:
            raise InputError(f"head width {self.width_of_head} must be a multiple of 4 for rope positions")
        if self.has_rope and self.rope.periods and len(self.rope.periods) != self.width_of_head // 4:
            raise InputError(
                f"ViTConfig.rope has {len(self.rope.periods)} periods; heads of {self.width_of_head} need a quarter"
            )
        if self.norm_place == "pooled" and self.pooling not in ("cls", "mean"):
            raise InputError(f"ViTConfig.norm_place 'pooled' goes with pooling 'cls' or 'mean', not {self.pooling!r}")

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def has_table(self) -> bool:
        return self.positions in ("learned", "learned+rope")

    @property
    def has_rope(self) -> bool:
        return self.positions in ("rope", "learned+rope")

    @property
    def grid(self) -> tuple[int, int]:
        """Native (grid height, grid width) in patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size


# width, depth, heads, MLP width: ViT-Ti/S/B/L as in DeiT and the ViT paper, so400m (Alabdulmohsin et al., 2023,
# arXiv:2305.13035), g as in DINOv2.
_SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(dim=192, depth=12, heads=3, hidden_dim=768),
    "small": dict(dim=384, depth=12, heads=6, hidden_dim=1536),
    "base": dict(dim=768, depth=12, heads=12, hidden_dim=3072),
    "large": dict(dim=1024, depth=24, heads=16, hidden_dim=4096),
    "so400m": dict(dim=1152, depth=27, heads=16, hidden_dim=4304),
    "giant": dict(dim=1536, depth=40, heads=24, hidden_dim=6144),
}
PRESETS = tuple(_SIZES)
PATCH_SIZES = (8, 14, 16, 32)


def preset_config(name: str, **changes: Any) -> ViTConfig:
    """The configuration of a size by name (`tiny` … `giant`), with any `ViTConfig` field changed.

    Another `dim` brings its own `hidden_dim`, 4 * dim, unless that is stated too.
    A patch size of 14 brings a native size of 224 px as 8, 16 and 32 do. Raises InputError for an unknown name
    or field.
    """
    if name not in _SIZES:
        raise InputError(f"no ViT preset is called {name!r}; choose one of {', '.join(PRESETS)}")
    own: dict[str, Any] = {"hidden_dim": None} if "dim" in changes else {}
    return changed_vit(ViTConfig(), {**_SIZES[name], **own, **changes})


def changed_vit(config: ViTConfig, changes: Mapping[str, Any]) -> ViTConfig:
    """`config` with some fields changed. Another `image_size` is preprocessed to, unless `preprocess` states a size.

    Raises InputError for an unknown field or a value of the wrong kind.
    """
    config = changed(config, changes)
    preprocess = changes.get("preprocess", {})
    if "image_size" in changes and isinstance(preprocess, Mapping) and "size" not in preprocess:
        config = changed(config, {"preprocess": {"size": config.image_size}})
    return config
