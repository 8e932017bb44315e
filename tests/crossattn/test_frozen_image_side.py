"""Training with a frozen image side: no backward through it, and nothing of it dropped."""

import pytest
import torch


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("images", [1, 3])
def test_a_frozen_image_side_costs_no_backward_and_drops_nothing(make_qa, picture, questions, evaluated, images):
    qa = make_qa(dict(drop_path=0.9, depth=4), images=images)
    expected = qa.remember([picture(0), picture(1, 16, 48)])
    qa.vit.requires_grad_(False)
    qa.train()
    if evaluated:
        qa.vit.eval()
    flags = {name: module.training for name, module in qa.named_modules()}
    given = []
    handle = qa.vit.norm.register_forward_hook(lambda module, inputs, output: given.extend([*inputs, output]))
    memory = qa.remember([picture(0), picture(1, 16, 48)])
    handle.remove()
    assert {name: module.training for name, module in qa.named_modules()} == flags
    assert len(given) == 4
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in given)
    for kept, first in zip(memory.layers, expected.layers, strict=True):
        assert torch.equal(kept.k, first.k), "no block was dropped"
    encoded = qa.tokenizer(questions[:2], 64)
    qa.logits(memory, encoded.ids, encoded.mask).pow(2).sum().backward()
    assert all(parameter.grad is None for parameter in qa.vit.parameters())
    assert all((cross.attn.to_k.weight.grad != 0).any() for cross in qa.text.asking)
    if images > 1:
        assert (qa.image_index.weight.grad[0] != 0).any()


def test_an_image_side_with_anything_to_learn_is_run_in_training_mode(make_qa, picture):
    qa = make_qa(dict(drop_path=0.9, depth=4))
    expected = qa.remember(picture(0)[None]).layers[0].k
    qa.vit.requires_grad_(False)
    qa.vit.norm.requires_grad_(True)
    torch.manual_seed(0)
    got = qa.train().remember(picture(0)[None]).layers[0].k
    assert got.requires_grad
    assert not torch.allclose(got, expected)
