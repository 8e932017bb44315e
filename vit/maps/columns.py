"""How much attention every token is given: columns of the attention matrix, summed while its rows stream by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.vit.maps.rows import BLOCK, checked_rows
from regard.vit.maps.trace import Passage
from regard.vit.model import ViT

MOST = 1 << 25  # weights held at once, in a large batch of large images: 128 MiB


@dataclass(frozen=True, eq=False)
class Columns:
    """What the rows of one layer add up to, for B images, H heads and S tokens in the order of the sequence.

    Attributes:
        received: mean over all queries of the attention to each key `(B, H, S)`; sums to 1 less what a sink took.
        first: mean over all queries but the first of the attention to the first token `(B, H)`.
        sink: mean mass that a learned sink took `(B, H)`; 0 for heads without one.
        entropy: mean entropy of a row in nats `(B, H)`; a sink is one more outcome.
        support: mean of exp(entropy), how many tokens a row looks at in effect, `(B, H)`.
        outcomes: how many there are, S and the sink.
    """

    received: Tensor
    first: Tensor
    sink: Tensor
    entropy: Tensor
    support: Tensor
    outcomes: int


def columns(passage: Passage, block: int = BLOCK) -> Columns:
    """Stream the checked rows of one layer, at most `block` queries at once: memory O(block x S)."""
    attn, kv = passage.attn, passage.kv
    count = passage.q.shape[2]
    block = max(1, min(block, MOST // max(1, passage.q.shape[0] * attn.heads * count)))
    wide = torch.promote_types(passage.q.dtype, torch.float32)
    received = torch.zeros(passage.q.shape[0], attn.heads, count, dtype=wide, device=passage.q.device)
    first, entropy, support = (torch.zeros_like(received[..., 0]) for _ in range(3))
    for start in range(0, count, block):
        part = slice(start, start + block)
        rows = checked_rows(attn, passage.q[:, :, part], kv, out=passage.out[:, :, part])
        each = row_entropy(rows, sink=attn.sink is not None)
        # Added in place: small sums kept between the large blocks would leave holes in memory.
        received += rows.sum(2)
        first += rows[:, :, int(start == 0) :, 0].sum(2)
        entropy += each.sum(2)
        support += each.exp().sum(2)
    received = received / count
    sink = 1 - received.sum(-1) if attn.sink is not None else torch.zeros_like(first)
    outcomes = count + (attn.sink is not None)
    return Columns(received, first / max(count - 1, 1), sink, entropy / count, support / count, outcomes)


def row_entropy(rows: Tensor, sink: bool) -> Tensor:
    """Entropy in nats of rows `(…, S)`; what is missing from 1 is a sink's, an outcome like any other."""
    entropy = torch.special.entr(rows).sum(-1)
    return entropy + torch.special.entr((1 - rows.sum(-1)).clamp_min(0)) if sink else entropy


def by_name(model: ViT, values: Tensor, grid: tuple[int, int]) -> tuple[Tensor | None, Tensor, Tensor]:
    """Values per token `(…, S)` as those of the class token `(…)`, registers `(…, R)` and patches `(…, gh, gw)`."""
    shape = values.shape[:-1]
    tokens = model.name(values.flatten(0, -2)[..., None], grid)
    cls = None if tokens.cls is None else tokens.cls[..., 0].unflatten(0, shape)
    patches = tokens.patches[..., 0].unflatten(0, shape).unflatten(-1, grid)
    return cls, tokens.registers[..., 0].unflatten(0, shape), patches


def sequence_names(model: ViT, grid: tuple[int, int]) -> tuple[str, ...]:
    """What each token of a sequence is called, in the sequence's order."""
    config = model.config
    count = config.class_token + config.registers + grid[0] * grid[1]
    tokens = model.name(torch.arange(count)[None, :, None], grid)
    names = [""] * count
    if tokens.cls is not None:
        names[int(tokens.cls)] = "cls"
    for i, place in enumerate(tokens.registers.flatten().tolist()):
        names[place] = f"reg{i}"
    for i, place in enumerate(tokens.patches.flatten().tolist()):
        names[place] = f"patch {divmod(i, grid[1])}"
    return tuple(names)
