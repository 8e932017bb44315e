"""Every kind of attention that words and answers use: the fused kernel against a plain softmax in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.crossattn.text import Cache
from regard.vit.attention import Attention

T, N = 5, 9


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def tree() -> Tensor:
    """Two branches that share their first two tokens."""
    mask = causal(T, T)
    mask[3:, 2] = False
    return mask[None, None]


PADDED = torch.arange(N) < torch.tensor([N, 4, 0])[:, None]  # the last row sees nothing at all
MASKS = {
    "none": None,
    "padding": PADDED[:, None, None],
    "causal": causal(T, N)[None, None],
    "a float for every pair": torch.randn(3, 4, T, N, generator=torch.Generator().manual_seed(1)),
    "floats that hide": torch.zeros(3, 1, T, N).masked_fill(~PADDED[:, None, None], -torch.inf),
    "single rows that see nothing": (torch.arange(T)[:, None] * torch.ones(N) != 2)[None, None],
}


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.nan_to_num(scores.softmax(dim=-1), nan=0.0) @ v


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sink", [False, True])
def test_the_fused_kernel_mixes_as_a_plain_softmax_does(randomize, kind, sink):
    attn, generator = randomize(Attention(32, 4, sink=sink)), torch.Generator().manual_seed(0)
    x, context = torch.randn(3, T, 32, generator=generator), torch.randn(3, N, 32, generator=generator)
    q, kv = attn.project(x, context)
    k, v, mask = kv.k, kv.v, MASKS[kind]
    expected = plain(q, k, v, mask)
    if sink:  # one more key, which scores the sink's logit and hands over nothing
        scores = attn.scores(q, k, mask).double()
        logits = attn.sink.double()[:, None, None].expand(*scores.shape[:-1], 1)
        expected = torch.cat((scores, logits), dim=-1).softmax(dim=-1)[..., :N] @ v.double()
    torch.testing.assert_close(attn.mix(q, kv, mask).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_whole_readings_agree_with_a_plain_softmax(make_qa, picture, questions, norm, monkeypatch):
    qa = make_qa(text=dict(norm=norm), head="generate", decoder=dict(text=dict(dim=32, heads=4, norm=norm)))
    encoded = qa.tokenizer(questions, 64)
    decoder, ids = qa.decoder, torch.randint(4, 20, (len(questions), T), generator=torch.Generator().manual_seed(2))

    def read() -> list[Tensor]:
        with torch.inference_mode():
            memory = qa.look([picture(0), None, picture(1, 16, 48)])
            states = qa.read(memory, encoded.ids, encoded.mask)
            kept = decoder.remember(states)
            whole = decoder(ids, kept, encoded.mask)
            branched = decoder(ids, kept, encoded.mask, mask=tree()[0], places=torch.tensor([0, 1, 2, 2, 3]))
            cache = Cache()
            steps = [decoder(ids[:, i : i + 1], kept, encoded.mask, cache=cache) for i in range(T)]
        return [states, whole, branched, torch.cat(steps, dim=1)]

    fused, calls = read(), []

    def unfused(q, k, v, attn_mask=None, scale=None):
        calls.append(attn_mask)
        assert scale == q.shape[-1] ** -0.5
        return plain(q, k, v, attn_mask).to(q.dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", unfused)
    for one, other in zip(fused, read(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert len(calls) > 10
    torch.testing.assert_close(fused[1], fused[3], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(fused[1][:, 3:], fused[2][:, 3:], atol=1e-3)
