"""What only a GPU can show; skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.crossattn import ImageQA
from regard.train.answer import train_answer
from regard.vit import ViT, attention_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def noisy(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("positions", ["learned", "sincos", "rope", "none"])
def test_the_gpu_gives_the_numbers_of_the_cpu(positions: str) -> None:
    model = noisy(ViT.preset("tiny", depth=3, image_size=(48, 64), registers=3, positions=positions, qk_norm=True))
    images = torch.randn(2, 3, 64, 48)
    expected = model(images)
    tokens = model.cuda()(images.cuda())
    for name in ("cls", "registers", "patches"):
        torch.testing.assert_close(getattr(tokens, name).cpu(), getattr(expected, name), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_maps_check_themselves_under_autocast(dtype: torch.dtype) -> None:
    model = noisy(ViT.preset("tiny", depth=2, image_size=(48, 64), registers=2, qk_norm=True)).cuda()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        rows = attention_rows(model, torch.randn(2, 3, 48, 64, device="cuda"), layers="all")
    total = rows.patches.sum(dim=(-2, -1)) + rows.cls + rows.registers.sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-3, rtol=0)


def test_maps_check_themselves_with_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        model = noisy(ViT.preset("small", depth=2)).cuda()
        attention_rows(model, torch.randn(2, 3, 224, 224, device="cuda"), layers="all")
    finally:
        torch.set_float32_matmul_precision(before)


def test_asking_on_the_gpu_equals_asking_on_the_cpu() -> None:
    questions = ["is it red?", "what is it, if it is not a circle?"]
    model = noisy(ImageQA.preset(questions=questions, answers=["yes", "no", "circle"]))
    pictures = [torch.randn(3, 64, 64), None, torch.randn(3, 64, 64)]
    expected = model.ask(model.look(pictures), [questions] * 3)
    model.cuda()
    for here, there in zip(model.ask(model.look(pictures), [questions] * 3), expected, strict=True):
        for answer, other in zip(here, there, strict=True):
            assert answer.text == other.text
            assert answer.probability == pytest.approx(other.probability, abs=1e-3)


def test_training_runs_in_bf16_and_resumes(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "trainer": {"accelerator": "gpu", "devices": 1}}
    train_answer(**{**settings, "epochs": 1}, out=tmp_path)
    result = train_answer(out=tmp_path, resume=True, epochs=3)
    assert result.fit.epochs_done == 3
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
    assert all(tensor.dtype == torch.float32 for tensor in last["state_dict"].values() if tensor.is_floating_point())
