"""k-NN classification of features: a soft dictionary look-up whose values are labels."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.crossattn import mixture, nearest
from regard.vit.errors import InputError


@dataclass(frozen=True)
class NeighbourScore:
    """Shares of right answers with k neighbours. `top5` is None where five of the k neighbours, or classes, are all."""

    k: int
    top1: float
    top5: float | None


def score_neighbours(
    known: Tensor,
    labels: Tensor,
    asked: Tensor,
    right: Tensor,
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
) -> list[NeighbourScore]:
    """How often the classes of the k nearest known features are those of the features asked about, for each k.

    `known (N, W)` with `labels (N,)` vote on `asked (Q, W)`, whose classes are `right (Q,)`: the weighted k-NN
    classifier of Wu et al., 2018 (arXiv:1805.01978), as DINO is scored by. A k above N asks all N. The neighbours are
    found once, for the largest k.

    Raises InputError for no k or one below 1, and as `regard.crossattn.lookup` does.
    """
    if not ks:
        raise InputError("k names no number of neighbours; give at least one, such as 20")
    if min(ks) < 1:
        raise InputError(f"k is {min(ks)}; at least one neighbour must be asked")
    similarity, places = nearest(asked, known, max(ks))
    scores = []
    for k in ks:
        votes = mixture(similarity[:, :k], places[:, :k], labels, temperature=temperature)
        first = min(5, votes.shape[1])
        best = votes.topk(first, dim=1).indices == right.to(votes.device)[:, None]
        whole = k >= 5 and votes.shape[1] > 5
        top5 = float(best.any(dim=1).double().mean()) if whole else None
        scores.append(NeighbourScore(k, float(best[:, 0].double().mean()), top5))
    return scores


def best_of(scores: Sequence[NeighbourScore]) -> NeighbourScore:
    """The score of the best k."""
    return max(scores, key=lambda score: score.top1)
