"""What the viewer shows: every row of some layers and heads of a ViT, or the words of questions that were asked."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from regard.crossattn import Answer
from regard.viewer.pages import LIMIT_MB, Group, write_viewer
from regard.vit import AttentionRows, ViT, attention_rows
from regard.vit.errors import InputError
from regard.vit.images import to_rgb
from regard.vit.maps import patch_rows
from regard.vit.maps.grid import Frame
from regard.vit.maps.rows import Layers, head_numbers
from regard.vit.maps.trace import plain

Heads = int | Sequence[int] | Literal["all", "mean"]


@torch.inference_mode()
def view(
    picture: Image.Image,
    vit: ViT,
    path: str | Path,
    layers: Layers = -1,
    heads: Heads = "all",
    *,
    title: str = "Where each patch looks",
    model: str = "",
    limit_mb: float = LIMIT_MB,
) -> Path:
    """Write a page on which every patch, the class token and each register can be asked where it looks.

    Args:
        picture: of any mode and size.
        vit: the model.
        path: a name ending in .html.
        layers: numbers, counted from the end if negative, or `all`.
        heads: numbers, `all`, or `mean`, which keeps only the mean over all heads.
        title, model: what stands at the head of the page.
        limit_mb: the page is not written if it would be larger.

    Raises InputError as `write_viewer` and `attention_rows` do.
    """
    vit = plain(vit)
    images = vit.preprocess(picture).to(vit.tokenizer.proj.weight)
    wanted = vit.layer_numbers(layers)
    chosen = head_numbers(vit, "all" if heads == "mean" else heads)
    config, only_mean = vit.config, heads == "mean"
    names = ["cls"] * config.class_token + [f"reg{i}" for i in range(config.registers)]
    told = ["class token"] * config.class_token + [f"register {i}" for i in range(config.registers)]

    def blocks(layer: int) -> Iterator[AttentionRows]:
        if names:
            yield _of_heads(attention_rows(vit, images, names, layer), chosen, only_mean)
        for block in patch_rows(vit, images, layer):
            yield _of_heads(block, chosen, only_mean)

    seen = as_seen(picture, vit)
    shown = "the mean" if only_mean else _list("head", chosen)
    mean = f"mean of all {config.heads} heads"
    if len(chosen) < config.heads:
        mean = f"mean of heads {', '.join(map(str, chosen))}"
    height, width = vit.tokenizer.fit(images).shape[2:]
    what = f"{height // config.patch_size} x {width // config.patch_size} patches of {config.patch_size} px"
    return write_viewer(
        path,
        seen,
        (blocks(layer) for layer in wanted),
        groups=[Group("tokens without a place", tuple(told))] if told else [],
        patches=True,
        title=title,
        what=f"{model + ', ' if model else ''}{what}",
        choice=f"In this page: {_list('layer', wanted)} of {config.depth}, {shown} of {config.heads} heads.",
        head_names=[mean] if only_mean else None,
        mean_name=mean,
        limit_mb=limit_mb,
    )


def view_answers(
    picture: Image.Image,
    vit: ViT,
    answers: Sequence[Answer],
    path: str | Path,
    *,
    title: str = "Where each word looks",
    model: str = "",
    limit_mb: float = LIMIT_MB,
) -> Path:
    """Write a page on which each word of answered questions shows where it looked, per asking layer and head.

    `vit` is the image side that looked at the picture. Raises InputError for a question asked without an image, for
    words that looked at another picture, and as `write_viewer` does.
    """
    asked = [answer for answer in answers if answer.attention.words]
    if not asked:
        raise InputError("there is no answered question with words to show")
    if any(answer.attention.images > 1 for answer in asked):
        raise InputError("the answers are about several pictures at once; a page shows one")
    grids = {tuple(answer.attention.map(0).shape) for answer in asked}
    if len(grids) > 1:
        raise InputError("the answers are about pictures of different sizes; write a page for each picture")
    rows = torch.cat([answer.attention.word_rows() for answer in asked], dim=2).float().cpu()
    lead, grid = int(vit.config.class_token), grids.pop()
    if rows.shape[-1] != lead + vit.config.registers + grid[0] * grid[1]:
        raise InputError("the answers were given by another model than the one whose image side this is")
    cls = rows[None, ..., 0] if lead else None
    registers, patches = rows[None, ..., lead : -grid[0] * grid[1]], rows[None, ..., -grid[0] * grid[1] :]
    count, heads = rows.shape[:2]
    layers = [
        AttentionRows(
            patches[:, i : i + 1].unflatten(-1, grid),
            None if cls is None else cls[:, i : i + 1],
            registers[:, i : i + 1],
            layers=(i,),
            heads=tuple(range(heads)),
        )
        for i in range(count)
    ]
    return write_viewer(
        path,
        as_seen(picture, vit),
        ([layer] for layer in layers),
        groups=[Group(_told(answer), answer.attention.words) for answer in asked],
        title=title,
        what=f"{model + ', ' if model else ''}{grid[0]} x {grid[1]} patches of {vit.config.patch_size} px",
        choice=f"In this page: all {count} asking layers, all {heads} heads.",
        mean_name=f"mean of all {heads} heads",
        limit_mb=limit_mb,
    )


def as_seen(picture: Image.Image, vit: ViT) -> Image.Image:
    """The picture, upright RGB, in the frame that the grid of patches covers: cut, or with black where it was padded.

    It keeps its own shape and sharpness where the model saw it squashed, and the grid stretches over it.
    """
    image = to_rgb(picture, vit.preprocess.background)
    frame = Frame.of(vit, image.height, image.width)
    top, left, bottom, right = map(round, frame.box)
    return image if frame.whole else image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


def _of_heads(rows: AttentionRows, heads: Sequence[int], only_mean: bool) -> AttentionRows:
    def pick(values: Tensor) -> Tensor:
        return values.mean(dim=2, keepdim=True) if only_mean else values[:, :, list(heads)]

    return AttentionRows(
        pick(rows.patches),
        None if rows.cls is None else pick(rows.cls),
        pick(rows.registers),
        None if rows.sink is None else pick(rows.sink),
        rows.queries,
        rows.layers,
        (0,) if only_mean else tuple(heads),
    )


def _list(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _told(answer: Answer) -> str:
    unknown = f" (unknown to the model: {', '.join(answer.unknown)})" if answer.unknown else ""
    return f"{answer.question}  {answer.text}, {answer.probability:.1%}{unknown}:"
