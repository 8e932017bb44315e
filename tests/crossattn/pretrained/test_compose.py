"""A pretrained text side joined with any ViT starts unharmed, and its new parts can be told apart and trained alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_bert import MINILM, needs_minilm, transformers
from torch import Tensor, nn

from regard.crossattn import ImageQA, TextTokenizer
from regard.crossattn.pretrained.bert import open_text
from regard.crossattn.pretrained.compose import new_parts
from regard.vit import ViT
from regard.vit.errors import InputError

ANSWERS = ("yes", "no", "red", "two", "left")
VIT = dict(image_size=(24, 40), patch_size=8, dim=32, depth=2, heads=4)


@pytest.fixture
def tokenizer(questions) -> TextTokenizer:
    return TextTokenizer.train([*questions, *ANSWERS])  # a question set's, so that no token begins answers


@pytest.fixture
def bert(tokenizer, randomize) -> Any:
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=48, num_attention_heads=4, num_hidden_layers=4, intermediate_size=80,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return randomize(transformers.BertModel(config)).eval()


@pytest.fixture
def vit(randomize) -> ViT:
    torch.manual_seed(0)
    model = ViT.preset("tiny", **VIT, registers=2)
    return randomize(model).eval()


@pytest.fixture
def composed(vit, bert, tokenizer) -> Callable[..., ImageQA]:
    def make(**changes: Any) -> ImageQA:
        torch.manual_seed(1)
        return ImageQA.compose(**{"vit": vit, "text": (bert, tokenizer), "answers": ANSWERS, **changes})

    return make


def read(qa: ImageQA, questions: list[str], images: Any, count: int) -> tuple[Tensor, Tensor]:
    """States of every question asked of every one of `count` images, `(B * Q, T, D)`, and where tokens stand."""
    encoded = qa.tokenizer(questions, qa.config.text.max_tokens)
    ids, mask = encoded.ids.repeat(count, 1), encoded.mask.repeat(count, 1)
    with torch.no_grad():
        return qa.read(qa.remember(images), ids, mask), mask


def plain(model: Any, tokenizer: TextTokenizer, questions: list[str]) -> Tensor:
    """What transformers' own BERT makes of the words."""
    encoded = tokenizer(questions, 64)
    with torch.no_grad():
        return model(input_ids=encoded.ids, attention_mask=encoded.mask.long()).last_hidden_state


def opened_gates(qa: ImageQA) -> ImageQA:
    with torch.no_grad():
        for cross in qa.text.asking:
            assert cross.gate is not None
            cross.gate.fill_(0.5)
    return qa


# The text side starts unharmed


@pytest.mark.parametrize("cross_every", [1, 2, 4])
def test_before_training_states_are_those_of_the_text_side_alone_whatever_is_looked_at(
    cross_every, composed, bert, tokenizer, questions, picture
):
    qa = composed(cross_every=cross_every).eval()
    images = [picture(1), None, picture(2, 16, 64)]
    states, mask = read(qa, questions, images, len(images))
    assert len(qa.text.asking) == 4 // cross_every
    encoded = tokenizer(questions, 64)
    with torch.no_grad():  # in a batch of the same size, of which the rounding depends
        alone = qa.text(encoded.ids.repeat(3, 1), mask)
    assert (states - alone)[mask].abs().max() <= 1e-6
    theirs = plain(bert, tokenizer, questions).repeat(3, 1, 1)
    assert (states - theirs)[mask].abs().max() <= 1e-5 * theirs[mask].abs().max()


def test_with_open_gates_the_image_is_heard(composed, questions, picture):
    """The claim above is about gates at 0, not about images that nothing listens to."""
    qa = opened_gates(composed().eval())
    states, mask = read(qa, questions, [picture(1), picture(2)], 2)
    one, two = states.chunk(2)
    assert (one - two)[mask[: len(questions)]].abs().max() > 1e-2


def test_without_gates_the_words_are_changed_at_once(composed, bert, tokenizer, questions, picture):
    qa = composed(gate=False).eval()
    states, mask = read(qa, questions, [picture(1)], 1)
    assert (states - plain(bert, tokenizer, questions))[mask].abs().max() > 1e-2


