"""torchvision's `VisionTransformer`: `vit_b_16`, `vit_l_16`, `vit_h_14`, ..., with the MLP's older names too."""

from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import CONV, ROWS, TOKEN, Rule
from regard.vit.pretrained.source import Source

# torchvision takes one size per model; this is how its `interpolate_embeddings` makes a model for another.
RESIZE = PositionResize("bicubic", antialias=False, align_corners=True)

_BLOCK = "encoder.layers.encoder_layer_#."
_NAMES = (
    ("ln_1.*", "norm1.*"),
    ("self_attention.in_proj_*", "attn.to_{q,k,v}.*"),
    ("self_attention.out_proj.*", "attn.out.*"),
    ("ln_2.*", "norm2.*"),
    ("mlp.0.*", "mlp.fc1.*"),
    ("mlp.3.*", "mlp.fc2.*"),
    ("mlp.linear_1.*", "mlp.fc1.*"),  # before torchvision 0.14
    ("mlp.linear_2.*", "mlp.fc2.*"),
)
RULES = (
    Rule("conv_proj.weight", "tokenizer.proj.weight", CONV),
    Rule("conv_proj.bias", "tokenizer.proj.bias"),
    Rule("class_token", "cls", TOKEN),
    Rule("encoder.pos_embedding", "positions", ROWS),
    *(Rule(_BLOCK + theirs, f"blocks.#.{ours}") for theirs, ours in _NAMES),
    Rule("encoder.ln.*", "norm.*"),
)


def _describe(source: Source) -> dict[str, Any]:
    dim, channels, patch_size, _ = source.shape("conv_proj.weight", 4)
    size = source.image_size(source.shape("encoder.pos_embedding", 3)[1] - 1, patch_size)
    if source.fact("classes") and source.has("heads.pre_logits.*"):
        raise InputError(
            f"{source.where}: its classifier has a hidden layer, {source.own_name('heads.pre_logits')}, which Regard's"
            " ViT has not; open it without classes="
        )
    depth, inner = source.depth(_BLOCK), "linear_1" if source.has(_BLOCK + "mlp.linear_**") else "0"
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=depth,
        heads=source.heads(dim),
        hidden_dim=source.shape(f"{_BLOCK.replace('#', '0')}mlp.{inner}.weight", 2)[0],
        position_rows="cls+patches",
        position_resize=RESIZE,
        norm_eps=source.fact("norm_eps", 1e-6),
        preprocess=_preprocess(size, patch_size, depth),
    )


def _preprocess(size: tuple[int, int], patch_size: int, depth: int) -> Preprocess:
    """What the published weights of each architecture state; those of SWAG, which 224 px do not tell, are bicubic."""
    if size != (224, 224) or patch_size == 14:
        return Preprocess(size, "crop", 1.0, "bicubic")
    return Preprocess(size, "crop", 224 / (242 if depth == 24 and patch_size == 16 else 256), "bilinear")


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {"torchvision": RESIZE, "timm": PositionResize("bicubic", antialias=True)}.get(name)


LAYOUT = Layout(
    name="torchvision",
    owner="torchvision",
    anchor="conv_proj.weight",
    recognises=lambda source: source.has(_BLOCK + "ln_1.*", _BLOCK + "ln_2.*", _BLOCK + "self_attention.**"),
    describe=_describe,
    rules=RULES,
    unused=(Unused("heads.pre_logits.*", "hidden layer of the classifier"),),
    classifiers=(Rule("heads.head.*", "head.*"),),
    resize=resize,
)
