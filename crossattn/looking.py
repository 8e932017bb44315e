"""From pictures to what words can ask: each image encoded once, an item's images side by side.

It also knows which weights a memory came from. B items, C channels, N tokens, D width of the image side.
"""

import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.crossattn.memory import Grid, Memory, existing
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.preprocess import Picture, Preprocess
from regard.vit.tokens import Tokens

if TYPE_CHECKING:
    from regard.crossattn.model import ImageQA

Pictures = Picture | Sequence[Picture | Sequence[Picture | None] | None] | None
Images = Tensor | Sequence[Tensor | Sequence[Tensor | None] | None]
Context = tuple[Tensor, Tensor | None, tuple[tuple[Grid | None, ...], ...]]

_SAMPLES = 8  # values looked at in a tensor
_SOME = 8  # every so many-th tensor is looked at although its version has not changed
# What a model cast to another dtype becomes.
_CASTS = (torch.float32, torch.bfloat16, torch.float16)


def prepared(pictures: Any, preprocess: Preprocess, like: Tensor) -> list[list[Tensor | None]]:
    """The images of each item, each `(C, height, width)`, of the device and dtype of `like`; None for "no image"."""
    if isinstance(pictures, Tensor) and pictures.dim() == 4:
        pictures = list(pictures)
    elif not isinstance(pictures, (list, tuple)):
        pictures = [pictures]
    if not pictures:
        raise InputError("look was given no pictures")
    return [[_prepared(picture, preprocess, like) for picture in _images(item)] for item in pictures]


def contexts(images: Images, encode: Callable[[Tensor], Tokens], index: nn.Embedding | None, empty: Tensor) -> Context:
    """What the words ask: tokens `(B, N, D)`, which of them exist `(B, N)` or None for all, and each image's grid.

    Images of one size are encoded together, whatever items they belong to. `index` tells the images of an item apart by
    their order; `empty (0, D)` are the tokens of an item without image.
    Raises InputError for an item of more images than `index` knows.
    """
    if isinstance(images, Tensor):
        tokens = encode(images)
        return numbered(_joined(tokens), index, 0), None, ((tokens.grid,),) * len(images)
    items = [_images(item) for item in images]
    for number, item in enumerate(items):
        if index is not None and len(item) > index.num_embeddings:
            raise InputError(
                f"item {number} has {len(item)} images, this model tells {index.num_embeddings} apart;"
                " give fewer, or build the model with more (ImageQAConfig.images)"
            )
    placed = [(row, place, image) for row, item in enumerate(items) for place, image in enumerate(item)]
    seen = [one for one in placed if one[2] is not None]
    shapes = dict.fromkeys(image.shape for _, _, image in seen)
    if len(shapes) == 1 and all(len(item) == 1 and item[0] is not None for item in items):
        return contexts(torch.stack([image for _, _, image in seen]), encode, index, empty)
    parts: list[dict[int, Tensor]] = [{} for _ in items]
    grids: list[list[Grid | None]] = [[None] * len(item) for item in items]
    for shape in shapes:
        those = [(row, place, image) for row, place, image in seen if image.shape == shape]
        tokens = encode(torch.stack([image for _, _, image in those]))
        for (row, place, _), part in zip(those, _joined(tokens), strict=True):
            parts[row][place], grids[row][place] = numbered(part, index, place), tokens.grid
    joined = [torch.cat([empty, *(part[i] for i in sorted(part))]) for part in parts]
    lengths = [len(context) for context in joined]
    padded = torch.stack([F.pad(context, (0, 0, 0, max([1, *lengths]) - len(context))) for context in joined])
    return padded, existing(lengths, padded.device), tuple(map(tuple, grids))


def fingerprint(model: "ImageQA") -> str:
    """A short text that is the same for the same image side and the same projections, and no other.

    It is made of the configuration and of some values of every tensor, which any training step moves; a change of
    single weights by hand may escape it. Its parts are hashes of the values as they are, and of what a cast of the
    model makes of them, so that a memory may be cast with its model.
    """
    made = _maker(model)
    return "-".join([made.exact, *made.casts()])


def require_readable(memory: Memory, model: "ImageQA") -> None:
    """Raise InputError where a memory is on another device or in another dtype than the model, or of other weights."""
    weight = model.text.words.weight
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if (memory.device, memory.dtype) != (weight.device, dtype):
        raise InputError(
            f"this memory is in {memory.dtype} on {memory.device}, the model asks in {dtype} on {weight.device};"
            f" use memory.to({str(weight.device)!r}, {dtype})"
        )
    if memory.fingerprint is None:
        return
    made, (exact, *casts) = _maker(model), memory.fingerprint.split("-")
    if made.exact not in (exact, *casts) and exact not in made.casts():
        raise InputError(
            "this memory was made with other weights: by another model, or by this one before its weights changed; look"
            " at the pictures again"
        )


