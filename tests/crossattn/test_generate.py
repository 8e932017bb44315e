"""Writing answers, against every sequence there is, against reading everything anew, and against transformers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.crossattn.chances import best_next
from regard.crossattn.generate import generate


def asked(questions: int, tokens: int = 6, width: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(questions, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(*counts: int) -> Tensor:
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]


@torch.no_grad()
def every_answer(decoder, states: Tensor, longest: int) -> dict[tuple[int, ...], float]:
    """Log-probability of every answer of at most `longest` tokens, the end counted; `states (1, T, D)`.

    All prefixes of one length are read at once, from their beginning.
    """
    config, kept, answers = decoder.config, decoder.remember(states), {}
    followed = {(): 0.0}
    for _ in range(longest):
        ids = torch.tensor([[config.first, *prefix] for prefix in followed])
        logs = decoder.logits(decoder(ids, kept)[:, -1]).log_softmax(dim=-1).tolist()
        longer = {}
        for (prefix, log), row in zip(followed.items(), logs, strict=True):
            for token, its in enumerate(row):
                if token == config.last:
                    answers[prefix] = log + its
                else:
                    longer[(*prefix, token)] = log + its
        followed = longer
    return answers | followed  # no prefix is as long as the answers that did not end


# Against every answer there is


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_of_all_answers(make_decoder, penalty):
    decoder = make_decoder(vocab_size=5, end=1.0, beams=500, max_tokens=4, length_penalty=penalty).double()
    states = asked(3)
    found = generate(decoder, decoder.remember(states), None, decoder.config)
    for question, written in enumerate(found):
        answers = every_answer(decoder, states[question : question + 1], 4)
        length = {ids: min(len(ids) + 1, 4) for ids in answers}
        best = sorted(answers, key=lambda ids: -answers[ids] / length[ids] ** penalty)
        assert len(written) == len(answers) == 341
        assert [w.ids for w in written] == best
        assert [w.log_probability for w in written] == pytest.approx([answers[ids] for ids in best], abs=1e-9)
        assert all(w.ended == (len(w.ids) < 4) for w in written)
        # Something must be written: the answers that end and those that are cut share all there is.
        assert math.fsum(math.exp(w.log_probability) for w in written) == pytest.approx(1, abs=1e-9)
        assert math.fsum(math.exp(w.log_probability) for w in written if w.ended) < 1


@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_log_probabilities_are_exact(make_decoder, beams):
    decoder = make_decoder(vocab_size=6, beams=beams, max_tokens=4, end=1.0).double()
    states = asked(4, seed=1)
    for question, written in enumerate(generate(decoder, decoder.remember(states), None, decoder.config)):
        answers = every_answer(decoder, states[question : question + 1], 4)
        assert len(written) == beams or (beams == 1 and written)
        assert len({w.ids for w in written}) == len(written)
        for w in written:
            assert w.log_probability == pytest.approx(answers[w.ids], abs=1e-9)
        scores = [w.score(1.0) for w in written]
        assert scores == sorted(scores, reverse=True)


def test_a_shortest_length_forbids_the_end_and_changes_no_probability(make_decoder):
    decoder = make_decoder(vocab_size=6, beams=1000, max_tokens=4, min_tokens=2, end=4.0).double()
    states = asked(2)
    for question, written in enumerate(generate(decoder, decoder.remember(states), None, decoder.config)):
        answers = every_answer(decoder, states[question : question + 1], 4)
        assert {w.ids for w in written} == {ids for ids in answers if len(ids) >= 2}
        assert all(w.log_probability == pytest.approx(answers[w.ids], abs=1e-9) for w in written)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("longest", [1, 2, 5])
def test_no_answer_is_longer_than_asked_its_end_counted(make_decoder, beams, longest):
    decoder = make_decoder(beams=beams, max_tokens=longest, end=-9.0)
    for written in generate(decoder, decoder.remember(asked(2).float()), None, decoder.config):
        assert all(len(w.ids) == longest and not w.ended for w in written)
    decoder.bias.data[2] += 40
    for written in generate(decoder, decoder.remember(asked(2).float()), None, decoder.config):
        assert written[0].ids == ()
        assert written[0].ended
        assert all(len(w.ids) + w.ended <= longest for w in written)


def test_a_vocabulary_smaller_than_the_beams_gives_what_there_is(make_decoder):
    decoder = make_decoder(vocab_size=3, beams=5, max_tokens=2, end=0.0)
    (written,) = generate(decoder, decoder.remember(asked(1).float()), None, decoder.config)
    assert len(written) == 5  # of the 7 there are, two too unlikely
    decoder = make_decoder(vocab_size=3, beams=7, max_tokens=2, end=0.0)
    (written,) = generate(decoder, decoder.remember(asked(1).float()), None, decoder.config)
    assert {w.ids for w in written} == {(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}


# An answer depends on its own question only

ALONE = [dict(beams=beams, max_tokens=6) for beams in range(1, 6)]


@pytest.mark.parametrize("config", ALONE, ids=str)
@pytest.mark.parametrize(("norm", "end"), [("post", 2.0), ("pre", 4.0)])
def test_answers_do_not_depend_on_batch_mates_order_or_padding(make_decoder, config, norm, end):
    text = {} if norm == "post" else dict(norm="pre", qk_norm=True, gate=True, cross_every=2)
    decoder = make_decoder(**config, text=text, end=end)
    states, counts = asked(4, 9, seed=2).float(), (9, 1, 4, 7)
    alone = [
        generate(decoder, decoder.remember(states[i : i + 1, :count]), None, decoder.config)[0]
        for i, count in enumerate(counts)
    ]
    assert len({len(written[0].ids) for written in alone}) > 1, "they should not all be done at once"
    for batch in range(1, 5):
        for order in itertools.permutations(range(4), batch):
            for padding in (0, 10, 60) if order == tuple(range(batch)) else (0,):
                rows = torch.nn.functional.pad(states[list(order)], (0, 0, 0, padding), value=7.0)
                visible = lengths(*(counts[i] for i in order), 9 + padding)[:-1]
                found = generate(decoder, decoder.remember(rows), visible, decoder.config)
                for i, written in zip(order, found, strict=True):
                    assert [w.ids for w in written] == [w.ids for w in alone[i]]
                    for one, other in zip(written, alone[i], strict=True):
                        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-5)


@pytest.mark.parametrize("beams", range(1, 6))
def test_cached_steps_equal_reading_everything_anew_at_every_step(make_decoder, beams, monkeypatch):
    decoder = make_decoder(beams=beams, max_tokens=8, end=0.0)
    states, visible = asked(4, 9, seed=3).float(), lengths(9, 1, 4, 7)
    steps: list[Tensor] = []

    def watched(decoder, states, *rest):
        steps.append(states)
        return best_next(decoder, states, *rest)

    monkeypatch.setattr("regard.crossattn.generate.best_next", watched)
    cached = generate(decoder, decoder.remember(states), visible, decoder.config)
    with_cache, steps[:] = list(steps), []

    forward, read = type(decoder).forward, {}

    def anew(self, ids, kept, visible=None, of=None, *, cache, **options):
        """Remembers which tokens the cache stands for, and reads them all from the beginning without it."""
        before = read.get(cache)
        if before is not None:
            ids = torch.cat((before, ids), dim=1)
        read[cache] = ids
        monkeypatch.setattr(cache, "choose", lambda rows: read.update({cache: read[cache][rows]}))
        return forward(self, ids, kept, visible, of, **options)

    monkeypatch.setattr(type(decoder), "forward", anew)
    uncached = generate(decoder, decoder.remember(states), visible, decoder.config)
    assert len(with_cache) == len(steps) == 8
    for ours, reference in zip(with_cache, steps, strict=True):
        assert (ours - reference).abs().max() < 1e-5
    assert [[w.ids for w in written] for written in cached] == [[w.ids for w in written] for written in uncached]


def test_keys_and_values_of_questions_are_never_copied_for_beams(make_decoder, monkeypatch):
    decoder = make_decoder(beams=4, max_tokens=5, end=-9.0)
    kept = decoder.remember(asked(3).float())
    forward, seen = type(decoder).forward, []

    def watched(self, ids, kept, *rest, **options):
        seen.append((len(ids), [kv.k.data_ptr() for kv in kept]))
        return forward(self, ids, kept, *rest, **options)

    monkeypatch.setattr(type(decoder), "forward", watched)
    generate(decoder, kept, None, decoder.config)
    assert [rows for rows, _ in seen] == [3, 12, 12, 12, 12]
    assert all(places == [kv.k.data_ptr() for kv in kept] for _, places in seen)


def test_questions_that_are_done_cost_nothing_more(make_decoder, monkeypatch):
    decoder = make_decoder(beams=2, max_tokens=10, end=2.0)
    states, rows = asked(8, seed=2).float(), []
    forward = type(decoder).forward
    monkeypatch.setattr(
        type(decoder), "forward", lambda self, ids, *a, **k: rows.append(len(ids)) or forward(self, ids, *a, **k)
    )
    found = generate(decoder, decoder.remember(states), None, decoder.config)
    assert rows[:2] == [8, 16]
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < 16
    assert all(len(written) == 2 for written in found)


def test_log_probabilities_come_in_chunks_of_the_vocabulary(make_decoder, monkeypatch):
    decoder = make_decoder(beams=3, max_tokens=6).double()
    kept = decoder.remember(asked(5))
    whole = generate(decoder, kept, None, decoder.config)
    largest, logits = [], type(decoder).logits
    monkeypatch.setattr("regard.crossattn.chances.AT_ONCE", 4 * 20 * 8)
    monkeypatch.setattr(
        type(decoder), "logits", lambda self, states: largest.append(len(states)) or logits(self, states)
    )
    assert [[w.ids for w in written] for written in generate(decoder, kept, None, decoder.config)] == [
        [w.ids for w in written] for written in whole
    ]
    assert max(largest) == 4


def test_a_question_whose_scores_are_no_numbers_has_no_answer_and_harms_no_other(make_decoder):
    decoder = make_decoder(beams=3, max_tokens=5)
    states = asked(3).float()
    alone = generate(decoder, decoder.remember(states[[0, 2]]), None, decoder.config)
    states[1, 0, 0] = torch.nan
    first, none, last = generate(decoder, decoder.remember(states), None, decoder.config)
    assert none == []
    assert [[w.ids for w in written] for written in (first, last)] == [[w.ids for w in written] for written in alone]
    decoder.bias.data[5] = torch.inf
    assert generate(decoder, decoder.remember(states), None, decoder.config) == [[], [], []]
    decoder.bias.data[3:] = -torch.inf  # only the end and three others are left
    for written in generate(decoder, decoder.remember(states[:1]), None, decoder.config):
        assert len(written) == 3
        assert all(set(w.ids) <= {0, 1} for w in written)


# Against transformers


def theirs(decoder, vocab_size: int, **settings):
    """transformers' BLIP decoder with the weights of ours."""
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    text, body = decoder.config.text, decoder.body
    config = BlipTextConfig(
        vocab_size=vocab_size, hidden_size=text.dim, encoder_hidden_size=24, num_hidden_layers=text.depth,
        num_attention_heads=text.heads, intermediate_size=4 * text.dim, max_position_embeddings=text.max_tokens,
        layer_norm_eps=text.norm_eps, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True,
        bos_token_id=1, sep_token_id=2, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, **settings,
    )  # fmt: skip
    model = BlipTextLMHeadModel(config).eval().double()
    tensors = {
        "bert.embeddings.word_embeddings.weight": body.words.weight,
        "bert.embeddings.position_embeddings.weight": body.positions,
        "cls.predictions.decoder.weight": decoder.out.weight,
        "cls.predictions.decoder.bias": decoder.bias,
        "cls.predictions.bias": decoder.bias,
    }
    modules = {
        "bert.embeddings.LayerNorm": body.norm,
        "cls.predictions.transform.dense": decoder.transform,
        "cls.predictions.transform.LayerNorm": decoder.norm,
    }
    for number, layer in enumerate(body.layers):
        at = f"bert.encoder.layer.{number}"
        for name, attn, norm in (
            ("attention", layer.attn, layer.norm1),
            ("crossattention", layer.cross.attn, layer.norm2),
        ):
            modules |= {
                f"{at}.{name}.self.query": attn.to_q,
                f"{at}.{name}.self.key": attn.to_k,
                f"{at}.{name}.self.value": attn.to_v,
                f"{at}.{name}.output.dense": attn.out,
                f"{at}.{name}.output.LayerNorm": norm,
            }
        modules |= {
            f"{at}.intermediate.dense": layer.mlp.fc1,
            f"{at}.output.dense": layer.mlp.fc2,
            f"{at}.output.LayerNorm": layer.norm3,
        }
    for name, module in modules.items():
        tensors |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_answers_are_those_of_transformers(make_decoder, beams, penalty):
    """Token ids and scores, n-best, for answers that end early, late and never.

    Without padding: the cross-attention of transformers' BLIP decoder (5.24) loses its mask on the way.
    """
    text = dict(dim=48, heads=12, norm_eps=1e-12, max_tokens=16)
    endings = set()
    for end, least in ((-1.0, 0), (1.5, 0), (3.0, 0), (4.0, 2)):
        decoder = make_decoder(vocab_size=40, text=text, end=end).double()
        config = replace(decoder.config, beams=beams, max_tokens=9, min_tokens=least, length_penalty=penalty)
        states = asked(12, 9, seed=4)
        ours = generate(decoder, decoder.remember(states), None, config)
        reference = theirs(decoder, 40).generate(
            input_ids=torch.full((12, 1), 1),
            encoder_hidden_states=states,
            num_beams=beams, num_return_sequences=beams, do_sample=False, length_penalty=penalty, early_stopping=False,
            max_length=10, min_length=1 + least, eos_token_id=2, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        scores = reference.sequences_scores.view(12, beams) if beams > 1 else None
        for question, rows in enumerate(reference.sequences.view(12, beams, -1).tolist()):
            assert len(ours[question]) == beams
            for place, (row, written) in enumerate(zip(rows, ours[question], strict=True)):
                ids = (*written.ids, 2) if written.ended else written.ids
                assert [1, *ids] == row[: 1 + len(ids)]
                assert set(row[1 + len(ids) :]) <= {0, 2}  # it fills up with padding, or with ends where padding is 0
                endings.add((written.ended, len(ids)))
                if scores is not None:
                    assert written.score(penalty) == pytest.approx(scores[question, place].item(), rel=1e-4, abs=1e-5)
    assert len(endings) > 5, "the answers should be of several lengths, some cut"
