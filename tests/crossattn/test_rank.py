"""Ranking against teacher forcing, one candidate at a time, in fp64."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from regard.crossattn import rank as ranking
from regard.crossattn.generate import generate
from regard.crossattn.rank import rank

# Prefixes of each other, shared beginnings, one with the beginning token in it, and one of nothing but its end.
CANDIDATES = [(5,), (5, 6), (5, 6, 7, 8), (9, 6), (9,), (4, 4, 4), (5, 7), (), (1, 5), (19, 3, 5, 6, 7)]
COUNTS = (9, 1, 4, 7)
TEXTS = {
    "post": dict(norm="post"),
    "pre": dict(norm="pre", qk_norm=True, gate=True, cross_every=2),
}


@pytest.fixture(params=TEXTS)
def decoder(make_decoder, request):
    return make_decoder(text=TEXTS[request.param])


def asked(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    states = torch.randn(4, 9, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return states.to(dtype), torch.arange(9) < torch.tensor(COUNTS)[:, None]


def teacher_forced(decoder, candidates=CANDIDATES) -> Tensor:
    """Log-probabilities `(Q, C)`: every candidate read by itself, of every question without its padding."""
    decoder = decoder.double()
    states, first, last = asked(torch.float64)[0], decoder.config.first, decoder.config.last
    rows = []
    for row, count in zip(states, COUNTS, strict=True):
        kept, logs = decoder.remember(row[None, :count]), []
        for ids in candidates:
            scores = decoder.logits(decoder(torch.tensor([[first, *ids]]), kept))[0].log_softmax(dim=-1)
            logs.append(sum(scores[i, token] for i, token in enumerate((*ids, last))))
        rows.append(torch.stack(logs))
    return torch.stack(rows)


def ranked(decoder, candidates=CANDIDATES, dtype=torch.float32, **options) -> Tensor:
    states, visible = asked(dtype)
    decoder = decoder.to(dtype)
    return rank(decoder, decoder.remember(states), visible, candidates, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_log_probabilities_are_those_of_teacher_forcing(decoder, dtype, tolerance):
    logs = ranked(decoder, dtype=dtype)
    assert logs.dtype == dtype
    assert logs.shape == (4, len(CANDIDATES))
    torch.testing.assert_close(logs.double(), teacher_forced(decoder), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("nodes", "tokens", "scores"), [(1, 1, 1), (6, 8, 60 * 4), (9, 30, 10**6)])
def test_trees_questions_and_scores_in_pieces_give_the_same(decoder, monkeypatch, nodes, tokens, scores):
    whole, read = ranked(decoder), []
    monkeypatch.setattr(ranking, "NODES", nodes)
    monkeypatch.setattr(ranking, "TOKENS", tokens)
    monkeypatch.setattr("regard.crossattn.chances.AT_ONCE", scores)
    forward, logits = type(decoder).forward, type(decoder).logits

    def watched(self, ids, *args, **options):
        read.append(ids.shape)
        assert ids.numel() <= max(tokens, ids.shape[1])
        assert ids.shape[1] <= max(nodes, 1 + 5)
        return forward(self, ids, *args, **options)

    def bounded(self, states):
        assert states.shape[:-1].numel() * 20 * 4 <= max(scores, 20 * 4)
        return logits(self, states)

    monkeypatch.setattr(type(decoder), "forward", watched)
    monkeypatch.setattr(type(decoder), "logits", bounded)
    torch.testing.assert_close(ranked(decoder), whole, rtol=0, atol=1e-5)
    assert len(read) > 1


def test_shared_prefixes_are_read_once_and_questions_never_copied(decoder, monkeypatch):
    states, visible = asked()
    kept, calls = decoder.remember(states), []
    forward = type(decoder).forward

    def watched(self, ids, kept, *args, **options):
        calls.append((ids.shape, [kv.k.data_ptr() for kv in kept]))
        return forward(self, ids, kept, *args, **options)

    monkeypatch.setattr(type(decoder), "forward", watched)
    rank(decoder, kept, visible, CANDIDATES)
    prefixes = {ids[:length] for ids in CANDIDATES for length in range(len(ids) + 1)}
    assert calls == [((4, len(prefixes)), [kv.k.data_ptr() for kv in kept])]


def test_log_probabilities_do_not_depend_on_the_other_candidates_or_their_order(decoder):
    whole = ranked(decoder)
    for seed in range(5):
        order = random.Random(seed).sample(range(len(CANDIDATES)), 7)
        some = ranked(decoder, [CANDIDATES[i] for i in order])
        torch.testing.assert_close(some, whole[:, order], rtol=0, atol=1e-5)
    back = ranked(decoder, CANDIDATES[::-1])
    assert torch.equal(back.flip(1), whole)


@pytest.mark.parametrize("shortlist", [None, 3])
def test_log_probabilities_do_not_depend_on_batch_mates_order_or_padding(decoder, shortlist):
    states, visible = asked()
    whole = rank(decoder, decoder.remember(states), visible, CANDIDATES, shortlist=shortlist)
    for batch in range(1, 5):
        for order in itertools.permutations(range(4), batch):
            for padding in (0, 10, 60):
                rows = torch.nn.functional.pad(states[list(order)], (0, 0, 0, padding), value=7.0)
                seen = torch.nn.functional.pad(visible[list(order)], (0, padding))
                some = rank(decoder, decoder.remember(rows), seen, CANDIDATES, shortlist=shortlist)
                torch.testing.assert_close(some, whole[list(order)], rtol=0, atol=1e-5)


def test_a_written_answer_is_ranked_at_what_it_was_written_for(make_decoder):
    decoder = make_decoder(beams=5, max_tokens=5)
    states, visible = asked()
    kept = decoder.remember(states)
    for question, written in enumerate(generate(decoder, kept, visible, decoder.config)):
        ended = [w for w in written if w.ended]
        logs = rank(decoder, kept, visible, [w.ids for w in ended])[question].tolist()
        assert logs == pytest.approx([w.log_probability for w in ended], abs=1e-5)


def test_all_there_is_to_say_sums_to_one(make_decoder):
    """Every answer of up to four tokens, and every beginning of four: nothing else can be written."""
    decoder = make_decoder(vocab_size=5, end=1.0).double()
    others = (0, 1, 3, 4)
    ended = [ids for length in range(4) for ids in itertools.product(others, repeat=length)]
    logs = ranked(decoder, ended, torch.float64)
    longer = list(itertools.product(others, repeat=4))
    # Nothing of four tokens or more is in `ended`; what is missing to 1 is theirs.
    cut = torch.stack([teacher_cut(decoder, ids) for ids in longer], dim=1)
    torch.testing.assert_close(logs.exp().sum(1) + cut.exp().sum(1), torch.ones(4, dtype=torch.float64))


def teacher_cut(decoder, ids: tuple[int, ...]) -> Tensor:
    """Log-probability that an answer begins so, for each question."""
    states, visible = asked(torch.float64)
    read = torch.tensor([[decoder.config.first, *ids[:-1]]]).expand(4, -1)
    logs = decoder.logits(decoder(read, decoder.remember(states), visible)).log_softmax(dim=-1)
    return sum(logs[:, i, token] for i, token in enumerate(ids))


# The shortlist


def test_a_shortlist_ranks_the_candidates_with_the_likeliest_first_tokens(decoder):
    whole = ranked(decoder)
    states, visible = asked()
    begin = torch.full((4, 1), decoder.config.first)
    first = decoder.logits(decoder(begin, decoder.remember(states), visible))[:, 0].log_softmax(dim=-1)
    for size in range(1, len(CANDIDATES) + 3):
        logs = ranked(decoder, shortlist=size)
        kept = logs > -math.inf
        assert (kept.sum(1) == min(size, len(CANDIDATES))).all()
        torch.testing.assert_close(logs[kept], whole[kept], rtol=0, atol=1e-5)
        for question in range(4):
            # Likeliest first token, then the order of a dictionary: (5,), (5, 6), (5, 6, 7, 8), (5, 7).
            chances = [first[question, (*ids, 2)[0]].item() for ids in CANDIDATES]
            order = sorted(range(len(CANDIDATES)), key=lambda i: (-chances[i], CANDIDATES[i]))
            assert set(kept[question].nonzero().flatten().tolist()) == set(order[:size])


def test_a_shortlist_does_not_depend_on_the_order_of_candidates(decoder):
    for size in (1, 2, 3, 5):
        logs = ranked(decoder, shortlist=size)
        torch.testing.assert_close(ranked(decoder, CANDIDATES[::-1], shortlist=size).flip(1), logs, rtol=0, atol=1e-5)


def test_candidates_with_one_first_token_are_listed_in_the_order_of_a_dictionary(make_decoder):
    candidates = [(5, a, b) for a in range(20) for b in range(20)]
    mixed = random.Random(0).sample(candidates, len(candidates))
    kept = ranked(make_decoder(), mixed, shortlist=150) > -math.inf
    for row in kept:
        assert {mixed[i] for i in row.nonzero().flatten().tolist()} == set(candidates[:150])


# Gradients, precision, odd lists


def test_gradients_are_those_of_teacher_forcing(decoder):
    weight = torch.randn(4, len(CANDIDATES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(logs: Tensor) -> list[Tensor]:
        return torch.autograd.grad((logs * weight).sum(), list(decoder.parameters()))

    decoder = decoder.double()
    pairs = zip(gradients(ranked(decoder, dtype=torch.float64)), gradients(teacher_forced(decoder)), strict=True)
    for ours, reference in pairs:
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-9)


def test_half_precision_is_summed_in_fp32(make_decoder):
    decoder = make_decoder()
    whole = ranked(decoder)
    logs = ranked(decoder, dtype=torch.bfloat16)
    assert logs.dtype == torch.float32
    torch.testing.assert_close(logs, whole, rtol=0.05, atol=0.2)


def test_no_candidates_have_no_log_probabilities(make_decoder):
    assert ranked(make_decoder(), []).shape == (4, 0)


def test_a_candidate_given_twice_is_ranked_twice(make_decoder):
    logs = ranked(make_decoder(), [(5, 6), (5,), (5, 6)])
    assert torch.equal(logs[:, 0], logs[:, 2])
