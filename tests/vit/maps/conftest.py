"""The same model with every N x N matrix held, in float64: what maps made of rows are compared with."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.vit.attention import KeysValues
from regard.vit.model import ViT
from regard.vit.tokens import Tokens


class Dense(NamedTuple):
    """Attention of every layer `(B, H, S, S)`, in the graph of the tokens; the values; the stream after each layer."""

    model: ViT
    attention: list[Tensor]
    values: list[Tensor]
    stream: list[Tensor]
    tokens: Tokens


@pytest.fixture
def dense() -> Callable[[ViT, Tensor], Dense]:
    def run(model: ViT, images: Tensor) -> Dense:
        model = copy.deepcopy(model).double().eval()
        x, grid = model.embed(images.double())
        rotary = model.rotary(grid, x.device)
        attention, values, stream = [], [], []
        for block in model.blocks:
            attn, y = block.attn, block.norm1(x)
            q, k, v = (
                F.linear(y, to.weight, to.bias).unflatten(-1, (attn.heads, attn.head_dim)).transpose(1, 2)
                for to in (attn.to_q, attn.to_k, attn.to_v)
            )
            q, k = attn.norm_q(q), attn.norm_k(k)
            if rotary is not None:
                q, k = rotary(q), rotary(k)
            scores = torch.einsum("bhik,bhjk->bhij", q, k) / attn.head_dim**0.5
            if attn.sink is not None:
                scores = torch.cat((scores, attn.sink[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
            a = scores.softmax(dim=-1)[..., : k.shape[2]]
            x = block.finish(x, a @ v, KeysValues(k, v))
            attention.append(a)
            values.append(v)
            stream.append(x)
        return Dense(model, attention, values, stream, model.name(model.norm(x), grid))

    return run


@pytest.fixture
def untouched() -> Callable[[nn.Module], Callable[[], None]]:
    """`check = untouched(model)`; `check()` asserts that modes, weights, gradients, hooks and edits are unchanged."""

    def remember(model: nn.Module) -> Callable[[], None]:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        modes = {name: part.training for name, part in model.named_modules()}
        wanted = {name: p.requires_grad for name, p in model.named_parameters()}
        held = {name: set(vars(part)) for name, part in model.named_modules()}
        switch = torch.is_grad_enabled()

        def check() -> None:
            assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
            assert {name: part.training for name, part in model.named_modules()} == modes
            assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
            assert all(p.grad is None for p in model.parameters())
            for name, part in model.named_modules():
                assert set(vars(part)) == held[name]
                assert not part._forward_hooks
                assert not part._forward_pre_hooks
                assert not part._backward_hooks
                assert getattr(part, "edit", None) is None
            assert torch.is_grad_enabled() == switch

        return check

    return remember
