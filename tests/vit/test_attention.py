"""The one attention against explicit float64 loops, and against itself by its other paths."""

import pytest
import torch
from torch import Tensor

from regard.vit.attention import Attention, KeysValues
from regard.vit.config import RopeRecipe
from regard.vit.positions import Rope

BATCH, TOKENS, KEYS, DIM = 2, 5, 7, 12

KINDS = {
    "plain": {},
    "wide heads": dict(head_dim=8),  # 3 heads of 8: more than dim
    "narrow heads": dict(head_dim=2),
    "no biases": dict(qkv_bias=False, out_bias=False),
    "qk norm": dict(qk_norm=True, norm_eps=1e-3),
    "sink": dict(sink=True),
    "all at once": dict(head_dim=8, qk_norm=True, sink=True, context_dim=9),
}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.replace(" ", "-"))
def attn(request, noisy) -> Attention:
    return noisy(Attention(DIM, 3, **KINDS[request.param])).double()


def context_for(attn: Attention, keys: int = KEYS) -> Tensor:
    return torch.randn(BATCH, keys, attn.to_k.in_features, dtype=attn.to_k.weight.dtype)


def layer_norm(x: Tensor, norm: torch.nn.Module) -> Tensor:
    if isinstance(norm, torch.nn.Identity):
        return x
    centred = x - x.mean()
    return centred / (centred.pow(2).mean() + norm.eps).sqrt() * norm.weight + norm.bias


