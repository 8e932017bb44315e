"""Public BLIP weights are fine-tuned: the loss is their owner's, and the result is a model of ours."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.crossattn import ImageQA
from regard.datasets import Question, QuestionedImage, QuestionSet, load_questions
from regard.train.answer import prepare, train_answer
from regard.train.evaluate import evaluate_answer
from regard.train.recipe import load_recipe
from regard.train.written import AnswerWriter, written_loss

PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *["what", "color", "is", "the", "square", "on", "left", "right", "red", "blue", "yes", "no", "a", "?", "it"],
)


@pytest.fixture(scope="module")
def blip() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BlipConfig(
        text_config={
            "vocab_size": len(PIECES) + 2,
            "hidden_size": 24,
            "encoder_hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "max_position_embeddings": 32,
            "bos_token_id": len(PIECES),
            "sep_token_id": PIECES.index("[SEP]"),
        },
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "image_size": 32,
        },
    )
    model = transformers.BlipForQuestionAnswering(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def folder(blip: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("blip") / "tiny"
    blip.save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return place


def test_the_loss_is_the_owners_own_summed_over_tokens(blip: Any, folder: Path) -> None:
    """transformers takes the mean over tokens, and labels apart from the decoder's input, once both are made right."""
    model = ImageQA.from_pretrained(folder, behaviour="transformers")
    given = ["red", "on the left", "it is a red square"]
    asked = [Question(f"q{i}", "what color is the square?", (answer,)) for i, answer in enumerate(given)]
    questions = QuestionSet((QuestionedImage("i", Path("i.png"), tuple(asked)),), "toy")
    answers = AnswerWriter(questions, model.tokenizer, model.config.decoder)(asked)
    encoded = model.tokenizer([question.text for question in asked], 32)
    assert bool(encoded.mask.all())
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        states = model.read(model.remember(pixels), encoded.ids, encoded.mask)
        ours = written_loss(model.decoder, states, encoded.mask, answers).sum()
        there = torch.zeros_like(answers.ids, dtype=torch.bool)
        there[answers.rows, answers.places] = there[answers.rows, answers.places + 1] = True
        theirs = blip(
            input_ids=encoded.ids,
            attention_mask=encoded.mask.long(),
            pixel_values=pixels.expand(3, -1, -1, -1),
            decoder_input_ids=answers.ids,
            decoder_attention_mask=there.long(),
            labels=answers.ids.masked_fill(~there, -100),
        ).loss
    torch.testing.assert_close(ours / len(answers.rows), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["generate", "rank"])
def test_a_fine_tuned_blip_is_a_model_of_ours(
    small: dict[str, Any], folder: Path, tmp_path: Path, squares: Path, head: str
) -> None:
    rest = {k: v for k, v in small.items() if k not in ("vit", "text", "recipe")}
    settings = {**rest, "model": str(folder), "head": head, "layer_decay": 0.9, "freeze_vit": head == "rank"}
    result = train_answer("easy_vqa", **{**settings, "epochs": 1, "lr": 1e-3}, out=tmp_path / "run")
    before, after = ImageQA.from_pretrained(folder), ImageQA.from_pretrained(result.model)
    assert set(after.config.answers) == {"yes", "no", "red", "blue"}
    assert after.config.head == head
    same = torch.equal(after.vit.blocks[0].mlp.fc1.weight, before.vit.blocks[0].mlp.fc1.weight)
    assert same == (head == "rank")
    assert not torch.equal(after.text.layers[0].mlp.fc1.weight, before.text.layers[0].mlp.fc1.weight)
    assert evaluate_answer(after, load_questions(squares, "train")).n_questions == 72
    encoded, again = (m.tokenizer(["what color is the square?"], 32).ids for m in (before, after))
    assert torch.equal(encoded, again)


def test_lora_on_blip_adapts_every_side(small: dict[str, Any], folder: Path) -> None:
    rest = {k: v for k, v in small.items() if k not in ("vit", "text", "recipe")}
    module, _ = prepare(load_recipe("easy_vqa", **rest, model=str(folder), lora_rank=2))
    learns = {name.split(".")[0] for name, p in module.model.named_parameters() if p.requires_grad}
    assert learns == {"vit", "text", "decoder"}
    module.train()
    assert all(part.training for part in (module.model.vit, module.model.text, module.model.decoder))
