"""Any pretrained ViT as the image side of an ImageQA."""

import pytest
import torch

from regard.crossattn import ImageQA
from regard.vit import ViT
from regard.vit.errors import InputError

QUESTIONS, ANSWERS = ["is it red?", "what shape is it?"], ["yes", "no", "circle"]
SMALL = dict(image_size=(16, 24), patch_size=8, dim=24, depth=2, heads=3)
SIDES = {
    "class token": dict(),
    "registers, layer scale": dict(registers=2, layer_scale=0.1),
    "norm on the pooled vector": dict(class_token=False, pooling="mean", norm_place="pooled"),
    "map pooling": dict(class_token=False, pooling="map"),
    "classifier": dict(classes=5),
}


def noisy(vit: ViT) -> ViT:
    torch.manual_seed(0)
    for parameter in vit.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return vit.eval()


@pytest.mark.parametrize("name", SIDES)
def test_questions_meet_the_tokens_of_the_pretrained_vit(name: str) -> None:
    vit = noisy(ViT.preset("tiny", **SMALL, **SIDES[name]))
    qa = ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=vit)
    images = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        ours, theirs = qa.vit(images), vit(images)
    # Where the owner norms the pooled vector only, the words meet normed tokens.
    expected = vit.pool.norm(theirs.patches) if name == "norm on the pooled vector" else theirs.patches
    assert torch.equal(ours.patches, expected)
    assert qa.ask(qa.look(images[0]), QUESTIONS[0]).text in ANSWERS


@pytest.mark.parametrize("name", SIDES)
def test_every_weight_of_the_image_side_has_a_gradient(name: str) -> None:
    qa = ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=noisy(ViT.preset("tiny", **SMALL, **SIDES[name])))
    encoded = qa.tokenizer(QUESTIONS, 32)
    qa.logits(qa.remember(torch.randn(2, 3, 16, 24)), encoded.ids, encoded.mask).sum().backward()
    assert [n for n, p in qa.vit.named_parameters() if p.grad is None] == []


def test_a_composed_model_is_saved_and_opened_bit_equal(tmp_path) -> None:
    vit = noisy(ViT.preset("tiny", **SMALL, activation="quick_gelu", norm_eps=1e-5, class_token=False, pooling="map"))
    qa = ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=vit).eval()
    qa.save_pretrained(tmp_path / "qa")
    again = ImageQA.from_pretrained(tmp_path / "qa")
    images = torch.randn(1, 3, 24, 40)
    with torch.no_grad():
        assert torch.equal(qa.vit(images).patches, again.vit(images).patches)
    assert again.config == qa.config


def test_the_image_side_may_be_a_file_or_folder(tmp_path) -> None:
    vit = noisy(ViT.preset("tiny", **SMALL))
    vit.save_pretrained(tmp_path / "vit")
    qa = ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=tmp_path / "vit")
    assert torch.equal(qa.vit.tokenizer.proj.weight, vit.tokenizer.proj.weight)
    with pytest.raises(InputError, match="no model at"):
        ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=tmp_path / "nothing.pth")


def test_what_was_frozen_stays_frozen() -> None:
    vit = noisy(ViT.preset("tiny", **SMALL)).requires_grad_(False)
    qa = ImageQA.preset(questions=QUESTIONS, answers=ANSWERS, vit=vit)
    assert not any(parameter.requires_grad for model in (vit, qa.vit) for parameter in model.parameters())
