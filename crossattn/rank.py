"""A decoder ranks candidates by the exact log-probability of each.

All candidates are read at once, as a tree of their shared prefixes: "blue" and "blue sky" have one node for "blue".
The tree is one sequence to the decoder; each node sees its ancestors and stands at its depth.

Q questions, C candidates, N nodes, P log-probabilities that are wanted of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.crossattn.chances import log_probabilities, wide
from regard.crossattn.decoder import TextDecoder
from regard.vit.attention import KeysValues

NODES = 256  # of a tree; every node is compared with every other, so more would cost more than they share
TOKENS = 4096  # that are read at once, of all questions together

Candidates = Sequence[tuple[int, ...]]


def rank(
    decoder: TextDecoder,
    kept: tuple[KeysValues, ...],
    visible: Tensor | None,
    candidates: Candidates,
    *,
    shortlist: int | None = None,
) -> Tensor:
    """Log-probability of each candidate and its end for each question, `(Q, C)`, in fp32 or wider.

    Args:
        kept: what `decoder.remember` made of the questions' states, of Q questions. It is held once per question.
        visible: which of a question's tokens may be read, bool `(Q, T)`; None for all.
        candidates: token ids of each, without those that begin and end it.
        shortlist: rank only so many for each question, those with the likeliest first token; among candidates that
            share it, those whose token ids come first in the order of a dictionary. The others get -inf.
    """
    if shortlist is not None and shortlist < len(candidates):
        return _rank_shortlisted(decoder, kept, visible, candidates, shortlist)
    if not candidates:
        return kept[0].k.new_zeros(len(kept[0]), 0, dtype=wide(kept[0].k.dtype))
    order = sorted(range(len(candidates)), key=candidates.__getitem__)  # neighbours share the longest prefixes
    trees = _trees([candidates[i] for i in order], decoder.config.first, decoder.config.last)
    columns = torch.cat([_read(decoder, kept, visible, tree) for tree in trees], dim=1)
    return columns[:, torch.tensor(order, device=columns.device).argsort()]


def _rank_shortlisted(
    decoder: TextDecoder, kept: tuple[KeysValues, ...], visible: Tensor | None, candidates: Candidates, shortlist: int
) -> Tensor:
    device, questions = kept[0].k.device, len(kept[0])
    begin = torch.full((questions, 1), decoder.config.first, device=device)
    # An empty candidate begins with its end.
    firsts = torch.tensor([(*ids, decoder.config.last)[0] for ids in candidates], device=device)
    states = decoder(begin, kept, visible)
    chances = log_probabilities(decoder, states, torch.zeros(len(candidates), dtype=torch.long), firsts)
    order = sorted(range(len(candidates)), key=candidates.__getitem__)
    likeliest = chances.detach()[:, order].argsort(dim=1, descending=True, stable=True)[:, :shortlist]
    rows = []
    for question, places in enumerate(likeliest.tolist()):
        one = slice(question, question + 1)
        chosen = sorted(order[place] for place in places)
        some = rank(
            decoder,
            tuple(kv[one] for kv in kept),
            None if visible is None else visible[one],
            [candidates[i] for i in chosen],
        )
        row = some.new_full((1, len(candidates)), -torch.inf)
        rows.append(row.index_copy(1, torch.tensor(chosen, device=device), some))
    return torch.cat(rows)


@dataclass(frozen=True)
class _Tree:
    """Candidates as one sequence of nodes, parents before children; node 0 is what begins them all.

    Attributes:
        ids: token of each node `(N,)`.
        places: depth of each node `(N,)`.
        mask: which nodes each may read, its ancestors and itself, bool `(N, N)`.
        at, wanted: the tokens whose log-probability is wanted, `(P,)`, and after which node, rising.
        paths: for each candidate the numbers of its own among the P, filled up with P, `(C, longest + 1)`.
    """

    ids: Tensor
    places: Tensor
    mask: Tensor
    at: Tensor
    wanted: Tensor
    paths: Tensor

    @classmethod
    def of(cls, nodes: "dict[tuple[int, ...], int]", candidates: Candidates, first: int, last: int) -> "_Tree":
        """From the number of each prefix, and the candidates."""
        prefixes = list(nodes)
        mask = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for node, prefix in enumerate(prefixes):
            if prefix:
                mask[node] = mask[nodes[prefix[:-1]]]
            mask[node, node] = True
        steps = [(nodes[prefix[:-1]], prefix) for prefix in prefixes if prefix]
        steps += [(nodes[ids], (*ids, last)) for ids in dict.fromkeys(candidates)]
        steps.sort(key=lambda step: step[0])
        number = {step: i for i, step in enumerate(steps)}
        longest, paths = max(map(len, candidates)) + 1, []
        for ids in candidates:
            whole = (*ids, last)
            path = [number[nodes[whole[:i]], whole[: i + 1]] for i in range(len(whole))]
            paths.append(path + [len(steps)] * (longest - len(path)))
        return cls(
            ids=torch.tensor([prefix[-1] if prefix else first for prefix in prefixes]),
            places=torch.tensor([len(prefix) for prefix in prefixes]),
            mask=mask,
            at=torch.tensor([at for at, _ in steps]),
            wanted=torch.tensor([token[-1] for _, token in steps]),
            paths=torch.tensor(paths),
        )


def _trees(candidates: Candidates, first: int, last: int) -> Iterator[_Tree]:
    """Sorted candidates as trees of at most `NODES` nodes, or of one candidate."""
    nodes: dict[tuple[int, ...], int] = {(): 0}
    begin = 0
    for number, ids in enumerate(candidates):
        new = [ids[:i] for i in range(1, len(ids) + 1) if ids[:i] not in nodes]
        if len(nodes) + len(new) > NODES and number > begin:
            yield _Tree.of(nodes, candidates[begin:number], first, last)
            nodes, begin = {(): 0}, number
            new = [ids[:i] for i in range(1, len(ids) + 1)]
        for prefix in new:
            nodes[prefix] = len(nodes)
    yield _Tree.of(nodes, candidates[begin:], first, last)


def _read(decoder: TextDecoder, kept: tuple[KeysValues, ...], visible: Tensor | None, tree: _Tree) -> Tensor:
    """Log-probabilities of the tree's candidates, `(Q, C)`, some questions at a time."""
    device = kept[0].k.device
    ids, places, mask = tree.ids.to(device), tree.places.to(device), tree.mask.to(device)[None]
    wanted, paths = tree.wanted.to(device), tree.paths.to(device)
    at_once = max(1, TOKENS // len(ids))
    rows = []
    for start in range(0, len(kept[0]), at_once):
        some = slice(start, start + at_once)
        own = tuple(kv[some] for kv in kept)
        states = decoder(
            ids.expand(len(own[0]), -1), own, None if visible is None else visible[some], mask=mask, places=places
        )
        logs = log_probabilities(decoder, states, tree.at, wanted)
        rows.append(torch.nn.functional.pad(logs, (0, 1))[:, paths].sum(dim=2))
    return torch.cat(rows)
