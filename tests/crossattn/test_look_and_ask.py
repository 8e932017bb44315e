from dataclasses import replace

import pytest
import torch

LAYOUTS = {
    "class token": dict(),
    "registers": dict(registers=3),
    "registers at the end": dict(registers=3, registers_place="end", position_rows="cls+registers+patches"),
    "no class token": dict(class_token=False, pooling="mean"),
    "registers only, rope": dict(class_token=False, pooling="mean", registers=2, positions="rope"),
}
SIZES = [(24, 40), (16, 48), (40, 24), (8, 72)]  # 15, 12, 15 and 9 patches


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def qa(request, make_qa):
    return make_qa(request.param)


class Counting:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def test_sixteen_questions_look_once(make_qa, picture, questions, monkeypatch):
    qa = make_qa()
    encoder = Counting(qa.vit.forward)
    projections = [Counting(cross.attn.to_k.forward) for cross in qa.text.asking]
    monkeypatch.setattr(qa.vit, "forward", encoder)
    for cross, projection in zip(qa.text.asking, projections, strict=True):
        monkeypatch.setattr(cross.attn.to_k, "forward", projection)
    memory = qa.look(picture(0))
    answers = qa.ask(memory, [f"{q} {n}" for q in questions[:4] for n in range(4)])
    qa.ask(memory, questions)
    assert len(answers) == 16
    assert encoder.calls == 1
    assert [p.calls for p in projections] == [1] * len(qa.text.asking)


def test_each_size_of_a_mixed_look_is_encoded_once(make_qa, picture, monkeypatch):
    qa = make_qa()
    encoder = Counting(qa.vit.forward)
    monkeypatch.setattr(qa.vit, "forward", encoder)
    qa.look([picture(0), picture(1, 16, 48), None, picture(2), picture(3, 16, 48)])
    assert encoder.calls == 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_answers_equal_asking_one_by_one(make_qa, picture, questions, scores, score):
    qa = make_qa(dict(registers=2), score=score)
    memory = qa.look(picture(0))
    together = qa.ask(memory, questions)
    for question, answer in zip(questions, together, strict=True):
        alone = qa.ask(memory, question)
        assert (answer.question, answer.text) == (question, alone.text)
        torch.testing.assert_close(scores(answer), scores(alone), atol=1e-5, rtol=0)
        assert answer.probability == answer.top[0][1] == max(p for _, p in answer.top)
    spread = torch.stack([scores(a) for a in together]).std(dim=0)
    assert spread.max() > 1e-2, "the questions must matter for this test to mean anything"


def test_images_of_different_sizes_do_not_touch_each_other(qa, picture, questions, scores):
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    counts = [3, 1, 0, 2]
    groups = [questions[start : start + count] for start, count in enumerate(counts)]
    answers = qa.ask(qa.look(pictures), groups)
    assert [len(group) for group in answers] == counts
    for image, group, got in zip(pictures, groups, answers, strict=True):
        alone = qa.look(image)
        for question, answer in zip(group, got, strict=True):
            torch.testing.assert_close(scores(answer), scores(qa.ask(alone, question)), atol=1e-5, rtol=0)
    first = qa.ask(qa.look(pictures), [questions[0]] * 4)
    assert torch.stack([scores(a) for a in first]).std(dim=0).max() > 1e-2, "the images must matter"


def test_one_question_per_image_equals_one_by_one(qa, picture, questions, scores):
    pictures = [picture(0), picture(1), picture(2)]
    answers = qa.ask(qa.look(pictures), questions[:3])
    for image, question, answer in zip(pictures, questions[:3], answers, strict=True):
        torch.testing.assert_close(scores(answer), scores(qa.ask(qa.look(image), question)), atol=1e-5, rtol=0)


