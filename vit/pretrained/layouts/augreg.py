"""`.npz` files of Google's vision transformers: ViT, AugReg (Steiner et al., 2021, arXiv:2106.10270), big_vision.

JAX counts the parts of a block in one of two ways, keeps heads as an axis of their own and multiplies from the left;
some files stack all blocks along a first axis. Its GELU is the tanh form, which timm and transformers replace.
"""

from collections import Counter
from typing import Any

from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors
from regard.vit.pretrained.layout import Layout, Unused
from regard.vit.pretrained.rules import ROWS, TOKEN, Rule, Shape
from regard.vit.pretrained.source import Source, pattern_of, square_side

# As scipy.ndimage.zoom of order 1 does: corners keep their place.
RESIZE = PositionResize("bilinear", antialias=False, align_corners=True)
_ENCODER = "Transformer/encoderblock"
_TABLES = ("pos_embedding", "Transformer/posembed_input/pos_embedding")

# (P, P, C, D), (D, H, K), (H, K, D) and (in, out), as Linear layers have them.
PATCHES = Shape(
    lambda t, c: t.permute(3, 2, 0, 1).flatten(1) if t.dim() == 4 else t,
    lambda t, c: t.unflatten(1, (c.channels, c.patch_size, c.patch_size)).permute(2, 3, 1, 0),
)
TO_HEADS = Shape(
    lambda t, c: t.flatten(1).T if t.dim() == 3 else t,
    lambda t, c: t.T.unflatten(1, (c.heads, c.width_of_head)),
)
HEADS = Shape(lambda t, c: t.flatten(), lambda t, c: t.unflatten(0, (c.heads, c.width_of_head)))
FROM_HEADS = Shape(
    lambda t, c: t.flatten(0, 1).T if t.dim() == 3 else t,
    lambda t, c: t.T.unflatten(0, (c.heads, c.width_of_head)),
)
DENSE = Shape(lambda t, c: t.T if t.dim() == 2 else t, lambda t, c: t.T)


