"""A text encoder from BERT weights in transformers' layout (Devlin et al., 2019, arXiv:1810.04805), to ask images with.

Only what reads text is taken over. The cross-attention of the layers that are to ask an image is new; behind gates of
0 it leaves BERT's numbers as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.crossattn.pretrained import vocabularies
from regard.crossattn.text import TextConfig, TextEncoder
from regard.crossattn.tokenizer import TextTokenizer
from regard.vit import checkpoint
from regard.vit.errors import InputError
from regard.vit.files import typed_path
from regard.vit.pretrained import files, modules, rules, settings
from regard.vit.pretrained.report import LoadReport
from regard.vit.pretrained.rules import Rule
from regard.vit.pretrained.source import Source, pattern_of
from regard.vit.values import changed

EPS = 1e-12
WORDS, PLACES = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TYPES, LAYER = "embeddings.token_type_embeddings.weight", "encoder.layer.#."
RULES = (
    Rule(WORDS, "words.weight"),
    Rule(PLACES, "positions"),
    Rule(TYPES, "types"),
    Rule("embeddings.LayerNorm.*", "norm.*"),
    Rule(LAYER + "attention.self.query.*", "layers.#.attn.to_q.*"),
    Rule(LAYER + "attention.self.key.*", "layers.#.attn.to_k.*"),
    Rule(LAYER + "attention.self.value.*", "layers.#.attn.to_v.*"),
    Rule(LAYER + "attention.output.dense.*", "layers.#.attn.out.*"),
    Rule(LAYER + "attention.output.LayerNorm.*", "layers.#.norm1.*"),
    Rule(LAYER + "intermediate.dense.*", "layers.#.mlp.fc1.*"),
    Rule(LAYER + "output.dense.*", "layers.#.mlp.fc2.*"),
    Rule(LAYER + "output.LayerNorm.*", "layers.#.norm3.*"),
)
# What no question needs, by what it is.
_UNUSED = {
    "pooler.**": "pooler",
    "cls.**": "heads of the pre-training",
    "embeddings.position_ids": "counted places",
    "embeddings.token_type_ids": "counted places",
}
# The last part of a prefix; relatives of BERT with the same names under it count places or share layers otherwise.
_PREFIXES = ("bert", "auto_model", "model", "module", "_orig_mod")
_NEW = re.compile(r"layers\.\d+\.(cross|norm2)\.")
_CHANGES = ("heads", "norm_eps", "activation", "cross_every", "gate", "qk_norm", "dropout", "pooling")


def open_text(
    source: str | Path | nn.Module,
    *,
    tokenizer: TextTokenizer | str | Path | None = None,
    context_dim: int | None = None,
    **changes: Any,
) -> tuple[TextEncoder, TextTokenizer | None]:
    """A text encoder with BERT's numbers and new, gated cross-attention; `encoder.report` tells what was done.

    `source` is a folder, a hub name, a file, or a live `BertModel` of transformers (or a model that holds one). Only
    the words' own type, row 0 of the token types, is kept: it is added to the position table. In inference mode.

    Args:
        tokenizer: of the encoder, or its `tokenizer.json` or `vocab.txt`; default: the one beside the weights, or None
            where there is none.
        context_dim: width of the image tokens that the new cross-attention asks; default: the encoder's own.
        changes: `cross_every`, `gate` (True unless changed), `qk_norm`, `dropout` and `pooling` of `TextConfig`; and
            `heads`, `norm_eps` and `activation`, which win over `config.json`.

    Raises InputError for any tensor that is missing, unknown, of another shape or not finite, for a model of another
    kind, for a file that would run code, and where nothing tells the number of heads.
    """
    if odd := sorted(set(changes) - set(_CHANGES)):
        raise InputError(
            f"{odd[0]} cannot be changed here: the weights decide it; open_text takes {', '.join(_CHANGES)}"
        )
    beside = None
    if isinstance(source, nn.Module):
        read = _live(source)
    else:
        place = files.locate(source)
        if checkpoint.is_ours(place):
            raise InputError(
                f"{source}: a model of Regard; open it with its own class, and pass its text and tokenizer"
            )
        read = files.read(place, str(source))
        beside = None if tokenizer is not None else vocabularies.beside(str(source), place)
    if isinstance(tokenizer, (str, Path)):
        beside, tokenizer = typed_path(tokenizer), None
    own = vocabularies.opened(beside) if beside is not None else tokenizer
    read.changes = changes
    return _build(_inside(read), own, context_dim, changes), own


def fitted(config: TextConfig, context_dim: int, tensors: Mapping[str, Tensor]) -> TextEncoder:
    """An encoder with these tensors for what reads text, and new cross-attention; in inference mode."""
    encoder = TextEncoder(config, context_dim)
    encoder.reset_parameters()
    encoder.load_state_dict({**encoder.state_dict(), **{n: t for n, t in tensors.items() if not is_new(n)}})
    return encoder.eval()


def is_new(name: str) -> bool:
    """Whether a parameter of a `TextEncoder` belongs to its cross-attention, which no BERT has."""
    return _NEW.match(name) is not None


def _build(
    source: Source, tokenizer: TextTokenizer | None, context_dim: int | None, changes: Mapping[str, Any]
) -> TextEncoder:
    try:
        config = changed(_config(source), {name: value for name, value in changes.items() if value is not None})
    except InputError as error:
        text = str(error)
        raise error if text.startswith(source.where) else InputError(f"{source.where}: {text}") from error
    patterns = [(pattern_of(pattern), what) for pattern, what in _UNUSED.items()]
    unused: dict[str, list[str]] = {}
    tensors = {}
    for name, tensor in source.tensors.items():
        if (what := next((what for regex, what in patterns if regex.fullmatch(name)), None)) is None:
            tensors[name] = tensor
        else:
            unused.setdefault(what, []).append(name)
    for name in source.beside:
        heads = name.startswith("cls.")
        unused.setdefault(_UNUSED["cls.**"] if heads else "beside the text encoder", []).append(name)
    ours, origin = _accounted(source, tensors, config)
    parameters = sum(tensor.numel() for tensor in ours.values())
    types = ours.pop("types")
    ours["positions"] = ours["positions"] + types[0]
    source.folded.append(f"token type 0 of {len(types)} into the position table")
    rows = len(ours["words.weight"])
    if tokenizer is not None and len(tokenizer) != rows:
        if len(tokenizer) > rows:
            raise InputError(
                f"{source.where}: the tokenizer has {len(tokenizer)} tokens, the table of words {rows} rows"
            )
        config = replace(config, vocab_size=len(tokenizer))
        ours["words.weight"] = ours["words.weight"][: len(tokenizer)]
        source.folded.append(f"{rows - len(tokenizer)} rows of words that are no token's are left out")
    encoder = fitted(config, context_dim or config.dim, ours)
    encoder.report = LoadReport(
        source=source.where,
        layout="bert",
        parameters=parameters,
        unwrapped=tuple(source.unwrapped),
        renamed=origin,
        folded=tuple(source.folded),
        resized=(),
        unused={what: tuple(names) for what, names in unused.items()},
        assumed=tuple(source.assumed),
    )
    return encoder


def _accounted(
    source: Source, tensors: Mapping[str, Tensor], config: TextConfig
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Their tensors under our names in fp32, every one of them checked, and what each was called."""
    renamed = rules.read(RULES, tensors, cast(Any, config))
    if renamed.unknown:
        names = checkpoint.some(sorted(map(source.own_name, renamed.unknown)))
        raise InputError(
            f"{source.where}: {names} in a BERT checkpoint: no part of the text encoder takes it, and leaving it out"
            " would change the numbers"
        )
    with torch.device("meta"):
        expected = {n: t for n, t in TextEncoder(config, config.dim).state_dict().items() if not is_new(n)}
        types = renamed.tensors.get("types")
        expected["types"] = torch.empty(len(types) if types is not None and types.dim() else 1, config.dim)

    def called(name: str) -> str:
        return source.own_name(renamed.origin.get(name) or rules.their_name(RULES, name, tensors) or name)

    checkpoint.account(source.where, expected, renamed.tensors, called)
    return {name: tensor.float() for name, tensor in renamed.tensors.items()}, renamed.origin