def by_hand(attn: Attention, x: Tensor, context: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Loops over images, heads and rows; `allowed` is bool (B, H, T, N)."""
    width = attn.head_dim
    bias = {n: getattr(attn, n).bias for n in ("to_q", "to_k", "to_v")}
    out = torch.zeros(BATCH, x.shape[1], attn.out.out_features, dtype=x.dtype)
    for b in range(BATCH):
        for t in range(x.shape[1]):
            heads, seen = [], False
            for h in range(attn.heads):
                part = slice(h * width, (h + 1) * width)
                project = lambda n, token, part=part: (  # noqa: E731
                    getattr(attn, n).weight[part] @ token + (0 if bias[n] is None else bias[n][part])
                )
                q = layer_norm(project("to_q", x[b, t]), attn.norm_q)
                scores, values = [], []
                for n in range(context.shape[1]):
                    if allowed is None or allowed[b, h, t, n]:
                        k = layer_norm(project("to_k", context[b, n]), attn.norm_k)
                        scores.append((q @ k) / width**0.5)
                        values.append(project("to_v", context[b, n]))
                if not scores:
                    heads.append(torch.zeros(width, dtype=x.dtype))
                    continue
                seen = True
                if attn.sink is not None:
                    scores.append(attn.sink[h])
                    values.append(torch.zeros(width, dtype=x.dtype))
                share = torch.stack(scores).exp()
                heads.append((share / share.sum()) @ torch.stack(values))
            if seen:
                out[b, t] = attn.out.weight @ torch.cat(heads) + (0 if attn.out.bias is None else attn.out.bias)
    return out


def test_equals_explicit_loops_over_heads_and_rows(attn):
    x, context = torch.randn(BATCH, TOKENS, DIM).double(), context_for(attn)
    torch.testing.assert_close(attn(x, context), by_hand(attn, x, context), rtol=1e-10, atol=1e-10)


def test_equals_explicit_loops_under_a_mask_per_head(attn):
    x, context = torch.randn(BATCH, TOKENS, DIM).double(), context_for(attn)
    allowed = torch.rand(BATCH, 3, TOKENS, KEYS) < 0.5
    allowed[0, 1, 2] = False  # one head of one row sees nothing
    allowed[1, :, 3] = False  # no head of this row sees anything
    torch.testing.assert_close(attn(x, context, mask=allowed), by_hand(attn, x, context, allowed), rtol=1e-10, atol=0)


def test_context_defaults_to_the_tokens_themselves(noisy):
    attn = noisy(Attention(DIM, 3))
    x = torch.randn(BATCH, TOKENS, DIM)
    assert torch.equal(attn(x), attn(x, x.clone()))


def test_fused_mix_equals_the_weights_times_the_values(attn):
    q, kv = attn.project(torch.randn(BATCH, TOKENS, DIM).double(), context_for(attn))
    for mask in (None, torch.rand(1, 1, TOKENS, KEYS) < 0.5, torch.randn(BATCH, 3, 1, KEYS).double()):
        torch.testing.assert_close(attn.mix(q, kv, mask), attn.weights(q, kv.k, mask) @ kv.v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sink", [False, True])
def test_fused_mix_equals_the_weights_in_half_precision(noisy, sink):
    attn = noisy(Attention(DIM, 3, sink=sink)).bfloat16()
    q, kv = attn.project(torch.randn(BATCH, TOKENS, DIM).bfloat16())
    rows = attn.weights(q, kv.k)
    assert rows.dtype == torch.float32
    # bf16 keeps 8 bits: inputs are exact, the kernel rounds its output once and its percentages once
    torch.testing.assert_close(attn.mix(q, kv).float(), rows @ kv.v.float(), rtol=2**-7, atol=2**-7)


def test_weights_are_fp32_under_autocast(noisy):
    attn = noisy(Attention(DIM, 3, qk_norm=True))
    x = torch.randn(BATCH, TOKENS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        q, kv = attn.project(x)
        rows = attn.weights(q, kv.k)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(-1), torch.ones(BATCH, 3, TOKENS), rtol=0, atol=1e-6)
    wide = torch.softmax(q.double() @ kv.k.double().transpose(-2, -1) / 2, dim=-1)
    torch.testing.assert_close(rows.double(), wide, rtol=0, atol=1e-6)


def test_rows_sum_to_one_and_to_less_with_a_sink(noisy):
    for sink in (False, True):
        attn = noisy(Attention(DIM, 3, sink=sink))
        q, kv = attn.project(torch.randn(BATCH, TOKENS, DIM))
        sums = attn.weights(q, kv.k).sum(-1)
        if sink:
            assert (sums < 0.999).all()
            assert (sums > 0).all()
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_high_sink_silences_a_head_and_a_low_one_is_no_sink(noisy):
    attn, plain = noisy(Attention(DIM, 3, sink=True)), Attention(DIM, 3)
    plain.load_state_dict({n: p for n, p in attn.state_dict().items() if n != "sink"})
    x = torch.randn(BATCH, TOKENS, DIM)
    with torch.no_grad():
        attn.sink.fill_(-100.0)
        torch.testing.assert_close(attn(x), plain(x))
        attn.sink.fill_(100.0)
        torch.testing.assert_close(attn(x), attn.out.bias.expand(BATCH, TOKENS, -1))


def test_sink_is_learned(noisy):
    attn = noisy(Attention(DIM, 3, sink=True))
    attn(torch.randn(BATCH, TOKENS, DIM)).pow(2).sum().backward()
    assert (attn.sink.grad != 0).all()


def test_remembering_once_answers_every_later_query(attn):
    context = context_for(attn)
    memory = attn.remember(context)
    for tokens in (1, TOKENS):
        x = torch.randn(BATCH, tokens, DIM).double()
        assert torch.equal(attn(x, memory), attn(x, context))


def test_one_remembered_row_serves_many_questions(attn):
    memory = attn.remember(context_for(attn))
    x = torch.randn(4, TOKENS, DIM).double()
    alone = torch.cat([attn(x[i : i + 1], memory[1:2]) for i in range(4)])
    torch.testing.assert_close(attn(x, memory[1:2].expand(4)), alone, rtol=1e-12, atol=1e-12)
    chosen = torch.tensor([1, 0, 0, 1])
    torch.testing.assert_close(
        attn(x, memory[chosen])[[0, 3]], attn(x[[0, 3]], memory[1:2].expand(2)), rtol=1e-12, atol=1e-12
    )


def test_memory_slices_and_expansions_do_not_copy(noisy):
    memory = noisy(Attention(DIM, 3)).remember(torch.randn(BATCH, KEYS, DIM))
    assert len(memory) == BATCH
    first = memory[:1]
    assert first.k.data_ptr() == memory.k.data_ptr() == first.expand(9).k.data_ptr()
    assert len(first.expand(9)) == 9


@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1), (2, 1, 2), (4, 1)])
def test_step_by_step_causal_cache_equals_one_causal_pass(noisy, steps):
    for kind in ({}, dict(qk_norm=True, sink=True, head_dim=8)):
        attn = noisy(Attention(DIM, 3, **kind)).double()
        x = torch.randn(BATCH, TOKENS, DIM).double()
        cache, outputs = None, []
        for piece in x.split(steps, dim=1):
            new = attn.remember(piece)
            cache = new if cache is None else cache.extend(new)
            outputs.append(attn(piece, cache, causal=True))
        torch.testing.assert_close(torch.cat(outputs, dim=1), attn(x, causal=True), rtol=1e-10, atol=1e-10)


def test_rotary_turns_queries_and_keys_but_not_values(noisy):
    attn = noisy(Attention(16, 2))
    x = torch.randn(BATCH, 6, 16)
    rope = Rope((2, 3), 8, RopeRecipe(), 0, 0, torch.device("cpu"))
    plain_q, plain = attn.project(x)
    q, kv = attn.project(x, rotary=rope)
    assert torch.equal(q, rope(plain_q))
    assert torch.equal(kv.k, rope(plain.k))
    assert torch.equal(kv.v, plain.v)
    assert not torch.equal(kv.k, plain.k)
    assert torch.equal(attn(x, rotary=rope), attn(x, attn.remember(x, rope), rotary=rope))


def test_norm_comes_before_rotary(noisy):
    attn = noisy(Attention(16, 2, qk_norm=True))
    x = torch.randn(BATCH, 6, 16)
    rope = Rope((2, 3), 8, RopeRecipe(), 0, 0, torch.device("cpu"))
    keys = attn.to_k(x).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(attn.remember(x, rope).k, rope(attn.norm_k(keys)))


def test_dim_that_heads_do_not_divide_needs_head_dim():
    with pytest.raises(ValueError, match="not a multiple"):
        Attention(10, 3)
    assert Attention(10, 3, head_dim=4).out.in_features == 12


def test_extending_appends_tokens():
    a = KeysValues(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    b = KeysValues(torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4))
    both = a.extend(b)
    assert torch.equal(both.k[:, :, 3:], b.k)
    assert torch.equal(both.v[:, :, :3], a.v)
