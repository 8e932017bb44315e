"""`lookup` is the k-NN classifier of the papers, whatever the blocks, and attention's own if every key is asked."""

import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard.crossattn import lookup, mixture, nearest
from regard.vit import InputError, look_up


def points(queries: int = 37, keys: int = 211, width: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randn(queries, width, generator=generator)
    known = torch.randn(keys, width, generator=generator) * (0.1 + torch.rand(keys, 1, generator=generator))
    return asked, known, torch.randint(0, 5, (keys,), generator=generator)


def naive(queries: Tensor, keys: Tensor, values: np.ndarray, temperature: float, k: int) -> np.ndarray:
    """One query at a time, in numpy, double precision."""
    q, x = queries.double().numpy(), keys.double().numpy()
    rows = []
    for row in q:
        cosine = x @ row / np.linalg.norm(x, axis=1) / np.linalg.norm(row)
        order = np.argsort(-cosine)[:k]
        weights = np.exp(cosine[order] / temperature)
        rows.append(weights / weights.sum() @ values[order])
    return np.stack(rows)


@pytest.mark.parametrize("k", [1, 7, 20, 211, 500])
@pytest.mark.parametrize("block", [1, 10, 64, 16384])
def test_it_is_the_vote_of_the_nearest_neighbours_whatever_the_block(k: int, block: int) -> None:
    queries, keys, labels = points()
    votes = lookup(queries, keys, labels, k=k, block=block)
    expected = naive(queries, keys, np.eye(5)[labels.numpy()], 0.07, k)
    np.testing.assert_allclose(votes.numpy(), expected, rtol=0, atol=2e-6)
    wide = lookup(queries.double(), keys.double(), labels, k=k, block=block)
    np.testing.assert_allclose(wide.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_it_does_not_depend_on_how_many_queries_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, labels = points(queries=30)
    whole = lookup(queries.double(), keys.double(), labels, k=5, block=50)
    monkeypatch.setattr(sys.modules["regard.crossattn.lookup"], "_QUERIES", 7)
    torch.testing.assert_close(lookup(queries.double(), keys.double(), labels, k=5, block=50), whole)


def test_asking_every_key_is_the_look_up_of_attention() -> None:
    queries, keys, labels = points()
    every = lookup(queries, keys, labels, temperature=0.2, k=None)
    q, x = functional.normalize(queries, dim=1), functional.normalize(keys, dim=1)
    mixed, _ = look_up(q, x, torch.eye(5)[labels], scale=1 / 0.2)
    torch.testing.assert_close(every, mixed)


def test_values_may_be_rows_of_numbers() -> None:
    queries, keys, labels = points()
    rows = torch.randn(len(keys), 3, generator=torch.Generator().manual_seed(1))
    mixed = lookup(queries, keys, rows, k=9)
    np.testing.assert_allclose(mixed.numpy(), naive(queries, keys, rows.numpy(), 0.07, 9), atol=5e-6)
    torch.testing.assert_close(lookup(queries, keys, torch.eye(5)[labels], k=9), lookup(queries, keys, labels, k=9))


def test_one_query_and_one_key_suffice() -> None:
    assert lookup(torch.ones(1, 4), torch.ones(1, 4), torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0]]


def test_the_first_columns_of_the_nearest_answer_for_fewer() -> None:
    queries, keys, labels = points()
    similarity, places = nearest(queries, keys, 50)
    assert (similarity.diff(dim=1) <= 0).all()
    few = mixture(similarity[:, :10], places[:, :10], labels)
    torch.testing.assert_close(few, lookup(queries, keys, labels, k=10))


def test_half_precision_does_not_tie_neighbours() -> None:
    queries, keys, _ = points()
    _, places = nearest(queries.bfloat16(), keys.bfloat16(), 3)
    _, expected = nearest(queries.bfloat16().double(), keys.bfloat16().double(), 3)
    assert torch.equal(places, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": 0}, "k is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"keys": torch.ones(3, 5)}, "of one width"),
        ({"keys": torch.ones(0, 9)}, "no keys"),
        ({"values": torch.full((211,), -1)}, "negative label"),
        ({"values": torch.ones(211)}, "values must be labels"),
        ({"block": 0}, "block is 0"),
    ],
)
def test_what_cannot_be_looked_up_is_told(change: dict[str, object], said: str) -> None:
    queries, keys, labels = points()
    with pytest.raises(InputError, match=said):
        lookup(**{"queries": queries, "keys": keys, "values": labels, **change})  # type: ignore[arg-type]
