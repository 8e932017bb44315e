"""torch.compile: no graph break, and few graphs over many sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

SIZES = [(24, 40), (40, 24), (16, 56), (64, 32), (72, 88)]


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "sincos", "rope", "none"])
def test_five_sizes_make_at_most_two_graphs_without_a_break(vit, positions):
    torch._dynamo.reset()
    model, counter = vit(positions=positions, registers=2, layer_scale=0.1), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in SIZES:
            images = torch.randn(2, 3, *size)
            tokens, eager = compiled(images), model(images)
            assert tokens.grid == eager.grid
            torch.testing.assert_close(tokens.patches, eager.patches, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resize", "pad", "crop"])
def test_sizes_that_the_patch_does_not_divide_compile_too(vit, policy):
    torch._dynamo.reset()
    model, counter = vit(size_policy=policy), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in [(25, 43), (41, 29), (17, 60), (61, 35), (73, 90)]:
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(images).patches, model(images).patches, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