@needs_minilm
def test_the_real_minilm_starts_with_its_own_states(vit, picture):
    qa = ImageQA.compose(vit=vit, text=MINILM, answers=ANSWERS)
    asked = ["What shape is in the image?", "Is there no teal circle in it?", "Why?"]
    states, mask = read(qa.eval(), asked, [picture(1), None, picture(2)], 3)
    encoder, tokenizer = open_text(MINILM)
    encoded = tokenizer(asked, 512)
    with torch.no_grad():
        alone = encoder(encoded.ids.repeat(3, 1), mask)
        theirs = transformers.BertModel.from_pretrained(MINILM).eval()(
            input_ids=encoded.ids.repeat(3, 1), attention_mask=mask.long()
        )
    assert (states - alone)[mask].abs().max() <= 1e-6
    assert (states - theirs.last_hidden_state)[mask].abs().max() <= 1e-5
    assert qa.config.text.pooling == "mean"
    assert qa.ask(qa.look(picture(1)), asked[0]).text in ANSWERS


# What is new


def test_the_new_parts_are_named_and_everything_else_is_pretrained(composed, vit, bert):
    qa = composed()
    new = new_parts(qa)
    assert {name.split(".")[0] for name in new} == {"text", "head"}
    assert {name.split(".")[3] for name in new if name.startswith("text.")} == {"cross", "norm2"}
    kept = {name: p for name, p in qa.named_parameters() if name not in new}
    assert sum(p.numel() for name, p in kept.items() if name.startswith("vit.")) == sum(
        p.numel() for p in vit.as_encoder().parameters()
    )
    pooler = sum(p.numel() for p in bert.pooler.parameters())
    types = bert.embeddings.token_type_embeddings.weight.numel()
    theirs = sum(p.numel() for p in bert.parameters()) - pooler - types
    assert sum(p.numel() for name, p in kept.items() if name.startswith("text.")) == theirs


def test_new_parts_begin_as_every_new_model_does(composed):
    for name, parameter in new_parts(composed()).items():
        if name.endswith(("gate", "bias")):
            assert not parameter.any(), name
        elif "norm2" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            bound = (6 / sum(parameter.shape)) ** 0.5  # Glorot's
            assert 0.8 * bound < parameter.abs().max() <= bound, name


def test_the_decoder_is_new_too(composed):
    qa = composed(head="generate")
    new = new_parts(qa)
    assert {name.split(".")[0] for name in new} == {"text", "decoder"}
    assert {f"decoder.{name}" for name, _ in qa.decoder.named_parameters()} <= set(new)


def step(qa: ImageQA, questions: list[str], images: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    encoded = qa.tokenizer(questions, 64)
    memory = qa.remember(images)
    targets = torch.arange(len(questions)) % len(ANSWERS)
    loss = F.cross_entropy(qa.logits(memory, encoded.ids, encoded.mask), targets)
    optimizer.zero_grad()
    loss.backward()
    return float(loss.detach())


def test_at_first_the_gates_learn_and_after_one_step_what_stands_behind_them(composed, questions, picture):
    qa = composed()
    qa.requires_grad_(False)
    new = new_parts(qa)
    for parameter in new.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(new.values(), lr=1e-2)
    images = [picture(number) for number in range(len(questions))]
    behind = {n: p for n, p in new.items() if n.startswith("text.") and not n.endswith(("gate", "to_k.bias"))}
    gates = {n: p for n, p in new.items() if n.endswith("gate")}
    step(qa, questions, images, optimizer)
    assert all(p.grad is not None and p.grad.abs().max() > 1e-6 for p in gates.values())
    assert all(p.grad is not None and not p.grad.any() for p in behind.values())
    optimizer.step()
    step(qa, questions, images, optimizer)
    for name, parameter in behind.items():
        assert parameter.grad.abs().max() > 0, name


def test_training_only_the_new_parts_lowers_the_loss_and_moves_nothing_else(composed, questions, picture):
    qa = composed()
    qa.requires_grad_(False)
    new = new_parts(qa)
    for parameter in new.values():
        parameter.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in qa.state_dict().items()}
    optimizer = torch.optim.AdamW(new.values(), lr=1e-2)
    images = [picture(number) for number in range(len(questions))]
    losses = []
    for _ in range(30):
        losses.append(step(qa, questions, images, optimizer))
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    after = qa.state_dict()
    for name, tensor in before.items():
        if name in new:  # the bias of all keys alike moves no softmax
            assert name.endswith("to_k.bias") or not torch.equal(after[name], tensor), name
        else:
            assert torch.equal(after[name], tensor), name


# Kept and opened


