"""A memory goes from device to device as its model does; skipped where there is no GPU."""

import copy
from pathlib import Path

import pytest
import torch

from regard.crossattn import ImageQA, Memory
from regard.vit import InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
QUESTIONS = ["is it red?", "what shape is left of the circle?", "is it?"]


@pytest.fixture(scope="module")
def qa() -> ImageQA:
    torch.manual_seed(0)
    model = ImageQA.preset(questions=QUESTIONS, answers=["yes", "no", "circle"], vit=dict(registers=2), images=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def test_a_memory_follows_its_model_to_the_gpu_and_back(qa: ImageQA, tmp_path: Path) -> None:
    items = [[torch.randn(3, 64, 64), torch.randn(3, 48, 80)], None, torch.randn(3, 64, 64)]
    memory = qa.look(items)
    expected = qa.ask(memory, QUESTIONS)
    there = copy.deepcopy(qa).cuda()
    with pytest.raises(InputError, match=r"on cpu, the model asks in torch.float32 on cuda:0; use memory.to\('cuda:0'"):
        there.ask(memory, QUESTIONS)
    moved = memory.to("cuda")
    assert moved.device == torch.device("cuda", 0)
    seen = there.look(items)
    assert seen.fingerprint == memory.fingerprint
    seen.save(tmp_path / "memory")
    for kept in (
        moved,
        seen,
        seen[[2, 0, 1]][[1, 2, 0]],
        Memory.load(tmp_path / "memory", "cuda"),
        moved[:1] + seen[1:],
    ):
        for ours, cpu in zip(there.ask(kept, QUESTIONS), expected, strict=True):
            for (text, probability), (_, other) in zip(sorted(ours.top), sorted(cpu.top), strict=True):
                assert probability == pytest.approx(other, abs=2e-3), text
    assert qa.ask(Memory.load(tmp_path / "memory"), QUESTIONS)[1] == expected[1]
    with pytest.raises(InputError, match=r"on cuda:0, the model asks in torch.float32 on cpu"):
        qa.ask(seen, QUESTIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_read_memories_on_the_gpu(qa: ImageQA, dtype: torch.dtype) -> None:
    model = copy.deepcopy(qa).cuda()
    picture = torch.randn(3, 64, 64)
    memory = model.look(picture)
    expected = dict(model.ask(memory, QUESTIONS[1]).top)
    with torch.autocast("cuda", dtype):
        answers = [model.ask(kept, QUESTIONS[1]) for kept in (memory.to(dtype), model.look(picture))]
    half = copy.deepcopy(model).to(dtype)
    answers += [half.ask(memory.to(dtype), QUESTIONS[1]), half.ask(half.look(picture), QUESTIONS[1])]
    for answer in answers:
        assert answer.attention.map(0).dtype == torch.float32
        for text, probability in answer.top:
            assert probability == pytest.approx(expected[text], abs=5e-2)