@dataclasses.dataclass(frozen=True)
class _Maker:
    """What makes a memory, as it was when its tensors were sampled.

    Attributes:
        config: of the image side.
        versions: of every tensor: which it is, where it stands, how often it was changed.
        few: values of some tensors.
        values: values of every tensor, in fp64 on the CPU.
        exact: the hash of these values and of the configuration.
    """

    config: ViTConfig
    versions: list[tuple[int, int, int]]
    few: Tensor
    values: Tensor
    exact: str

    def casts(self) -> list[str]:
        """The hashes that casts of the model would have."""
        return [_hash(self.values.to(cast), self.config) for cast in _CASTS]


_KNOWN: "weakref.WeakKeyDictionary[ImageQA, _Maker]" = weakref.WeakKeyDictionary()


@torch.inference_mode()
def _maker(model: "ImageQA") -> _Maker:
    """Samples anew only what has changed: each question asks."""
    tensors = _tensors(model)
    few = tensors[::_SOME]
    try:
        versions = [(id(t), t.data_ptr(), t._version) for t in tensors]
    except RuntimeError:  # inference tensors count no changes
        versions, few = [], tensors
    seen = _sampled(few)  # nobody counts changes through `.data`, as averaging weights makes them
    known = _KNOWN.get(model)
    if (
        known is None
        or known.config is not model.config.vit
        or known.versions != versions
        or not torch.equal(known.few, seen)
    ):
        values = _sampled(tensors)
        known = _Maker(model.config.vit, versions, seen, values, _hash(values, model.config.vit))
        _KNOWN[model] = known
    return known


def _images(item: Any) -> Sequence[Any]:
    item = item if isinstance(item, (list, tuple)) else [item]
    if any(isinstance(image, (list, tuple)) for image in item):
        raise InputError("look was given a list within a list within a list; an item is a picture or a list of them")
    return item


def _prepared(picture: Any, preprocess: Preprocess, like: Tensor) -> Tensor | None:
    if picture is None:
        return None
    ready = isinstance(picture, Tensor) and picture.is_floating_point()
    return (picture if ready else preprocess(picture)[0]).to(like.device, like.dtype)


def _joined(tokens: Tokens) -> Tensor:
    """An image's tokens in the order in which words read them: class token, registers, patches `(B, N, D)`."""
    cls = [] if tokens.cls is None else [tokens.cls[:, None]]
    return torch.cat([*cls, tokens.registers, tokens.patches], dim=1)


def numbered(context: Tensor, index: nn.Embedding | None, place: int) -> Tensor:
    """The tokens of an image, marked as the `place`-th of its item."""
    return context if index is None else context + index.weight[place]


def _tensors(model: "ImageQA") -> list[Tensor]:
    """Every tensor that makes a memory."""
    attentions = [cross.attn for cross in model.text.asking]
    modules: list[nn.Module] = [part for attn in attentions for part in (attn.to_k, attn.to_v, attn.norm_k)]
    modules += [model.vit] if model.image_index is None else [model.vit, model.image_index]
    found: list[Tensor | None] = []
    for module in modules:  # which grows meanwhile; nn.Module.parameters() takes twice as long
        inside = module.__dict__
        for tensors in (inside["_parameters"], inside["_buffers"]):
            if tensors:
                found += tensors.values()
        modules += inside["_modules"].values()
    return [tensor for tensor in found if tensor is not None]


def _sampled(tensors: Sequence[Tensor]) -> Tensor:
    """At most so many values of each, from all over it, in fp64 on the CPU."""
    views: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        step = tensor.numel() // _SAMPLES
        if step and tensor.is_contiguous():
            view = tensor.as_strided((_SAMPLES,), (step,))
        else:
            view = tensor.reshape(-1)[:: max(1, step)][:_SAMPLES]
        views.setdefault(tensor.device, []).append(view)
    return torch.cat([torch.cat(some).cpu().double() for some in views.values()])


def _hash(values: Tensor, config: ViTConfig) -> str:
    hashed = hashlib.blake2b(values.double().numpy().tobytes(), digest_size=6)
    hashed.update(repr(_stated(config)).encode())
    return hashed.hexdigest()


def _stated(config: Any) -> list[tuple[str, Any]]:
    """The fields of a configuration, without later ones at their default: those mean what was before them."""
    fields = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [
        (field.name, _stated(value) if dataclasses.is_dataclass(value) else value)
        for field, value in fields
        if not (field.metadata.get("later") and value == field.default)
    ]