def test_permuting_questions_permutes_answers(make_qa, picture, questions, scores):
    qa = make_qa()
    memory = qa.look([picture(0), picture(1, 16, 48)])
    order = [4, 2, 5, 0, 3, 1]
    straight = qa.ask(memory, [questions, questions])
    shuffled = qa.ask(memory, [[questions[i] for i in order], questions])
    for place, i in enumerate(order):
        torch.testing.assert_close(scores(shuffled[0][place]), scores(straight[0][i]), atol=1e-5, rtol=0)
    swapped = qa.ask(qa.look([picture(1, 16, 48), picture(0)]), [questions, questions])
    for a, b in zip(straight[0] + straight[1], swapped[1] + swapped[0], strict=True):
        torch.testing.assert_close(scores(a), scores(b), atol=1e-5, rtol=0)


def test_a_very_long_neighbour_changes_nothing(make_qa, picture, scores):
    qa = make_qa(text=dict(max_tokens=300))
    memory = qa.look(picture(0))
    long = "the red car " * 99
    alone, beside = qa.ask(memory, "Who?"), qa.ask(memory, [long, "Who?"])[1]
    torch.testing.assert_close(scores(beside), scores(alone), atol=1e-5, rtol=0)


def test_a_bfloat16_model_answers_mixed_batches(make_qa, picture, questions, scores):
    qa = make_qa(dict(registers=2), dict(qk_norm=True, gate=True, max_tokens=300)).bfloat16()
    memory = qa.look([picture(0), None, picture(1, 16, 48)])
    assert memory.layers[0].k.dtype == torch.bfloat16
    answers = qa.ask(memory, [[questions[0], "the red car " * 99], [questions[0]], [questions[1]]])
    for answer in (*answers[0], *answers[1], *answers[2]):
        assert abs(scores(answer).sum() - 1) < 1e-5, "probabilities come in float32"
    alone = qa.ask(qa.look(picture(0)), questions[0])
    torch.testing.assert_close(scores(answers[0][0]), scores(alone), atol=2e-2, rtol=0)
    assert answers[0][0].attention["car"].dtype == torch.float32


def test_training_takes_the_same_way_as_asking(qa, picture, questions, scores):
    images = torch.stack([picture(0), picture(1)])
    encoded = qa.tokenizer(questions, qa.config.text.max_tokens)
    of = torch.tensor([0, 1, 0, 1, 0, 1])
    logits = qa.logits(qa.remember(images), encoded.ids, encoded.mask, of)
    assert logits.requires_grad
    memory = qa.look(images)
    for row, image in enumerate(of.tolist()):
        answer = qa.ask(memory[image], questions[row])
        torch.testing.assert_close(qa.probabilities(logits)[row].detach(), scores(answer), atol=1e-5, rtol=0)


def test_a_memory_is_cut_by_image(make_qa, picture, questions, scores):
    qa = make_qa(dict(registers=2))
    memory = qa.look([picture(0), picture(1, 16, 48), None])
    assert len(memory) == 3
    assert memory.grids == (((3, 5),), ((2, 6),), (None,))
    assert (memory.cls, memory.registers) == (1, 2)
    torch.testing.assert_close(
        scores(qa.ask(memory[1], questions[0])), scores(qa.ask(qa.look(picture(1, 16, 48)), questions[0]))
    )
    assert memory[-1].grids == ((None,),)
    assert memory[1].layers[0].k.data_ptr() == memory.layers[0].k[1:].data_ptr(), "a view, not a copy"
    with pytest.raises(IndexError):
        memory[3]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_question_without_image_gets_exactly_nothing_from_it(make_qa, picture, questions, norm):
    qa = make_qa(text=dict(norm=norm))
    encoded = qa.tokenizer(questions, 64)
    none = torch.zeros(len(questions), dtype=torch.long)
    with torch.inference_mode():
        mixed = qa.logits(qa.look([None, picture(0)]), encoded.ids, encoded.mask, none)
        assert torch.equal(mixed, qa.logits(qa.look([None, picture(1)]), encoded.ids, encoded.mask, none))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_question_without_image_is_read_as_text_alone(make_qa, picture, questions, norm, gate):
    qa = make_qa(text=dict(norm=norm, gate=gate))
    encoded = qa.tokenizer(questions, 64)
    with torch.inference_mode():
        memory = qa.look([picture(0), None])
        mixed = qa.logits(memory, encoded.ids, encoded.mask, torch.ones(len(questions), dtype=torch.long))
        text_only = qa.head(qa.text.pool(qa.text(encoded.ids, encoded.mask), encoded.mask))
    assert torch.equal(mixed, text_only)
    assert not torch.allclose(mixed, qa.logits(memory, encoded.ids, encoded.mask, torch.zeros(6, dtype=torch.long)))


