import math

import pytest
import torch

from regard.crossattn import CrossAttention

IMAGES, TOKENS, QUESTIONS, WORDS = 3, 7, 5, 4
DIM, CONTEXT_DIM, HEADS, HEAD_DIM = 12, 10, 2, 5  # heads * head_dim is not dim


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(QUESTIONS, WORDS, DIM, generator=generator)
    context = torch.randn(IMAGES, TOKENS, CONTEXT_DIM, generator=generator)
    return x, context, torch.tensor([2, 0, 0, 1, 2])


@pytest.fixture
def make(randomize):
    def build(**options):
        cross = randomize(CrossAttention(DIM, HEADS, CONTEXT_DIM, head_dim=HEAD_DIM, **options), seed=2)
        if cross.gate is not None:
            torch.nn.init.constant_(cross.gate, -0.8)
        return cross

    return build


def normed(vector, norm):
    if not isinstance(norm, torch.nn.LayerNorm):
        return vector
    centred = vector - vector.mean()
    return centred / torch.sqrt((centred**2).mean() + norm.eps) * norm.weight.double() + norm.bias.double()


def by_hand(cross, x, context, of, visible):
    """One dot product at a time, in float64."""
    attn = cross.attn
    x, context = x.double(), context.double()

    def project(linear, token, head):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        return linear.weight.double()[rows] @ token + linear.bias.double()[rows]

    result = torch.zeros(len(x), WORDS, DIM, dtype=torch.float64)
    for question in range(len(x)):
        image = of[question]
        seen = [n for n in range(TOKENS) if visible is None or visible[image, n]]
        for word in range(WORDS):
            if not seen:
                continue
            heads = []
            for head in range(HEADS):
                query = normed(project(attn.to_q, x[question, word], head), attn.norm_q)
                keys = [normed(project(attn.to_k, context[image, n], head), attn.norm_k) for n in seen]
                values = [project(attn.to_v, context[image, n], head) for n in seen]
                weights = [math.exp(float(query @ key) / math.sqrt(HEAD_DIM)) for key in keys]
                heads.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
            out = attn.out.weight.double() @ torch.cat(heads) + attn.out.bias.double()
            result[question, word] = out if cross.gate is None else math.tanh(float(cross.gate)) * out
    return result


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_an_explicit_loop(make, inputs, gate, qk_norm, masked):
    cross, (x, context, of) = make(gate=gate, qk_norm=qk_norm), inputs
    visible = torch.rand(IMAGES, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
    with torch.no_grad():
        out = cross(x, context, mask=visible, of=of)
        expected = by_hand(cross, x, context, of, visible)
    assert expected.std() > 0.1
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_remembered_once_equals_asked_directly(make, inputs):
    cross, (x, context, of) = make(gate=True, qk_norm=True), inputs
    memory = cross.remember(context)
    assert torch.equal(cross(x, memory, of=of), cross(x, context, of=of))
    for count in (1, 2, QUESTIONS):
        torch.testing.assert_close(cross(x[:count], memory, of=of[:count]), cross(x, memory, of=of)[:count])


def test_of_names_the_context_row_of_each_question(make, inputs):
    cross, (x, context, of) = make(), inputs
    out = cross(x, context, of=of)
    for question, image in enumerate(of.tolist()):
        alone = cross(x[question : question + 1], context[image : image + 1])
        torch.testing.assert_close(out[question], alone[0])
    assert not torch.allclose(out, cross(x, context, of=of.flip(0)))


def test_without_of_row_i_asks_row_i_and_a_single_context_is_asked_by_all(make, inputs):
    cross, (x, context, _) = make(), inputs
    torch.testing.assert_close(cross(x[:IMAGES], context), cross(x[:IMAGES], context, of=torch.arange(IMAGES)))
    torch.testing.assert_close(cross(x, context[:1]), cross(x, context, of=torch.zeros(QUESTIONS, dtype=torch.long)))


def test_a_mask_on_a_single_context_holds_for_all(make, inputs):
    cross, (x, context, _) = make(), inputs
    visible = torch.arange(TOKENS)[None] < 4
    torch.testing.assert_close(cross(x, context[:1], mask=visible), cross(x, context[:1, :4]))


def test_a_new_gate_adds_exactly_nothing_yet_can_open(inputs):
    cross, (x, context, of) = CrossAttention(DIM, HEADS, CONTEXT_DIM, gate=True), inputs
    out = cross(x, context, of=of)
    assert torch.equal(out, torch.zeros_like(out))
    out.pow(2).sum().backward()
    out = cross(x, context, of=of)
    out.sum().backward()
    assert cross.gate.grad.abs() > 0


@pytest.mark.parametrize("gate", [False, True])
def test_a_row_that_may_read_nothing_adds_exactly_zero_with_finite_gradients(make, inputs, gate):
    cross, (x, context, of) = make(gate=gate, qk_norm=True), inputs
    x, context = x.requires_grad_(), context.requires_grad_()
    visible = torch.ones(IMAGES, TOKENS, dtype=torch.bool)
    visible[2] = False
    out = cross(x, context, mask=visible, of=of)
    blind = of == 2
    assert torch.equal(out[blind], torch.zeros_like(out[blind])), "bias included"
    assert (out[~blind] != 0).all()
    torch.testing.assert_close(out[~blind], cross(x, context, of=of)[~blind])
    out.pow(2).sum().backward()
    for tensor in (x, context, *cross.parameters()):
        assert torch.isfinite(tensor.grad).all()
    assert (x.grad[blind] == 0).all()
    assert (context.grad[2] == 0).all()
    assert (context.grad[:2] != 0).any()


def test_hidden_tokens_have_no_influence_whatever_they_hold(make, inputs):
    cross, (x, context, of) = make(), inputs
    visible = torch.arange(TOKENS) < torch.tensor([3, 7, 5])[:, None]
    changed = torch.where(visible[..., None], context, 1e4 * torch.ones_like(context))
    assert torch.equal(cross(x, context, mask=visible, of=of), cross(x, changed, mask=visible, of=of))


def test_asked_receives_the_queries_that_were_used(make, inputs):
    cross, (x, context, of) = make(qk_norm=True), inputs
    asked = []
    out = cross(x, context, of=of, asked=asked)
    assert [q.shape for q in asked] == [(QUESTIONS, HEADS, WORDS, HEAD_DIM)]
    assert torch.equal(cross.attn.answer(asked[0], cross.remember(context)[of]), out)
