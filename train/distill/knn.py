"""The k-NN score while a model trains without labels: they are looked at, and teach nothing.

Some labelled pictures are the dictionary, some others ask it: what the teacher's features have learned to tell apart
shows in the share that finds its own class (Caron et al., 2021, arXiv:2104.14294).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.crossattn.lookup import lookup
from regard.datasets.pictures import PictureSet

K = 20
TEMPERATURE = 0.07
ASKING = 5
"""One picture in so many asks, the others answer: of any part of the set, whatever limits it."""


def looked_at(pictures: PictureSet, limit: int, seed: int) -> PictureSet | None:
    """Up to `limit` labelled pictures; None where two classes, or pictures to ask and to answer, are not to be had."""
    known = (pictures.labels >= 0).nonzero()[:, 0]
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:limit]
    if len(order) < ASKING or len(pictures.labels[known].unique()) < 2:
        return None
    return pictures.subset(known[order])


def asks(indices: Tensor) -> Tensor:
    """Which pictures ask, by their numbers in the set, bool."""
    return indices % ASKING == ASKING - 1


class KnnScore:
    """Collects features by the number of their picture, and scores when all are there; `size` is how many there are."""

    def __init__(self, size: int):
        self.size = size
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, features: Tensor, labels: Tensor, indices: Tensor, counts: Tensor) -> None:
        """Collect `features (B, D)`; rows that do not count, padding, are told by the label -1."""
        self._rows.append((features.float(), torch.where(counts, labels, -1), indices))

    def accuracy(self, gather: Callable[[Tensor], Tensor]) -> float:
        """The share of asking pictures whose class got the most votes; NaN where none asked or answered.

        `gather` brings together the rows of all ranks, which have the same number. What was collected is forgotten.
        """
        features, labels, indices = (gather(torch.cat(part)) for part in zip(*self._rows, strict=True))
        self._rows = []
        asking, answering = asks(indices) & (labels >= 0), ~asks(indices) & (labels >= 0)
        if not (asking.any() and answering.any()):
            return float("nan")
        votes = lookup(features[asking], features[answering], labels[answering], temperature=TEMPERATURE, k=K)
        return float((votes.argmax(dim=1) == labels[asking]).double().mean())
