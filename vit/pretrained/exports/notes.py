"""What a report says of a target: where numbers differ there, and what its format does not hold."""

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.pretrained.exports.tensors import native


def resize(config: ViTConfig, theirs: PositionResize, library: str) -> list[str]:
    """A word where their positions at other sizes are resampled in another way."""
    if not config.has_table or config.position_resize == theirs:
        return []
    height, width = native(config)
    return [
        f"{library} resamples positions by another recipe ({_recipe(theirs)}; here {_recipe(config.position_resize)}):"
        f" the numbers are the same at {height} x {width} px and differ at other sizes"
    ]


def pool(config: ViTConfig, kinds: tuple[str, ...], instead: str) -> list[str]:
    """A word where the model pools in a way that the target does not."""
    return [] if config.pooling in kinds else [f"this model pools by {config.pooling!r}; {instead} there"]


def scales(config: ViTConfig, always: bool) -> list[str]:
    """A word where the target has layer scales in any case."""
    return ["layer scales of 1 were added, which change no number"] if always and config.layer_scale is None else []


def preprocess(config: ViTConfig) -> str:
    """What a file that holds tensors alone does not say of the pictures."""
    pre = config.preprocess
    size = "their own size" if pre.size is None else f"{pre.size[0]} x {pre.size[1]} px by {pre.fit}"
    share = f", {pre.crop_ratio:.4g} of each side" if pre.crop_ratio != 1 else ""
    return f"pictures are brought to {size}{share}, {pre.interpolation}, mean {list(pre.mean)}, std {list(pre.std)}"


def _recipe(recipe: PositionResize) -> str:
    offset = f", offset {recipe.offset}" if recipe.offset else ""
    corners = ", corners aligned" if recipe.align_corners else ""
    return f"{recipe.mode}{', antialiased' if recipe.antialias else ''}{offset}{corners}"