def _config(source: Source) -> TextConfig:
    """What the tensors and the owner's configuration say, without the new cross-attention."""
    kind = source.settings.get("model_type", "bert")
    if kind != "bert" or source.settings.get("is_decoder"):
        what = f"a {kind!r}" if kind != "bert" else "a decoder"
        raise InputError(
            f"{source.where}: its configuration says that it is {what}; Regard reads encoders of BERT here"
        )
    rows, width = source.shape(WORDS, 2)
    if "model_type" not in source.settings and source.shape(TYPES, 2)[0] == 1:
        raise InputError(
            f"{source.where}: {source.own_name(TYPES)} has one row, as RoBERTa and its kin have, which count places"
            " otherwise; Regard reads encoders of BERT here"
        )
    dim = _stated(source, "hidden_size", int) or width
    depth = source.depth(LAYER)
    if (said := _stated(source, "num_hidden_layers", int) or depth) != depth:
        raise InputError(f"{source.where}: {said} layers are stated; its tensors are of {depth}")
    heads = source.changes.get("heads") or _stated(source, "num_attention_heads", int)
    if heads is None:
        raise InputError(
            f"{source.where}: the tensors do not tell the number of heads, and no config.json of theirs is there; pass"
            " heads= to open_text"
        )
    if isinstance(heads, int) and heads > 0 and dim % heads:
        raise InputError(f"{source.where}: {source.own_name(WORDS)} has width {dim}, no multiple of {heads} heads")
    eps = source.changes.get("norm_eps") or _stated(source, "layer_norm_eps", float)
    if eps is None:
        source.tell(f"norm_eps {EPS!r}: as BERT has")
    hidden = source.shape(LAYER.replace("#", "0") + "intermediate.dense.weight", 2)[0]
    return TextConfig(
        vocab_size=_stated(source, "vocab_size", int) or rows,
        dim=dim,
        depth=depth,
        heads=heads,
        hidden_dim=_stated(source, "intermediate_size", int) or hidden,
        max_tokens=source.shape(PLACES, 2)[0],
        norm="post",
        norm_eps=EPS if eps is None else float(eps),
        activation=settings.hidden_act(source, "BERT", "gelu"),  # type: ignore[arg-type]
        gate=True,
    )


