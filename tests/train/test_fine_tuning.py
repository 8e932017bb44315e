"""Going on from a model: what comes from it, what is trained, and what is told."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.crossattn import ImageQA
from regard.datasets import load_questions
from regard.train.answer import AnswerModule, prepare, train_answer
from regard.train.evaluate import evaluate_answer
from regard.train.recipe import AnswerRecipe, load_recipe
from regard.train.recompute import recompute_layers
from regard.train.scoring import losses, read
from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.lora import LoRALinear, has_lora

DECODER = {"text": {"dim": 16, "heads": 2, "depth": 1}}


def recipe(settings: dict[str, Any]) -> AnswerRecipe:
    return load_recipe(settings["recipe"], **{k: v for k, v in settings.items() if k != "recipe"})


@pytest.fixture
def start(small: dict[str, Any], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Settings that go on from a trained model with such a head."""

    def made(head: str) -> dict[str, Any]:
        decoder = {} if head == "vocabulary" else DECODER
        train_answer(**{**small, "epochs": 1, "head": head, "decoder": decoder}, out=tmp_path / "before")
        rest = {k: v for k, v in small.items() if k not in ("vit", "text")}
        return {**rest, "model": str(tmp_path / "before")}

    return made


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("head", ["vocabulary", "generate"])
def test_a_run_goes_on_from_the_model_it_names(
    start: Callable[[str], dict[str, Any]], tmp_path: Path, squares: Path, head: str
) -> None:
    settings = start(head)
    before = ImageQA.from_pretrained(settings["model"])
    module, _ = prepare(recipe(settings))
    assert module.model.config == before.config
    assert all(torch.equal(tensor, weights(before)[name]) for name, tensor in module.model.state_dict().items())
    result = train_answer(**{**settings, "epochs": 1}, out=tmp_path / "after")
    after = ImageQA.from_pretrained(result.model)
    assert after.config == before.config
    assert len(after.tokenizer) == len(before.tokenizer)
    assert not torch.equal(after.vit.tokenizer.proj.weight, before.vit.tokenizer.proj.weight)
    assert evaluate_answer(after, load_questions(squares, "train")).n_questions == 72


def test_a_model_with_a_decoder_takes_new_answers_and_another_way_to_answer(
    start: Callable[[str], dict[str, Any]], squares: Path, tmp_path: Path
) -> None:
    settings = {**start("generate"), "head": "rank", "data": new_answers(squares, tmp_path)}
    module, data = prepare(recipe(settings))
    assert module.model.config.head == "rank"
    answers = module.model.config.answers  # what it chose from before, then what is new
    assert set(answers[:4]) == {"yes", "no", "red", "blue"}
    assert set(answers[4:]) == {"red blue", "left"}
    assert data.training.columns == {a: answers.index(a) for a in ("yes", "no", "red blue", "left")}
    assert data.training.writer is not None
    assert dict(data.training.writer.left_out) == {}


def test_a_vocabulary_has_no_place_for_new_answers(
    start: Callable[[str], dict[str, Any]], squares: Path, tmp_path: Path
) -> None:
    settings = {**start("vocabulary"), "data": new_answers(squares, tmp_path)}
    with pytest.raises(InputError, match=r"knows 4 answers, and the data has 2 others .*--head generate or rank"):
        prepare(recipe(settings))


