"""What BLIP's tensors, its `config.json` and the behaviour that was asked for make of an `ImageQAConfig`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.crossattn.config import ImageQAConfig
from regard.crossattn.decoder import DecoderConfig
from regard.crossattn.pretrained import blip_names as names
from regard.crossattn.text import TextConfig
from regard.crossattn.tokenizer import ANSWER, LAST, TextTokenizer
from regard.vit.config import PositionResize, ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess
from regard.vit.pretrained import processors, settings
from regard.vit.pretrained.source import Source, pair

HEAD_WIDTH = 64  # of every published BLIP
RESIZE = PositionResize("bicubic", antialias=False)
# The sizes in pixels that the published weights are run at, by the authors and by transformers.
ORIGINAL_SIZE, TRANSFORMERS_SIZE = (480, 480), (384, 384)
# The weights were trained with the first; the second is what transformers' class has unless it is told.
TRAINED_EPS, CLASS_EPS, TEXT_EPS = 1e-6, 1e-5, 1e-12
DROPOUT = 0.1  # the authors', and their drop path; transformers trains without
_KINDS: dict[str, Any] = {"layer_norm_eps": (int, float), "hidden_act": str}


def config_of(
    source: Source,
    tokenizer: TextTokenizer,
    tied: bool,
    *,
    original: bool,
    image_size: int | tuple[int, int] | None,
    head: Any,
    answers: Sequence[str],
) -> ImageQAConfig:
    """The configuration of a BLIP. Raises InputError for what its tensors or its `config.json` cannot mean."""
    try:
        text, writer = (_text(source, side, original) for side in (names.QUESTION, names.ANSWER))
        first, last = _ends(source, tokenizer)
        # Ours count what is written after the first token. The authors ask for lengths of 1 to 10, the first token
        # counted; transformers' default is 20 after it, or 19 before its version 5.
        searched: dict[str, Any] = dict(beams=3, max_tokens=9) if original else dict(beams=1, max_tokens=20)
        searched["min_tokens"] = 0
        searched["max_tokens"] = min(searched["max_tokens"], writer.max_tokens)
        return ImageQAConfig(
            vit=_image(source, original, image_size),
            text=text,
            answers=tuple(answers),
            head=head,
            decoder=DecoderConfig(writer, first, last, tied, reads_padding=not original, **searched),
        )
    except InputError as error:
        message = str(error)
        raise error if message.startswith(source.where) else InputError(f"{source.where}: {message}") from error


def _image(source: Source, original: bool, image_size: int | tuple[int, int] | None) -> ViTConfig:
    said = _part(source, "vision_config")
    patches = names.image_name(source, "tokenizer.proj.weight")
    width, channels, patch_size, _ = source.shape(patches, 4)
    dim, block = _stated(source, said, "hidden_size") or width, names.image_block(source)
    native = source.image_size(source.shape(names.image_name(source, "positions"), 3)[1] - 1, patch_size)
    eps = float(_stated(source, said, "layer_norm_eps") or CLASS_EPS)
    if original and eps == CLASS_EPS:
        eps = TRAINED_EPS
    return ViTConfig(
        image_size=native,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=_depth(source, said, block),
        heads=_heads(source, said, patches, dim),
        hidden_dim=_inner(source, said, block.replace("#", "0") + "mlp.fc1.weight"),
        position_rows="cls+patches",
        position_resize=RESIZE,
        activation=settings.activation(_stated(source, said, "hidden_act") or "gelu"),  # type: ignore[arg-type]
        norm_eps=eps,
        drop_path=DROPOUT if original else 0.0,
        preprocess=_preprocess(source, native, patch_size, original, image_size),
    )


def _preprocess(
    source: Source,
    native: tuple[int, int],
    patch_size: int,
    original: bool,
    image_size: int | tuple[int, int] | None,
) -> Preprocess:
    published = native in (ORIGINAL_SIZE, TRANSFORMERS_SIZE)  # others were trained at their own size
    size = (ORIGINAL_SIZE if original else TRANSFORMERS_SIZE) if published else native
    mean, std = processors.OPENAI_MEAN, processors.OPENAI_STD
    # Without a word of theirs transformers' processor of today works on tensors, the authors' on pictures.
    default = Preprocess(size, "squash", 1.0, "bicubic", mean, std, resampler="pillow" if original else "torch")
    found = processors.transformers(source, default)
    if original:
        found = replace(default, mean=found.mean, std=found.std)
    if image_size is None:
        return found
    given = pair(image_size)
    if given is None or any(side % patch_size for side in given):
        raise InputError(
            f"image_size is {image_size!r}; it must be (height, width) in pixels, multiples of the {patch_size} px of a"
            " patch"
        )
    return replace(found, size=given)


def _text(source: Source, side: str, original: bool) -> TextConfig:
    said, table = _part(source, "text_config"), side + names.WORDS
    rows, width = source.shape(table, 2)
    dim = _stated(source, said, "hidden_size") or width
    return TextConfig(
        vocab_size=_stated(source, said, "vocab_size") or rows,
        dim=dim,
        depth=_depth(source, said, side + names.LAYER),
        heads=_heads(source, said, table, dim),
        hidden_dim=_inner(source, said, side + names.LAYER.replace("#", "0") + "intermediate.dense.weight"),
        max_tokens=source.shape(side + names.PLACES, 2)[0],
        norm="post",
        norm_eps=float(_stated(source, said, "layer_norm_eps") or TEXT_EPS),
        activation=settings.activation(_stated(source, said, "hidden_act") or "gelu"),  # type: ignore[arg-type]
        dropout=DROPOUT if original else 0.0,
    )


def _ends(source: Source, tokenizer: TextTokenizer) -> tuple[int, int]:
    """The token ids that begin and end an answer, which `config.json` may state too."""
    said, ids = _part(source, "text_config"), (tokenizer.id(ANSWER), tokenizer.id(LAST))
    for name, token, number in zip(("bos_token_id", "sep_token_id"), (ANSWER, LAST), ids, strict=True):
        if said.get(name) not in (None, number):
            raise InputError(f"its configuration states {name} {said[name]!r}; {token} is {number} in the tokenizer")
    return ids


def _depth(source: Source, said: Mapping[str, Any], block: str) -> int:
    depth, stated = source.depth(block), _stated(source, said, "num_hidden_layers")
    if stated not in (None, depth):
        last = source.own_name(block.replace("#", str(depth - 1)))
        raise InputError(f"{stated} layers are stated; its tensors are of {depth}, up to {last}")
    return depth


def _inner(source: Source, said: Mapping[str, Any], name: str) -> int:
    return int(_stated(source, said, "intermediate_size") or source.shape(name, 2)[0])


def _heads(source: Source, said: Mapping[str, Any], name: str, dim: int) -> int:
    """The number of heads as stated, or as heads of 64 give it: transformers' own default, 8, is no BLIP's."""
    heads = _stated(source, said, "num_attention_heads")
    if heads is None:
        if dim % HEAD_WIDTH:
            raise InputError(
                f"{source.own_name(name)} has width {dim}, no multiple of heads of {HEAD_WIDTH}, and nothing states"
                " their number; put a config.json with num_attention_heads beside it"
            )
        heads = dim // HEAD_WIDTH
        side = "image" if name.startswith("vis") else "text"
        source.tell(f"{side} side, heads {heads}: of {HEAD_WIDTH} each, as every published BLIP has")
    if dim % heads:
        raise InputError(f"{source.own_name(name)} has width {dim}, no multiple of {heads} heads")
    return int(heads)


def _part(source: Source, name: str) -> Mapping[str, Any]:
    part = source.settings.get(name)
    return part if isinstance(part, Mapping) else {}


def _stated(source: Source, said: Mapping[str, Any], name: str) -> Any:
    """What `config.json` states of one side. Raises InputError for a value of the wrong kind."""
    value, kind = said.get(name), _KINDS.get(name, int)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, kind) or (kind is not str and not value > 0):
        raise InputError(f"its configuration states {name} {value!r}, which cannot be")
    return value
