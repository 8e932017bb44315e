"""torch.compile: no graph break, and few graphs over many sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from regard.vit.config import RopeRecipe

SIZES = [(24, 40), (40, 24), (16, 56), (64, 32), (72, 88)]


KINDS = {
    "learned": dict(registers=2, layer_scale=0.1),
    "learned, plain": {},
    "learned for every token": dict(registers=2, registers_place="end", position_rows="cls+registers+patches"),
    "sincos": dict(positions="sincos", registers=2, layer_scale=0.1),
    "rope": dict(positions="rope", registers=2, layer_scale=0.1, key_bias=False),
    "rope by number": dict(positions="rope", rope=RopeRecipe("index", base=10000.0, reference=(3, 5))),
    "learned+rope": dict(positions="learned+rope", registers=2, registers_place="end", activation="swiglu"),
    "none": dict(positions="none", registers=2, layer_scale=0.1, class_token=False, pooling="mean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=[name.replace(" ", "-") for name in KINDS])
def test_five_sizes_make_at_most_two_graphs_without_a_break(vit, kind):
    torch._dynamo.reset()
    model, counter = vit(**kind), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in SIZES:
            images = torch.randn(2, 3, *size)
            tokens, eager = compiled(images), model(images)  # eager takes the fused path of a CPU
            assert tokens.grid == eager.grid
            torch.testing.assert_close(tokens.patches, eager.patches, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dict(positions="rope", layer_scale=0.1), {}], ids=["rope", "learned"])
def test_a_training_step_over_five_sizes_makes_at_most_two_graphs(vit, kind):
    torch._dynamo.reset()
    model, counter = vit(**kind).train(), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for size in SIZES:
        images = torch.randn(2, 3, *size)
        gradients = []
        for call in (compiled, model):
            model.zero_grad()
            call(images).patches.pow(2).mean().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.blocks.parameters()]))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_a_compiled_graph_leaves_no_table_behind_in_the_model(vit):
    torch._dynamo.reset()
    model = vit(positions="rope")
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    with torch.inference_mode():
        compiled(torch.randn(1, 3, 24, 40))
    model(torch.randn(1, 3, 24, 40)).patches.sum().backward()  # an inference tensor among the tables would raise


@pytest.mark.slow
def test_the_machine_code_of_a_compiler_gives_the_same_numbers(vit):
    torch._dynamo.reset()
    model = vit(depth=1, positions="learned+rope", layer_scale=0.1, registers=2)
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in SIZES[:2]:
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(images).patches, model(images).patches, rtol=1e-4, atol=1e-5)


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