def new_answers(squares: Path, folder: Path) -> str:
    rows = [json.loads(line) for line in (squares / "train.jsonl").read_text().splitlines()]
    new = {"red": "red blue", "blue": "left"}
    for row in rows:
        row["image"] = str(squares / row["image"])
        row["answer"] = new.get(row["answer"], row["answer"])
    (folder / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "new.jsonl")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"vit": {"dim": 32}}, "vit is for a new model"),
        ({"text": {"dim": 32}}, "text is for a new model"),
        ({"decoder": {"beams": 3}}, "decoder is for a new model"),
        ({"pretrained": "facebook/dinov2-small"}, "pretrained is for a new model"),
        ({"head": "vocabulary"}, "head is 'vocabulary', and"),
        ({"score": "sigmoid"}, "score is 'sigmoid', and"),
    ],
)
def test_settings_that_contradict_the_model_are_told(
    start: Callable[[str], dict[str, Any]], given: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        prepare(recipe({**start("rank"), **given}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "dem"}, "no ImageQA preset is called 'dem', and no folder; choose one of demo"),
        ({"lora_rank": 4}, "give --model PATH or --pretrained"),
        ({"label_smoothing": 0.1}, "this model has a vocabulary"),
        ({"decoder": {"beams": 2}}, "the head is 'vocabulary'"),
        ({"head": "rank", "decoder": {"beam": 2}}, "DecoderConfig has no field 'beam'"),
    ],
)
def test_settings_that_mean_nothing_are_told(small: dict[str, Any], given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(recipe({**small, **given}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"head": "list"}, "choose one of vocabulary, generate, rank"),
        ({"gradient_checkpointing": "yes"}, "expected bool"),
        ({"lora_targets": "to_q"}, "lora_targets"),
    ],
)
def test_a_value_out_of_its_range_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("easy_vqa", **given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# What is kept as it is


def test_a_frozen_image_side_is_not_in_training_mode_moves_nothing_and_keeps_no_graph(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = AnswerModule.training_step

    def step(module: AnswerModule, batch: Any, index: int) -> torch.Tensor:
        inside = [(part.training, any(p.requires_grad for p in part.parameters())) for part in module.model.children()]
        memory = module.model._encode(module.model.preprocess.normalize(batch.pixels))
        seen.append((inside, memory.patches.requires_grad, module.training))
        return original(module, batch, index)

    monkeypatch.setattr(AnswerModule, "training_step", step)
    settings = {**small, "epochs": 1, "freeze_vit": True}
    before = weights(prepare(recipe(settings))[0].model.vit)
    result = train_answer(**settings, out=tmp_path / "run")
    assert seen
    assert all(inside == [(False, False), (True, True), (True, True)] for inside, _, _ in seen)
    assert not any(graph for _, graph, _ in seen)
    assert all(training for _, _, training in seen)
    after = ImageQA.from_pretrained(result.model).vit.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# LoRA


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("head", ["vocabulary", "rank"])
def test_lora_moves_the_adapters_and_a_vocabularys_head_and_saves_a_plain_model(
    start: Callable[[str], dict[str, Any]], tmp_path: Path, head: str
) -> None:
    settings = {**start(head), "lora_rank": 2, "lora_targets": ["to_q", "cross.attn.to_v"], "epochs": 2}
    before = ImageQA.from_pretrained(settings["model"])
    module, _ = prepare(recipe(settings))
    learns = {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}
    assert all(name.endswith((".down", ".up")) or name.startswith("head.") for name in learns)
    assert any(name.startswith("head.") for name in learns) == (head == "vocabulary")
    result = train_answer(**settings, out=tmp_path / "after")
    saved = ImageQA.from_pretrained(result.model)
    assert not has_lora(saved)
    layers = {n for n in moved(weights(before), weights(saved)) if not n.startswith("head.")}
    assert layers == {
        f"{name}.weight"
        for name, layer in before.named_modules()
        if isinstance(layer, nn.Linear) and (name.endswith(("to_q", "cross.attn.to_v")))
    }


def test_a_lora_run_resumes_to_the_weights_it_would_have_reached(
    start: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    settings = {**start("generate"), "lora_rank": 2}
    whole = train_answer(**{**settings, "epochs": 3}, out=tmp_path / "whole")
    steps = []
    original = AnswerModule.training_step

    def step(module: AnswerModule, batch: Any, index: int) -> torch.Tensor:
        steps.append(index)
        if len(steps) == 9:
            raise RuntimeError("power cut")
        return original(module, batch, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerModule, "training_step", step)
        with pytest.raises(RuntimeError, match="power cut"):
            train_answer(**{**settings, "epochs": 3}, out=tmp_path / "parts")
    assert len(steps) == 9
    parts = train_answer(out=tmp_path / "parts", resume=True)
    one, other = (weights(ImageQA.from_pretrained(r.model)) for r in (whole, parts))
    assert moved(one, other) == set()


def test_adapters_leave_out_a_frozen_image_side(start: Callable[[str], dict[str, Any]]) -> None:
    module, _ = prepare(recipe({**start("rank"), "lora_rank": 2, "freeze_vit": True}))
    assert not has_lora(module.model.vit)
    assert not any(parameter.requires_grad for parameter in module.model.vit.parameters())
    assert has_lora(module.model.text)
    assert has_lora(module.model.decoder)
    assert not module.train().model.vit.training


def test_lora_on_a_pretrained_image_side_trains_the_new_text_side_too(small: dict[str, Any], tmp_path: Path) -> None:
    prepare(recipe(small))[0].model.vit.save_pretrained(tmp_path / "vit")
    settings = {**small, "pretrained": str(tmp_path / "vit"), "vit": {}, "lora_rank": 2}
    module, _ = prepare(recipe(settings))
    assert has_lora(module.model.vit)
    assert all(parameter.requires_grad for parameter in module.model.text.parameters())
    learns = [name for name, parameter in module.model.vit.named_parameters() if parameter.requires_grad]
    assert all(name.endswith((".down", ".up")) for name in learns)
    result = train_answer(**{**settings, "epochs": 1}, out=tmp_path / "run")
    before, after = ViT.from_pretrained(tmp_path / "vit"), ImageQA.from_pretrained(result.model).vit
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in moved(weights(before), weights(after))} == {
        "to_q",
        "to_v",
    }
    with pytest.raises(InputError, match="leave nothing to adapt"):
        prepare(recipe({**settings, "freeze_vit": True}))


# Gradient checkpointing


def test_recomputed_layers_give_the_same_gradients_and_keep_less(small: dict[str, Any]) -> None:
    settings = {**small, "head": "rank", "decoder": DECODER}
    settings |= {"vit": {**small["vit"], "depth": 3, "drop_path": 0.5}, "text": {**small["text"], "dropout": 0.5}}
    module, data = prepare(recipe(settings))
    batch = data.training.fullest(3)
    batch.pixels = torch.randint(0, 256, batch.pixels.shape, dtype=torch.uint8)
    module.train()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        torch.manual_seed(0)
        module.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = losses(module.model, *read(module.model, batch), batch).sum()
        own = {parameter.data_ptr() for parameter in module.parameters()}
        loss.backward()
        grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        return loss.detach(), grads, sum(size for key, size in saved.items() if key not in own)

    plain_loss, plain, much = run()
    names = list(module.state_dict())
    assert recompute_layers(module.model) == 3 + 1 + 1
    loss, grads, little = run()
    assert torch.equal(loss, plain_loss)
    assert grads.keys() == plain.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain[name], atol=1e-7, rtol=1e-6)
    assert little < 0.6 * much
    assert list(module.state_dict()) == names


def test_a_run_that_recomputes_ends_like_one_that_does_not(small: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for on in (False, True):
        settings = {**small, "epochs": 1, "gradient_checkpointing": on}
        ends.append(train_answer(**settings, out=tmp_path / str(on)).model)
    one, other = (weights(ImageQA.from_pretrained(end)) for end in ends)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=1e-5)


# Layer-wise learning rate


def test_layer_decay_reaches_the_optimizer_of_a_run(small: dict[str, Any]) -> None:
    module, _ = prepare(recipe({**small, "layer_decay": 0.5}))
    model = module.model
    factors = module.rate_factors()
    assert factors[model.vit.tokenizer.proj.weight] == 0.25
    assert factors[model.vit.blocks[0].attn.to_q.weight] == 0.5
    assert factors.get(model.head.weight, 1.0) == 1.0
    assert prepare(recipe(small))[0].rate_factors() == {}
    assert isinstance(dataclasses.asdict(recipe(small)), dict)
    assert not isinstance(model.vit.blocks[0].attn.to_q, LoRALinear)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A small BERT of random weights in transformers' layout, with a vocabulary for the squares."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = ["what", "color", "is", "the", "square", "?", "on", "left", "right", "red", "blue", "yes", "no"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    settings = dict(vocab_size=len(pieces), hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**settings, intermediate_size=32))
    model.save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return tmp_path / "bert"


@pytest.fixture
def vit_folder(tmp_path: Path) -> Path:
    ViT.preset("tiny", patch_size=8, image_size=(16, 24), dim=16, heads=2, depth=1).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.mark.parametrize("head", ["vocabulary", "rank"])
def test_a_pretrained_text_side_is_joined_and_kept(
    small: dict[str, Any], tmp_path: Path, bert: Path, vit_folder: Path, head: str
) -> None:
    settings = {k: v for k, v in small.items() if k not in ("vit", "text")}
    settings |= {"pretrained": str(vit_folder), "pretrained_text": str(bert), "head": head}
    module, _ = prepare(recipe(settings))
    before = weights(module.model)
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".cross." in n or ".norm2." in n or n.startswith(("head.", "decoder.")) for n in trained)
    after = ImageQA.from_pretrained(train_answer(**settings, out=tmp_path / "run").model)
    moved = {name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert moved <= trained
    loose, _ = prepare(recipe({**settings, "freeze_text": False}))
    assert all(p.requires_grad for p in loose.model.text.parameters())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pretrained_text": "bert"}, "give pretrained too"),
        ({"freeze_text": True}, "give pretrained_text"),
        ({"pretrained": "vit", "pretrained_text": "bert", "text": {"dim": 8}}, "text.dim"),
    ],
)
def test_a_text_side_that_cannot_be_joined_is_told(small: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    rest = {k: v for k, v in small.items() if k not in ("vit", "text")}
    with pytest.raises(InputError, match=says):
        prepare(recipe({**rest, **settings}))
