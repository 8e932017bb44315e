"""Gradient-weighted relevance of a ViT's own attention, against N x N matrices and their own gradients in float64."""

import pytest
import torch

from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import streamed
from regard.vit.maps.relevance import relevance

SIZE = (16, 40)  # grid 2 x 5, not the native 3 x 5
VARIANTS = {
    "plain": dict(classes=5),
    "registers after cls": dict(classes=5, registers=2),
    "rope, qk norm, registers at the end": dict(
        classes=5, registers=3, positions="rope", qk_norm=True, registers_place="end"
    ),
    "sub-norm, layer scale, swiglu": dict(classes=5, attn_norm=True, layer_scale=0.1, activation="swiglu"),
    "sink": dict(classes=5, sink=True),
    "norm of the pooled": dict(classes=5, norm_place="pooled"),
}


def whole(rows) -> torch.Tensor:
    """Rows `(B, Q, S)` with cls, registers, patches side by side."""
    cls = [] if rows.cls is None else [rows.cls[..., None]]
    return torch.cat([*cls, rows.registers, rows.patches.flatten(-2)], dim=-1)[:, 0, 0]


def named(model, matrix: torch.Tensor) -> torch.Tensor:
    config, count = model.config, matrix.shape[-1] - 1 - model.config.registers
    if config.registers_place == "end":
        return torch.cat((matrix[..., :1], matrix[..., 1 + count :], matrix[..., 1 : 1 + count]), dim=-1)
    return matrix


def product(run, value: torch.Tensor, first: int = 0) -> torch.Tensor:
    """R `(B, S, S)`: R <- R + mean_h((dA * A)^+) R, with the gradients that autograd gives A itself."""
    grads = torch.autograd.grad(value.sum(), run.attention, retain_graph=True)
    total = torch.eye(run.attention[0].shape[-1], dtype=torch.float64).expand(len(value), -1, -1)
    for a, grad in list(zip(run.attention, grads, strict=True))[first:]:
        total = total + (grad * a).clamp_min(0).mean(dim=1) @ total
    return total.detach()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("start_layer", [0, -1])
