"""The k nearest neighbours as a soft dictionary look-up, streamed in blocks, exact.

A k-NN classifier asks a dictionary of labelled features as attention asks a dictionary of tokens: the query is a
feature, the keys are all known features, the values their labels. What differs from `regard.vit.attention.look_up` is
that a label hands over a whole class, that similarity is the cosine, and that only the k best keys take part.
"""

import torch
from torch import Tensor
from torch.nn import functional

from regard.vit.errors import InputError

_QUERIES = 1024  # asked at once: with a block of keys 64 MB of similarities


def lookup(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    temperature: float = 0.07,
    k: int | None = 20,
    block: int = 16384,
) -> Tensor:
    """Soft dictionary look-up among the k keys nearest to each query: `(Q, D), (N, D), values -> mixture (Q, V)`.

    Similarity is the cosine; the k best are weighted by `softmax(similarity / temperature)`, and their values mixed in
    that proportion. `values` are `(N, V)`, or class labels `(N,)`, which stand for one-hot rows: the mixture is then
    the vote of the k-NN classifier with temperature (Wu et al., 2018, arXiv:1805.01978; Caron et al., 2021,
    arXiv:2104.14294). `k=None`, or more than N, asks every key, and that is attention's own sentence:

    >>> from regard.vit import look_up
    >>> keys = functional.normalize(torch.tensor([[1.0, 0.2], [0.1, 1.0], [0.9, 1.1]]), dim=1)
    >>> orange = functional.normalize(torch.tensor([[0.8, 1.2]]), dim=1)
    >>> labels = torch.tensor([0, 1, 1])
    >>> mixture = lookup(orange, keys, labels, temperature=0.1, k=None)
    >>> mixed, percentages = look_up(orange, keys, torch.eye(2)[labels], scale=1 / 0.1)
    >>> torch.allclose(mixture, mixed)
    True

    `block` keys are compared at a time, so that memory is theirs and not N's; the result does not depend on it.
    Keys may lie on another device than the queries; blocks of them are brought over.

    Raises InputError for shapes that do not fit, no keys, a negative label, k below 1 or a temperature of 0 or less.
    """
    similarity, places = nearest(queries, keys, k, block=block)
    return mixture(similarity, places, values, temperature=temperature)


@torch.no_grad()
def nearest(queries: Tensor, keys: Tensor, k: int | None = 20, *, block: int = 16384) -> tuple[Tensor, Tensor]:
    """Cosines `(Q, k)` of the k nearest keys to each query, the nearest first, and their places `(Q, k)`.

    There are N columns where k is None or more than N. Raises InputError as `lookup` does.
    """
    if queries.dim() != 2 or keys.dim() != 2 or queries.shape[1] != keys.shape[1]:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError(f"queries and keys must be (Q, D) and (N, D) of one width; they are {shapes}")
    if not len(keys):
        raise InputError("there are no keys to look up")
    if k is not None and k < 1:
        raise InputError(f"k is {k}; at least one neighbour must be asked")
    if block < 1:
        raise InputError(f"block is {block}; it must be at least 1")
    count = len(keys) if k is None else min(k, len(keys))
    found = [_nearest(_unit(asked), keys, count, block) for asked in queries.split(_QUERIES)]
    similarity, places = zip(*found, strict=True)
    return torch.cat(similarity), torch.cat(places)


def mixture(similarity: Tensor, places: Tensor, values: Tensor, *, temperature: float = 0.07) -> Tensor:
    """The values at `places (Q, k)`, mixed by `softmax(similarity / temperature)`, `(Q, V)`.

    The first columns of what `nearest` gives are the answer for a smaller k. Raises InputError as `lookup` does.
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; it must be above 0")
    weights = torch.softmax(similarity / temperature, dim=1)
    values = values.to(places.device)
    if values.dim() == 2:
        mixed = [(w[:, None] @ values[at].to(w.dtype))[:, 0] for w, at in _blocks(weights, places)]
        return torch.cat(mixed)
    if values.dim() != 1 or values.is_floating_point():
        raise InputError(f"values must be labels (N,) or rows (N, V), not {values.dtype} {tuple(values.shape)}")
    if int(values.min()) < 0:
        raise InputError("a key has a negative label, which stands for none; leave such keys out")
    votes = weights.new_zeros(len(weights), int(values.max()) + 1)
    return votes.scatter_add_(1, values[places].long(), weights)


def _blocks(weights: Tensor, places: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weights.split(_QUERIES), places.split(_QUERIES), strict=True))


def _nearest(queries: Tensor, keys: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    """The best of each block of keys against the best so far."""
    best = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for first in range(0, len(keys), block):
        asked = _unit(keys[first : first + block].to(queries.device))
        similarity, there = (queries @ asked.T).topk(min(count, len(asked)), dim=1)
        best, order = torch.cat((best, similarity), dim=1).sort(dim=1, descending=True, stable=True)
        best, order = best[:, :count], order[:, :count]
        places = torch.cat((places, there + first), dim=1).gather(1, order)
    return best, places


def _unit(features: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least: half precision would tie neighbours that differ."""
    wide = features if features.dtype == torch.float64 else features.float()
    return functional.normalize(wide, dim=1)
