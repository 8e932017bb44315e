from itertools import pairwise

import pytest
import torch

from regard.crossattn import TextConfig, TextEncoder

CONTEXT_DIM = 20


@pytest.fixture
def make(randomize):
    def build(**options):
        torch.manual_seed(0)
        encoder = TextEncoder(TextConfig(**dict(vocab_size=30, dim=16, depth=2, heads=4) | options), CONTEXT_DIM)
        torch.nn.init.normal_(encoder.positions, std=0.5)
        return randomize(encoder).eval()

    return build


@pytest.fixture
def batch():
    """Three questions of 3, 7 and 5 tokens, and two images of 6 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(30, (3, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([3, 7, 5])[:, None]
    return ids, mask, torch.randn(2, 6, CONTEXT_DIM, generator=generator), torch.tensor([1, 0, 1])


def remember(encoder, images):
    return tuple(cross.remember(images) for cross in encoder.asking)


@pytest.mark.parametrize(("depth", "every"), [(1, 1), (2, 1), (2, 2), (5, 2), (5, 3), (6, 2), (6, 3)])
def test_every_nth_layer_asks_and_the_last_always(make, batch, depth, every):
    encoder = make(depth=depth, cross_every=every)
    asks = [layer.cross is not None for layer in encoder.layers]
    assert asks[-1]
    assert sum(asks) == len(encoder.asking) == -(-depth // every)
    places = [i for i, a in enumerate(asks) if a]
    assert all(b - a == every for a, b in pairwise(places))
    ids, mask, images, of = batch
    asked = []
    encoder(ids, mask, remember(encoder, images), of=of, asked=asked)
    assert len(asked) == len(encoder.asking)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_padding_and_what_stands_in_it_change_nothing(make, batch, norm, pooling, qk_norm):
    encoder = make(norm=norm, pooling=pooling, qk_norm=qk_norm, max_tokens=40)
    ids, mask, images, of = batch
    memory = remember(encoder, images)
    together = encoder.pool(encoder(ids, mask, memory, of=of), mask)
    junk = torch.where(mask, ids, (ids + 11) % 30)
    torch.testing.assert_close(encoder.pool(encoder(junk, mask, memory, of=of), mask), together, atol=1e-6, rtol=0)
    wide_ids = torch.nn.functional.pad(ids, (0, 30), value=3)
    wide_mask = torch.nn.functional.pad(mask, (0, 30))
    wide = encoder.pool(encoder(wide_ids, wide_mask, memory, of=of), wide_mask)
    torch.testing.assert_close(wide, together, atol=1e-5, rtol=0)
    for row, length in enumerate((3, 7, 5)):
        one = slice(row, row + 1)
        states = encoder(ids[one, :length], mask[one, :length], memory, of=of[one])
        pooled = encoder.pool(states, mask[one, :length])
        torch.testing.assert_close(pooled[0], together[row], atol=1e-5, rtol=0)
        expected = states[0, 0] if pooling == "first" else states[0].mean(dim=0)
        torch.testing.assert_close(pooled[0], expected, atol=1e-6, rtol=0)
    assert together.std(dim=0).max() > 0.1


def test_norms_stand_where_they_are_named(make, batch):
    ids, mask, images, of = batch
    states = {}
    for norm in ("pre", "post"):
        encoder = make(norm=norm)
        states[norm] = encoder(ids, mask, remember(encoder, images), of=of)
        last = encoder.layers[-1].norm3 if norm == "post" else encoder.norm
        plain = (states[norm] - last.bias) / last.weight
        torch.testing.assert_close(plain.mean(dim=-1), torch.zeros(3, 7), atol=1e-4, rtol=0)
        torch.testing.assert_close(plain.var(dim=-1, unbiased=False), torch.ones(3, 7), atol=1e-3, rtol=0)
    assert not torch.allclose(states["pre"], states["post"], atol=0.1)


def test_word_order_matters(make, batch):
    encoder = make()
    ids, mask, images, of = batch
    memory = remember(encoder, images)
    ids = ids[1:2]
    assert len(set(ids[0].tolist())) > 2
    straight = encoder.pool(encoder(ids, mask[1:2], memory, of=of[1:2]), mask[1:2])
    turned = encoder.pool(encoder(ids.flip(1), mask[1:2], memory, of=of[1:2]), mask[1:2])
    assert not torch.allclose(straight, turned, atol=1e-2)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_acts_in_training_only(make, batch, norm):
    ids, mask, images, of = batch
    encoder, without = make(norm=norm, dropout=0.3), make(norm=norm)
    memory = remember(encoder, images)
    assert torch.equal(encoder(ids, mask, memory, of=of), without(ids, mask, memory, of=of))
    encoder.train()
    assert not torch.equal(encoder(ids, mask, memory, of=of), encoder(ids, mask, memory, of=of))
    without.train()
    assert torch.equal(without(ids, mask, memory, of=of), without(ids, mask, memory, of=of))


def test_each_layer_reads_its_own_memory(make, batch):
    encoder = make(depth=3, cross_every=2)
    ids, mask, images, of = batch
    first, second = remember(encoder, images)
    straight = encoder(ids, mask, (first, second), of=of)
    assert not torch.allclose(straight, encoder(ids, mask, (second, first), of=of), atol=1e-3)
    assert not torch.allclose(straight, encoder(ids, mask, of=of), atol=1e-3)
