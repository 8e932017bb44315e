import json

import pytest
import torch
import torch.nn.functional as F

from regard.crossattn import ImageQA, ImageQAConfig, TextConfig, TextTokenizer
from regard.vit import InputError, ViT

TRIPLETS = [(i, question, answer) for i, (question, answer) in enumerate([
    ("What colour is it?", "red"), ("What colour is it?", "blue"), ("Is it asleep?", "yes"), ("Is it asleep?", "no"),
    ("What animal is it?", "cat"), ("What animal is it?", "dog"), ("How many?", "two"), ("How many?", "one"),
])] + [(0, "How many?", "one"), (1, "Is it asleep?", "no")]  # fmt: skip


# Configuration


def test_probabilities_follow_the_score(make_qa, picture, scores):
    softmax, sigmoid = make_qa(score="softmax"), make_qa(score="sigmoid")
    logits = torch.tensor([[3.0, -2.0, 0.5, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(softmax.probabilities(logits), logits.exp() / logits.exp().sum(dim=1, keepdim=True))
    torch.testing.assert_close(sigmoid.probabilities(logits), 1 / (1 + (-logits).exp()))
    changed = logits.clone()
    changed[:, 0] += 5
    assert torch.equal(sigmoid.probabilities(changed)[:, 1:], sigmoid.probabilities(logits)[:, 1:])
    assert scores(softmax.ask(softmax.look(picture(0)), "Who?")).sum() == pytest.approx(1, abs=1e-6)
    assert abs(scores(sigmoid.ask(sigmoid.look(picture(0)), "Who?")).sum() - 1) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(answers=[]), "answers is empty"),
        (dict(answers=["yes", "no", "yes"]), "'yes' twice"),
        (dict(answers=["yes", 2]), "holds 2, which is no text"),
        (dict(answers="yes"), "give a list of answers"),
        (dict(questions=[]), "no questions"),
        (dict(questions="What is it?"), "not on one text"),
        (dict(score="sofmax"), "score is 'sofmax'; choose one of softmax, sigmoid"),
        (dict(vit=dict(depht=3)), "ViTConfig has no field 'depht'"),
        (dict(text=dict(pool="mean")), "TextConfig has no field 'pool'"),
        (dict(text=dict(vocab_size=7)), "the configuration says 7"),
        (dict(text=dict(norm="Post")), "norm is 'Post'; choose one of pre, post"),
        (dict(text=dict(pooling="cls")), "pooling is 'cls'; choose one of mean, first"),
        (dict(text=dict(activation="relu")), "activation is 'relu'"),
        (dict(text=dict(dropout=1.5)), "dropout is 1.5"),
        (dict(text=dict(depth=0)), "depth is 0"),
        (dict(text=dict(dim=30, heads=4)), "dim 30 is no multiple of heads 4"),
        (dict(text=dict(depth=2, cross_every=3)), "cross_every 3 exceeds depth 2"),
        (dict(text=dict(cross_every=0)), "cross_every is 0"),
        (dict(vit=dict(pooling="map")), "no question would train"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_is_refused(make_qa, options, message):
    with pytest.raises(InputError) as caught:
        make_qa(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match="no ImageQA preset is called 'huge'; choose one of demo"):
        ImageQA.preset("huge", questions=["Is it?"], answers=["yes"])


def test_answers_keep_their_order(make_qa, picture):
    qa = make_qa(answers=("zebra", "ant", "Ant", "mole"))
    assert qa.config.answers == ("zebra", "ant", "Ant", "mole")
    with torch.no_grad():
        qa.head.weight.zero_()
        qa.head.bias.copy_(torch.tensor([1.0, 4.0, 2.0, 3.0]))
    assert [text for text, _ in qa.ask(qa.look(picture(0)), "Who?").top] == ["ant", "mole", "Ant", "zebra"]


# Saving and loading


@pytest.mark.parametrize("text", [{}, dict(norm="post", gate=True, qk_norm=True, pooling="first")], ids=str)
def test_a_loaded_model_is_the_same_to_the_last_bit(make_qa, picture, questions, tmp_path, text):
    qa = make_qa(
        dict(registers=2, registers_place="end"), text, answers=("z", "a", "m", "ü", '"'), score="sigmoid"
    ).train()
    qa.save_pretrained(tmp_path / "model")
    assert {f.name for f in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    loaded = ImageQA.from_pretrained(tmp_path / "model")
    assert not loaded.training
    assert all(p.requires_grad for p in loaded.parameters())
    assert loaded.config == qa.config
    assert loaded.preprocess == qa.preprocess
    tensors = loaded.state_dict()
    assert tensors.keys() == qa.state_dict().keys()
    for name, tensor in qa.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    pictures = [picture(0), None, picture(1, 16, 48)]
    groups = [questions, questions[:1], [*questions[1:], "What zebra 狗?"]]
    for before, after in zip(qa.ask(qa.look(pictures), groups), loaded.ask(loaded.look(pictures), groups), strict=True):
        assert before == after
        for a, b in zip(before, after, strict=True):
            if a.attention._memory.grids != ((None,),):
                assert torch.equal(a.attention.rows(), b.attention.rows())


def test_saving_again_replaces_the_model(make_qa, tmp_path):
    make_qa().save_pretrained(tmp_path / "model")
    make_qa(answers=("up", "down")).save_pretrained(tmp_path / "model")
    assert ImageQA.from_pretrained(tmp_path / "model").config.answers == ("up", "down")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def saved(make_qa, tmp_path):
    make_qa().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(folder, kind=ImageQA):
    with pytest.raises(InputError) as caught:
        kind.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_missing_or_broken_file_is_named(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    assert str(saved / name) in refusal(saved)
    (saved / name).unlink()
    assert str(saved / name) in refusal(saved)


def test_a_tokenizer_of_another_size_is_refused(saved, questions):
    TextTokenizer.train(questions[:2]).save(saved / "tokenizer.json")
    message = refusal(saved)
    assert str(saved / "tokenizer.json") in message
    assert "12 tokens, config.json says" in message
    with pytest.raises(InputError, match="the tokenizer has 12 tokens"):
        ImageQA(
            ImageQAConfig(ViT.preset("tiny", dim=32, depth=1, heads=4).config, TextConfig(13, dim=32, heads=4), ("a",)),
            TextTokenizer.from_file(saved / "tokenizer.json"),
        )


def test_a_folder_of_another_kind_of_model_is_told(saved, make_qa, tmp_path):
    make_qa().vit.save_pretrained(tmp_path / "vit")
    assert "holds a ViTConfig" in refusal(tmp_path / "vit")
    assert "holds a ImageQAConfig" in refusal(saved, ViT)


def test_a_changed_passport_is_refused(saved):
    passport = json.loads((saved / "config.json").read_text())
    for change, message in [
        (dict(answers=["yes", "no", "red", "two", "two"]), "'two' twice"),
        (dict(answers=["yes"]), "head"),
        (dict(score="argmax"), "argmax"),
        (dict(text=passport["text"] | {"norm": "both"}), "both"),
        (dict(text=passport["text"] | {"cross_every": 2}), "unused: text.layers.0.cross"),
        (dict(text=passport["text"] | {"gate": True}), "missing: text.layers.0.cross.gate"),
    ]:
        (saved / "config.json").write_text(json.dumps(passport | change))
        assert message in refusal(saved)


# Learning


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_overfits_ten_triplets_and_answers_them(score, picture):
    torch.manual_seed(0)
    answers = sorted({answer for _, _, answer in TRIPLETS})
    qa = ImageQA.preset(
        questions=[question for _, question, _ in TRIPLETS],
        answers=answers,
        score=score,
        vit=dict(image_size=(24, 40), patch_size=8, dim=32, depth=1, heads=4, registers=1),
        text=dict(dim=32, depth=1, heads=4),
    )
    images = torch.stack([picture(seed) for seed in range(8)])
    of = torch.tensor([image for image, _, _ in TRIPLETS])
    encoded = qa.tokenizer([question for _, question, _ in TRIPLETS], 64)
    target = torch.tensor([answers.index(answer) for _, _, answer in TRIPLETS])
    hot = F.one_hot(target, len(answers)).float()
    optimizer = torch.optim.AdamW(qa.parameters(), lr=1e-2)
    qa.train()
    for _ in range(220):
        logits = qa.logits(qa.remember(images), encoded.ids, encoded.mask, of)
        loss = (
            F.cross_entropy(logits, target)
            if score == "softmax"
            else F.binary_cross_entropy_with_logits(logits, hot, reduction="sum") / len(hot)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    memory = qa.look(images)
    for image, question, answer in TRIPLETS:
        got = qa.ask(memory[image], question)
        assert got.text == answer
        assert got.probability > 0.95


# Every weight has a use


@pytest.mark.parametrize(
    "vit",
    [
        dict(),
        dict(registers=2, registers_place="end", position_rows="cls+registers+patches"),
        dict(class_token=False, pooling="mean", qk_norm=True, layer_scale=0.1, activation="swiglu", pre_norm=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [dict(), dict(norm="post", gate=True, qk_norm=True, pooling="first", cross_every=2)])
def test_no_parameter_stays_without_gradient(make_qa, picture, questions, vit, text):
    qa = make_qa(vit, text).train()
    encoded = qa.tokenizer(questions, 64)
    logits = qa.logits(qa.remember(picture(0)[None]), encoded.ids, encoded.mask, torch.zeros(6, dtype=torch.long))
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 0])).backward()
    for name, parameter in qa.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert (parameter.grad != 0).any(), name


def test_a_closed_gate_lets_the_first_gradient_reach_itself(make_qa, picture, questions):
    qa = make_qa(text=dict(gate=True), random=False).train()
    encoded = qa.tokenizer(questions, 64)
    none = torch.zeros(6, dtype=torch.long)
    text_only = qa.head(qa.text.pool(qa.text(encoded.ids, encoded.mask), encoded.mask))
    logits = qa.logits(qa.remember(picture(0)[None]), encoded.ids, encoded.mask, none)
    assert torch.equal(logits, text_only), "a closed gate leaves the text encoder as it was"
    logits.pow(2).sum().backward()
    assert all((cross.gate.grad != 0).all() for cross in qa.text.asking)


def test_what_is_no_memory_of_this_model_is_refused(make_qa, picture, questions):
    qa = make_qa()
    narrow = make_qa(text=dict(dim=12, heads=1))
    for memory, says in (
        (None, "not a NoneType"),
        (picture(0), "memory that `look` returns"),
        (narrow.look(picture(0)), "another model"),
    ):
        with pytest.raises(InputError, match=says):
            qa.ask(memory, questions[0])
    for top in (0, 1.5, None):
        with pytest.raises(InputError, match="top is"):
            qa.ask(qa.look(picture(0)), questions[0], top=top)


def test_memories_and_tokens_can_be_compared_and_hashed(make_qa, picture):
    qa = make_qa()
    first, second = qa.look(picture(0)), qa.look(picture(0))
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    tokens = qa.vit(picture(0)[None])
    assert tokens == tokens


def test_a_picture_given_to_the_vit_itself_is_told_to_be_preprocessed(make_qa):
    with pytest.raises(InputError, match="preprocess"):
        make_qa().vit("photo.png")