def _norm(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/scale", f"{ours}.weight"), Rule(f"{theirs}/bias", f"{ours}.bias")]


def _dense(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/kernel", f"{ours}.weight", DENSE), Rule(f"{theirs}/bias", f"{ours}.bias")]


def _attention(theirs: str, ours: str) -> list[Rule]:
    rules = [
        Rule(f"{theirs}/out/kernel", f"{ours}.out.weight", FROM_HEADS),
        Rule(f"{theirs}/out/bias", f"{ours}.out.bias"),
    ]
    for part in ("query", "key", "value"):
        to = f"{ours}.to_{part[0]}"
        rules += [
            Rule(f"{theirs}/{part}/kernel", f"{to}.weight", TO_HEADS),
            Rule(f"{theirs}/{part}/bias", f"{to}.bias", HEADS),
        ]
    return rules


def _block(theirs: str, attention: int, norm: int, mlp: int) -> list[Rule]:
    return [
        *_norm(f"{theirs}/LayerNorm_0", "blocks.#.norm1"),
        *_attention(f"{theirs}/MultiHeadDotProductAttention_{attention}", "blocks.#.attn"),
        *_norm(f"{theirs}/LayerNorm_{norm}", "blocks.#.norm2"),
        *_dense(f"{theirs}/MlpBlock_{mlp}/Dense_0", "blocks.#.mlp.fc1"),
        *_dense(f"{theirs}/MlpBlock_{mlp}/Dense_1", "blocks.#.mlp.fc2"),
    ]


# In the older way parts of all kinds are counted together, in the newer one each kind for itself.
_OLD, _NEW = _block(f"{_ENCODER}_#", 1, 2, 3), _block(f"{_ENCODER}_#", 0, 1, 0)
RULES = (
    Rule("embedding/kernel", "tokenizer.proj.weight", PATCHES),
    Rule("embedding/bias", "tokenizer.proj.bias"),
    Rule("cls", "cls", TOKEN),
    *(Rule(table, "positions", ROWS) for table in reversed(_TABLES)),
    *_OLD,
    *_NEW,
    *_norm("Transformer/encoder_norm", "norm"),
    Rule("MAPHead_0/probe", "pool.asker.latent", TOKEN),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0", "pool.asker.attn"),
    *_norm("MAPHead_0/LayerNorm_0", "pool.asker.norm"),
    *_dense("MAPHead_0/MlpBlock_0/Dense_0", "pool.asker.mlp.fc1"),
    *_dense("MAPHead_0/MlpBlock_0/Dense_1", "pool.asker.mlp.fc2"),
)


def _recognises(source: Source) -> bool:
    return source.has(f"{_ENCODER}_#/**", f"{_ENCODER}/**")


def _prepare(source: Source) -> Source:
    """Unstack blocks that lie along a first axis."""
    stacked = {name: t for name, t in source.tensors.items() if name.startswith(f"{_ENCODER}/")}
    if not stacked:
        return source
    depths = Counter(len(tensor) if tensor.dim() else 0 for tensor in stacked.values())
    depth = depths.most_common(1)[0][0]
    tensors = {name: t for name, t in source.tensors.items() if name not in stacked}
    for name, tensor in stacked.items():
        if tensor.dim() == 0 or len(tensor) != depth:
            raise InputError(
                f"{source.where}: {source.own_name(name)} has shape {tuple(tensor.shape)}; one row per block was"
                f" expected, {depth} as the others have"
            )
        for block, part in enumerate(tensor):
            own = source.own_name(name)
            single = name.replace(f"{_ENCODER}/", f"{_ENCODER}_{block}/", 1)
            tensors[single], source.own[single] = part, own
    # What is missing has no name in the file; it is told of in the file's own way of counting, and stacked too.
    is_new = any("/MultiHeadDotProductAttention_0/" in name for name in stacked)
    for old, new in zip(_OLD, _NEW, strict=True):
        stack = source.prefix + (new if is_new else old).theirs.replace("_#/", "/", 1)
        for block in range(depth):
            for rule in (old, new):
                source.own.setdefault(rule.theirs.replace("#", str(block), 1), stack)
    source.unwrapped.append(f"{depth} blocks along the first axis")
    return source.with_tensors(tensors)


def _describe(source: Source) -> dict[str, Any]:
    kernel = source.shape("embedding/kernel", 4)
    patch_size, channels = kernel[0], kernel[2]
    dim = _most(source, 0, "Transformer/encoder_norm/**", f"{_ENCODER}_#/LayerNorm_#/**")
    heads, head_dim = _heads(source)
    has_cls, has_map = "cls" in source.tensors, source.has("MAPHead_0/**")
    table = next((name for name in _TABLES if name in source.tensors), None)
    if table is None:
        raise InputError(
            f"{source.where}: tensor {source.own_name(_TABLES[1])!r} is missing; Regard does not build big_vision's"
            " models with fixed positions (posemb='sincos2d')"
        )
    rows, size = _table(source, source.shape(table, 3)[1], has_cls, patch_size)
    if source.has("pre_logits/**") and source.changes.get("classes"):
        raise InputError(
            f"{source.where}: its classifier stands behind {source.own_name('pre_logits/kernel')}, which no classifier"
            " of Regard does; open it without classes="
        )
    default = Preprocess(size, "squash", 1.0, "bilinear", processors.HALF, processors.HALF)
    why = "as in JAX; timm and transformers run these weights with 'gelu'"
    return dict(
        image_size=size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=source.depth(f"{_ENCODER}_#/"),
        heads=source.fact("heads", heads),
        head_dim=None if heads * head_dim == dim else head_dim,
        hidden_dim=_most(source, 0, f"{_ENCODER}_#/MlpBlock_#/Dense_0/bias", f"{_ENCODER}_#/MlpBlock_#/Dense_1/kernel"),
        class_token=has_cls,
        position_rows=rows,
        position_resize=RESIZE,
        activation=source.assume("activation", "gelu_tanh", why),
        norm_eps=source.fact("norm_eps", 1e-6),
        pooling="map" if has_map else "cls" if has_cls else "mean",
        preprocess=processors.timm(source, default),
    )


def _most(source: Source, axis: int, *patterns: str) -> int:
    """The length that most tensors of these names have, so that a wrong one is told of by its own name."""
    return _commonest(source, patterns, lambda t: int(t.shape[axis]) if t.dim() > axis else 0)


def _heads(source: Source) -> tuple[int, int]:
    """Number and width of the heads, which the kernels keep apart."""
    kernels = (f"{_ENCODER}_#/MultiHeadDotProductAttention_#/{part}/kernel" for part in ("query", "key", "value"))
    return _commonest(source, tuple(kernels), lambda t: (t.shape[1], t.shape[2]) if t.dim() == 3 else (0, 0))


def _commonest(source: Source, patterns: tuple[str, ...], read: Any) -> Any:
    regexes = [pattern_of(pattern) for pattern in patterns]
    found = Counter(
        read(tensor) for name, tensor in source.tensors.items() if any(regex.fullmatch(name) for regex in regexes)
    )
    if not found:
        raise InputError(f"{source.where}: no tensor {source.prefix}{patterns[0].replace('**', '...')} is there")
    return found.most_common(1)[0][0]


def _table(source: Source, rows: int, has_cls: bool, patch_size: int) -> tuple[str, tuple[int, int]]:
    """Whether the class token has a row, as in all but big_vision's files, and the native size."""
    if not has_cls:
        lost = square_side(rows - 1) and source.size_of(rows, patch_size) is None
        if lost and "class_token" not in source.changes:
            name = source.own_name("cls")
            raise InputError(f"{source.where}: tensor {name!r} is missing; the position table has its row")
        return "patches", source.image_size(rows, patch_size)
    stated = source.size_of(rows - 1, patch_size) is not None
    if source.size_of(rows, patch_size) is not None or (square_side(rows) and not stated):
        return "patches", source.image_size(rows, patch_size)
    return "cls+patches", source.image_size(rows - 1, patch_size)


def resize(name: str, config: ViTConfig) -> PositionResize | None:
    return {
        "augreg": RESIZE,
        "timm": PositionResize(),
        "transformers": PositionResize("bicubic", antialias=False),
    }.get(name)


LAYOUT = Layout(
    name="augreg",
    owner="big_vision",
    anchor="embedding/kernel",
    recognises=_recognises,
    describe=_describe,
    rules=RULES,
    prepare=_prepare,
    unused=(Unused("pre_logits/**", "layer before the classifier"),),
    classifiers=tuple(_dense("head", "head")),
    resize=resize,
)
