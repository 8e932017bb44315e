"""The features of a set of pictures, one vector each, from a ViT in inference mode: for k-NN and linear probes."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from regard.datasets.augment.views import CentreView
from regard.datasets.pictures import PictureSet
from regard.train.pictures import PictureBatch, PictureBatches
from regard.train.sampling import EvalBatches
from regard.train.workers import Refused, loader_of
from regard.vit import Preprocess, ViT
from regard.vit.errors import InputError

Pooled = Literal["cls", "mean", "cls+mean"]
Progress = Callable[[int, int], None]


def features(
    vit: ViT,
    pictures: PictureSet,
    *,
    pooled: Pooled | None = None,
    blocks: int = 1,
    batch: int = 128,
    workers: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """One feature per picture, float32 `(N, W)` on the CPU, in the order of the set.

    `pooled` says what is taken of the tokens after the final norm: the class token, the mean of the patches, or both
    side by side; None takes the class token, where there is one and the model does not pool by the mean. Of the last
    `blocks` blocks the same is taken from each, side by side (Caron et al., 2021, appendix F: four of a ViT-S). The
    model's device computes, and the model is left in the mode it was in.

    Raises InputError for a picture that cannot be read, a class token that is not there, and too many blocks.
    """
    pooled = pooled or natural(vit)
    if "cls" in pooled and not vit.config.class_token:
        raise InputError(f"this ViT has no class token; take pooled mean instead of {pooled}")
    if not 1 <= blocks <= vit.config.depth:
        raise InputError(f"blocks is {blocks}; this ViT has {vit.config.depth}, take 1 to {vit.config.depth}")
    device, training = next(vit.parameters()).device, vit.training
    vit.eval()
    found: Tensor | None = None
    done = 0
    try:
        with torch.inference_mode():
            for seen in scored_batches(vit.preprocess, vit.config.channels, pictures, batch, workers, progress):
                assert isinstance(seen.pixels, Tensor)
                images = vit.preprocess.normalize(seen.pixels.to(device)).to(vit.dtype)
                made = _pooled(vit, images, pooled, blocks).float().cpu()
                # Into one tensor from the start: a list of parts and their whole would be twice as much.
                found = made.new_empty(len(pictures), made.shape[1]) if found is None else found
                found[done : done + len(made)] = made
                done += len(made)
    finally:
        vit.train(training)
    assert found is not None  # an empty set is refused
    return found


def raw_pixels(
    preprocess: Preprocess, pictures: PictureSet, *, batch: int = 1024, progress: Progress | None = None
) -> Tensor:
    """The preprocessed pixels themselves as features, float32 `(N, C height width)`: what a model has to beat."""
    batches = scored_batches(preprocess, len(preprocess.mean), pictures, batch, 0, progress)
    return torch.cat([preprocess.normalize(_tensor(seen)).flatten(1) for seen in batches])


def natural(vit: ViT) -> Pooled:
    """What stands for a whole picture in this model: what its head reads, else the class token or the mean."""
    pooling = vit.config.pooling
    return pooling if pooling != "map" else ("cls" if vit.config.class_token else "mean")


def scored_batches(
    preprocess: Preprocess,
    channels: int,
    pictures: PictureSet,
    batch: int,
    workers: int = 0,
    progress: Progress | None = None,
) -> Iterator[PictureBatch]:
    """The pictures of a set as a model sees them when it is scored, in order, each once; bad ones are errors."""
    batches = PictureBatches(
        pictures, CentreView(preprocess), seed=0, channels=channels, background=preprocess.background
    )
    loader = loader_of(batches, EvalBatches(len(batches), batch), workers, keep_workers=False)
    done = 0
    for seen in loader:
        if isinstance(seen, Refused):
            raise InputError(seen.message)
        yield seen
        done += len(seen.ids)
        if progress is not None:
            progress(done, len(pictures))


def _pooled(vit: ViT, images: Tensor, pooled: Pooled, blocks: int) -> Tensor:
    parts = []
    for tokens in vit.intermediates(images, range(-blocks, 0), norm=True):
        parts += [tokens.cls] if "cls" in pooled and tokens.cls is not None else []
        parts += [tokens.patches.mean(dim=1)] if "mean" in pooled else []
    return torch.cat(parts, dim=1)


def _tensor(seen: PictureBatch) -> Tensor:
    assert isinstance(seen.pixels, Tensor)
    return seen.pixels