def test_a_row_equals_that_of_the_dense_product(vit, dense, variant, start_layer):
    model, images = vit(**VARIANTS[variant]).double(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    run = dense(model, images)
    matrix = product(run, run.model.head(run.model.pool(run.tokens))[:, 3], start_layer)
    rows = whole(relevance(model, images, 3, ["cls", (1, 2)], start_layer=start_layer))
    at = (0 if model.config.registers_place == "end" else model.config.registers) + 1 + 7
    assert (matrix - torch.eye(matrix.shape[-1])).amax() > 1e-3  # there is something to see
    torch.testing.assert_close(rows, named(model, matrix[:, [0, at]]), rtol=0, atol=1e-6)


def test_in_single_precision_it_is_the_same_to_single_precision(vit, dense):
    model, images = vit(classes=5), torch.randn(2, 3, *SIZE)
    run = dense(model, images)
    matrix = product(run, run.model.head(run.model.pool(run.tokens))[:, 0])
    torch.testing.assert_close(whole(relevance(model, images, 0)).double(), matrix[:, :1], rtol=1e-4, atol=1e-6)


def test_a_target_may_be_a_text_vector_or_any_function_of_the_output(vit, dense):
    model, images = vit().double(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    run = dense(model, images)
    pooled = run.model.pool(run.tokens)
    texts = torch.randn(2, 32)
    cosine = torch.nn.functional.cosine_similarity(pooled, texts.double())
    for target, value in [
        (texts, cosine),
        (lambda tokens, pooled: pooled[:, 7], pooled[:, 7]),
        (lambda tokens, pooled: tokens.patches[:, 4, 2], run.tokens.patches[:, 4, 2]),
    ]:
        rows = whole(relevance(model, images, target))
        torch.testing.assert_close(rows, product(run, value)[:, :1], rtol=0, atol=1e-6)
    one = whole(relevance(model, images, texts[0]))
    torch.testing.assert_close(one[0], whole(relevance(model, images, texts))[0])
    with torch.inference_mode():  # as texts are encoded
        text = texts[0].double()
    assert torch.equal(whole(relevance(model, images, text)), one)


def test_a_single_layer_gives_the_identity_and_its_own_positive_part(vit, dense):
    model, images = vit(depth=1, classes=5).double(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    run = dense(model, images)
    (grad,) = torch.autograd.grad(run.model.head(run.model.pool(run.tokens))[:, 1].sum(), run.attention)
    own = (grad * run.attention[0]).clamp_min(0).mean(1)[:, 0]
    own[:, 0] += 1
    torch.testing.assert_close(whole(relevance(model, images, 1))[:, 0], own.detach(), rtol=0, atol=1e-9)


def test_without_a_gradient_a_token_is_relevant_to_itself_alone(vit):
    for target in (lambda tokens, pooled: 0 * pooled.sum(1), lambda tokens, pooled: (pooled * 0).sum(1).exp()):
        rows = relevance(vit(), torch.randn(2, 3, *SIZE), target, ["cls", (1, 4)])
        assert rows.cls[0, 0, 0].tolist() == [1, 0]
        assert rows.patches[:, 0, 0, 1, 1, 4].tolist() == [1, 1]
        assert rows.patches.sum() == 2


def test_every_image_of_a_batch_gets_its_own(vit):
    model, images = vit(classes=5, registers=2).double(), torch.randn(3, 3, *SIZE, dtype=torch.float64)
    together = whole(relevance(model, images, 2))
    alone = torch.cat([whole(relevance(model, image[None], 2)) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    assert not torch.allclose(together[0], together[1], atol=1e-3)
    assert relevance(model, images[:0], 2).patches.shape == (0, 1, 1, 1, 2, 5)


def test_a_patch_that_alone_carries_the_answer_is_the_most_relevant(vit):
    """Values hand over one channel of the stream, which the target reads; one patch is bright there."""
    model = vit(depth=1, positions="none", layer_scale=1.0)
    with torch.no_grad():
        block = model.blocks[0]
        bright, dark = (model.tokenizer(torch.full((1, 3, 8, 8), value))[0][0, 0] for value in (3.0, 0.0))
        towards = block.norm1(bright) - block.norm1(dark)
        block.attn.to_v.weight.copy_(towards.expand(32, -1) / towards.square().sum())
        block.attn.to_v.bias.copy_(-block.attn.to_v.weight @ block.norm1(dark))
        block.attn.out.weight.copy_(torch.eye(32))
        block.mlp.fc2.weight.zero_()
    for row, column in ((0, 4), (1, 0), (1, 3)):
        images = torch.zeros(1, 3, *SIZE)
        images[:, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = 3.0
        found = relevance(model, images, lambda tokens, pooled: block_sum(model, tokens))
        assert divmod(int(found.patches[0, 0, 0, 0].argmax()), 5) == (row, column)


def block_sum(model, tokens):
    """The class token before the final norm, as far as its direction goes."""
    return ((tokens.cls - model.norm.bias) / model.norm.weight)[:, :8].sum(1)


def test_half_precision_follows_single_precision(vit):
    model, images = vit(classes=5), torch.randn(2, 3, *SIZE)
    exact = relevance(model, images, 1).patches
    with torch.autocast("cpu", torch.bfloat16):
        mixed = relevance(model, images, 1).patches
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=0.1, atol=0.05 * float(exact.max()))


def test_no_more_than_a_block_of_rows_is_held(vit, monkeypatch):
    made, weights = [], Attention.weights
    model, images = vit(classes=5), torch.randn(1, 3, *SIZE)
    whole_rows = whole(relevance(model, images, 1))
    monkeypatch.setattr(streamed, "BLOCK", 4)
    monkeypatch.setattr(
        Attention, "weights", lambda *args, **rest: made.append(args[1].shape[2]) or weights(*args, **rest)
    )
    torch.testing.assert_close(whole(relevance(model, images, 1)), whole_rows)
    assert made[0] == 1
    assert max(made) <= 4


def test_a_wrong_row_is_caught(vit, monkeypatch):
    weights = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda attn, q, k, mask=None: weights(attn, q.flip(1), k.flip(1)))
    with pytest.raises(RuntimeError, match="attention rows differ"):
        relevance(vit(classes=5), torch.randn(2, 3, *SIZE), 0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_model_is_left_as_it_was_whatever_happens(vit, untouched, frozen, mode):
    model, images = vit(classes=5, drop_path=0.9), torch.randn(2, 3, *SIZE)
    still = whole(relevance(model, images, 1))
    model.train().requires_grad_(not frozen)
    model.blocks[1].eval()
    check = untouched(model)
    with mode():
        assert torch.equal(whole(relevance(model, images.clone(), 1)), still)
        with pytest.raises(ZeroDivisionError):
            relevance(model, images.clone(), lambda tokens, pooled: 1 / 0)
    assert not images.requires_grad
    check()


def test_gradients_that_are_being_gathered_are_not_added_to(vit):
    model, images = vit(classes=5), torch.randn(2, 3, *SIZE)
    model.classify(images).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    rows = relevance(model, images, 1)
    assert not rows.patches.requires_grad
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(before)
    assert all(torch.equal(before[name], dict(model.named_parameters())[name].grad) for name in before)


def test_a_compiled_model_is_taken(vit):
    model, images = vit(classes=5), torch.randn(1, 3, *SIZE)
    assert torch.equal(whole(relevance(torch.compile(model), images, 1)), whole(relevance(model, images, 1)))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (5, "class 5 does not exist"),
        (torch.zeros(3), r"a target vector is \(32,\)"),
        (lambda tokens, pooled: pooled, "one number for each image"),
        (lambda tokens, pooled: 1.0, "the target gave float"),
        (lambda tokens, pooled: torch.ones(2), "does not depend"),
    ],
)
def test_a_target_that_is_none_is_told_apart(vit, target, words):
    with pytest.raises(InputError, match=words):
        relevance(vit(classes=5), torch.randn(2, 3, *SIZE), target)


def test_a_class_of_a_model_without_classifier_is_refused(vit):
    with pytest.raises(InputError, match="no classifier"):
        relevance(vit(), torch.randn(1, 3, *SIZE), 0)