@pytest.mark.parametrize("head", ["vocabulary", "generate", "rank"])
def test_a_saved_composition_opens_bit_equal(head, composed, questions, picture, tmp_path, randomize):
    qa = composed(head=head, images=2)
    with torch.no_grad():
        for parameter in new_parts(qa).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    qa.eval().save_pretrained(tmp_path / "qa")
    again = ImageQA.from_pretrained(tmp_path / "qa")
    assert again.config == qa.config
    assert set(new_parts(again)) == set(new_parts(qa))
    images = [picture(1), picture(2, 16, 64)]
    ours, _ = read(qa, questions, images, 2)
    theirs, _ = read(again, questions, images, 2)
    assert torch.equal(ours, theirs)
    a, b = (model.ask(model.look(images), [questions] * 2) for model in (qa, again))
    assert [[(x.text, x.probability) for x in row] for row in a] == [
        [(x.text, x.probability) for x in row] for row in b
    ]


# What can be joined


def test_any_image_side_is_taken(composed, vit, questions, picture, tmp_path):
    vit.save_pretrained(tmp_path / "vit")
    expected, _ = read(opened_gates(composed().eval()), questions, [picture(1)], 1)
    for side in (tmp_path / "vit", str(tmp_path / "vit")):
        found, _ = read(opened_gates(composed(vit=side).eval()), questions, [picture(1)], 1)
        assert torch.equal(found, expected)
    new = composed(vit=VIT)
    assert (new.config.vit.dim, new.config.vit.preprocess.size) == (32, (24, 40))
    dino = transformers.Dinov2Config(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, image_size=28, patch_size=14
    )
    theirs = composed(vit=transformers.Dinov2Model(dino))
    assert (theirs.config.vit.dim, theirs.config.vit.layer_scale is not None) == (32, True)


def test_any_text_side_is_taken(composed, bert, tokenizer, questions, picture, tmp_path):
    bert.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    encoder, _ = open_text(bert)
    expected, _ = read(composed().eval(), questions, [picture(1)], 1)
    for side in (
        tmp_path,
        str(tmp_path),
        (tmp_path, tokenizer),
        (encoder, tokenizer),
        (bert, tmp_path / "tokenizer.json"),
    ):
        found, _ = read(composed(text=side).eval(), questions, [picture(1)], 1)
        assert torch.equal(found, expected)


def test_a_text_encoder_that_is_given_stays_as_it_is(composed, bert, tokenizer):
    encoder, _ = open_text(bert)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    qa = composed(text=(encoder, tokenizer))
    with torch.no_grad():
        for parameter in qa.text.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize("head", ["generate", "rank"])
def test_a_decoder_answers_with_the_text_sides_vocabulary(head, composed, questions, picture):
    qa = composed(head=head, decoder={"max_tokens": 4, "text": {"depth": 1}})
    assert qa.tokenizer.pieces([qa.config.decoder.first, qa.config.decoder.last]) == ["[CLS]", "[SEP]"]
    assert (qa.config.decoder.text.depth, qa.config.decoder.text.dim) == (1, 48)
    answer = qa.ask(qa.look(picture(1)), questions[0], candidates=["red", "asleep"])
    assert sum(probability for _, probability in answer.top) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": "yes"}, ["answers is one text"]),
        ({"answers": []}, ["answers"]),
        ({"decoder": {"beams": 2}}, ["decoder settings", "vocabulary"]),
        ({"head": "generate", "decoder": {"beam": 2}}, ["'beam'"]),
        ({"head": "write"}, ["write"]),
        ({"cross_every": 9}, ["cross_every", "9"]),
        ({"cross_every": 0}, ["cross_every", "0"]),
        ({"images": 0}, ["images"]),
        ({"vit": {"dims": 3}}, ["'dims'"]),
    ],
)
def test_what_does_not_go_together_is_told(changes, words, composed):
    with pytest.raises(InputError) as caught:
        composed(**changes)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_a_text_side_needs_its_own_tokenizer(composed, bert, questions):
    with pytest.raises(InputError, match=r"no tokenizer.*text=\(weights, tokenizer\)"):
        composed(text=bert)
    small = TextTokenizer.train(["one two"])
    encoder, _ = open_text(bert)
    with pytest.raises(InputError, match=f"the tokenizer has {len(small)} tokens"):
        composed(text=(encoder, small))


def test_parts_that_are_no_models_are_told(composed, tokenizer):
    with pytest.raises(InputError, match="text encoder"):
        composed(text=(nn.Linear(2, 2), tokenizer))
