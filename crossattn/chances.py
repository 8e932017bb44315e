"""What a decoder's states say of the next token, in log-probabilities, a bounded number of rows at a time.

A row of scores is as long as the vocabulary: thousands of rows at once would need gigabytes that nobody reads, for of
each row only a few numbers are wanted.
R rows, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.crossattn.decoder import TextDecoder

AT_ONCE = 64 * 2**20  # bytes of scores


def rows_at_once(decoder: TextDecoder, dtype: torch.dtype) -> int:
    """How many rows of scores, in fp32 or wider, fit into `AT_ONCE`."""
    return max(1, AT_ONCE // (decoder.config.text.vocab_size * wide(dtype).itemsize))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of log-probabilities: fp32, or fp64 where the model computes in it."""
    return torch.promote_types(dtype, torch.float32)


def best_next(decoder: TextDecoder, states: Tensor, count: int, forbidden: int | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest next tokens of the states `(R, D)`: log-probabilities and token ids, each `(R, count)`, best first.

    A forbidden token gets -inf; the others keep what they have.
    """
    logs, ids = [], []
    for chunk in states.split(rows_at_once(decoder, states.dtype)):
        scores = decoder.logits(chunk)
        scores = scores.to(wide(scores.dtype))
        total = scores.logsumexp(dim=-1, keepdim=True)
        if forbidden is not None:
            scores[:, forbidden] = -torch.inf
        # max, unlike topk, is known to take the first of equals.
        best = scores.max(dim=-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1)
        logs.append(best.values - total)
        ids.append(best.indices)
    return torch.cat(logs), torch.cat(ids)


def log_probabilities(decoder: TextDecoder, states: Tensor, at: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of some tokens at some places, `(Q, P)`: of `ids[p]` to follow `states[:, at[p]]`.

    Args:
        states: `(Q, N, D)`.
        at: the places `(P,)`, rising, on the CPU.
        ids: the token ids `(P,)`, on the device of the states.
    """
    if len(states) > (rows := rows_at_once(decoder, states.dtype)):
        return torch.cat([log_probabilities(decoder, some, at, ids) for some in states.split(rows)])
    pieces = []
    for first, last, wanted in _places_at_once(decoder, states, at):
        scores = decoder.logits(states[:, first:last])
        scores = scores.to(wide(scores.dtype))
        here = (at[wanted] - first).to(states.device)
        pieces.append(scores[:, here, ids[wanted]] - scores.logsumexp(dim=-1)[:, here])
    return torch.cat(pieces, dim=1)


def _places_at_once(decoder: TextDecoder, states: Tensor, at: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Ranges of places whose scores fit into memory, and which of the sorted `at` lie in each."""
    step = rows_at_once(decoder, states.dtype) // len(states)
    for first in range(0, states.shape[1], step):
        last = min(first + step, states.shape[1])
        begin, end = torch.searchsorted(at, torch.tensor([first, last])).tolist()
        if begin < end:
            yield first, last, slice(begin, end)