@pytest.mark.parametrize("alone", [False, True])
def test_no_image_is_accepted_beside_others_and_by_itself(make_qa, picture, questions, scores, alone):
    qa = make_qa(dict(registers=1), dict(norm="post", gate=True))
    memory = qa.look(None) if alone else qa.look([picture(0), None, picture(1)])
    answers = qa.ask(memory, questions[:1] if alone else [questions[:2], questions[:1], questions[2:4]])
    blind = answers[0] if alone else answers[1][0]
    torch.testing.assert_close(scores(blind), scores(qa.ask(qa.look(None), questions[0])), atol=1e-6, rtol=0)
    if not alone:
        seeing = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        for image, place, question in seeing:
            expected = qa.ask(qa.look(picture(image)), questions[question])
            torch.testing.assert_close(scores(answers[2 * image][place]), scores(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_are_finite_where_some_have_no_image(make_qa, picture, questions, norm):
    qa = make_qa(dict(registers=2), dict(norm=norm, gate=True, qk_norm=True))
    encoded = qa.tokenizer(questions[:3], 64)
    memory = qa.remember([picture(0), None, picture(1, 16, 48)])
    logits = qa.logits(memory, encoded.ids, encoded.mask, torch.tensor([1, 0, 2]))
    logits[0].pow(2).sum().backward(retain_graph=True)
    assert all(p.grad is None or (p.grad == 0).all() for p in qa.vit.parameters()), "nothing to learn from no image"
    logits.pow(2).sum().backward()
    for name, parameter in qa.named_parameters():
        if not name.startswith("vit.pool"):
            assert torch.isfinite(parameter.grad).all(), name
    assert any((p.grad != 0).any() for p in qa.vit.parameters())


def test_looking_and_asking_leave_the_model_as_it_was(make_qa, picture, questions):
    qa = make_qa(dict(drop_path=0.5, registers=1), dict(dropout=0.5))
    before = {name: tensor.clone() for name, tensor in qa.state_dict().items()}
    qa.train()
    qa.vit.eval()  # a frozen image side
    flags = {name: module.training for name, module in qa.named_modules()}
    answers = [qa.ask(qa.look(picture(0)), questions[0]) for _ in range(2)]
    answers[0].attention["car"]
    assert answers[0].top == answers[1].top, "no dropout while asking"
    assert {name: module.training for name, module in qa.named_modules()} == flags
    for bad in (torch.randn(4, 24, 40), torch.randn(24, 40)):
        with pytest.raises(ValueError, match="images must be"):
            qa.look(bad)
    assert {name: module.training for name, module in qa.named_modules()} == flags
    for name, tensor in qa.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for module in qa.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert all(p.grad is None and p.requires_grad for p in qa.parameters())


def test_a_model_without_dividing_sizes_still_remembers_its_grid(make_qa, picture, questions):
    qa = make_qa()
    memory = qa.look([picture(0, 25, 43), picture(1, 13, 70)])
    assert memory.grids == (((3, 5),), ((2, 9),))
    assert [a.attention["it"].shape for a in qa.ask(memory, ["Is it?"] * 2)] == [(3, 5), (2, 9)]


def test_a_preset_preprocesses_to_its_own_image_size(make_qa):
    assert make_qa().preprocess.size == (24, 40)
    kept = replace(make_qa().preprocess, size=None)
    assert make_qa(dict(preprocess=kept)).preprocess.size is None