def _stated(source: Source, name: str, kind: type) -> Any:
    value = source.settings.get(name)
    kinds: Any = (int, float) if kind is float else kind
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not value > 0):
        raise InputError(f"{source.where}: its configuration states {name} {value!r}, which cannot be")
    return value


def _inside(source: Source) -> Source:
    """The source with only the text encoder's tensors, its prefix gone; the rest is beside."""
    # By two tables, so that of a file that lacks one the other tells where it would be.
    found = {n[: -len(end)] for n in source.tensors for end in (WORDS, PLACES) if n == end or n.endswith("." + end)}
    if len(found) != 1:
        held = ", ".join(map(repr, sorted(found))) if found else ", ".join([*source.tensors][:3])
        many = f"several, under {held}" if found else f"none, but {held}"
        raise InputError(f"{source.where}: one text encoder of BERT is needed, with {WORDS!r}; it has {many}")
    (prefix,) = found
    last = prefix.rstrip(".").rpartition(".")[2]
    if last and last not in _PREFIXES and not last.isdigit():
        raise InputError(
            f"{source.where}: its text encoder stands under {prefix!r}; Regard reads encoders of BERT here"
        )
    if prefix:
        source.unwrapped.append(f"prefix {prefix!r}")
    tensors: dict[str, Tensor] = {}
    own: dict[str, str] = {}
    for name in source.tensors:
        if name.startswith(prefix):
            plain = name.removeprefix(prefix)
            # BERT's first checkpoints keep TensorFlow's names of a norm's parts.
            plain = plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            if plain in tensors:
                raise InputError(f"{source.where}: {name} and {own[plain]} are the same part of a norm")
            tensors[plain], own[plain] = source.tensors[name], name
    beside = {name: tensor for name, tensor in source.tensors.items() if not name.startswith(prefix)}
    return replace(source, tensors=tensors, beside=beside, prefix=prefix, own=own)


def _live(module: nn.Module) -> Source:
    """A module of transformers, or one that holds it, such as a sentence encoder."""
    source = modules.read(module)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "to_dict"):
            return replace(source, settings=config.to_dict())
    return source
