"""An item may be several images: their tokens stand side by side, and every map knows which image it is of."""

import copy
import json

import pytest
import torch

from regard.crossattn import ImageQA, ImageQAConfig
from regard.crossattn.relevance import answer_relevance
from regard.vit import InputError
from regard.vit.tokens import Tokens

LAYOUTS = {
    "class token": dict(),
    "registers at the end": dict(registers=3, registers_place="end", position_rows="cls+registers+patches"),
    "patches only": dict(class_token=False, pooling="mean"),
}
HEADS = {"vocabulary": dict(), "rank": dict(head="rank"), "generate": dict(head="generate", decoder=dict(beams=2))}


@pytest.fixture(params=[1, 3], ids=["order untold", "order told"])
def images(request):
    return request.param


def logits(qa, memory, questions):
    encoded = qa.tokenizer(questions, 64)
    with torch.inference_mode():
        return qa.logits(memory, encoded.ids, encoded.mask)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vit", LAYOUTS.values(), ids=LAYOUTS)
def test_the_images_of_an_item_are_read_as_one_long_context(make_qa, picture, questions, vit, images):
    qa = make_qa(vit, images=images)
    front, back = picture(0), picture(1, 16, 48)
    memory = qa.look([[front, back]])
    special = qa.config.vit.class_token + qa.config.vit.registers
    assert memory.grids == (((3, 5), (2, 6)),)
    assert memory.spans() == (slice(0, special + 15), slice(special + 15, 2 * special + 27))
    assert memory.visible is None
    with torch.inference_mode():
        parts = []
        for place, image in enumerate((front, back)):
            tokens: Tokens = qa.vit(image[None])
            cls = [] if tokens.cls is None else [tokens.cls[:, None]]
            part = torch.cat([*cls, tokens.registers, tokens.patches], dim=1)
            parts.append(part if images == 1 else part + qa.image_index.weight[place])
        context = torch.cat(parts, dim=1)
        for cross, kept in zip(qa.text.asking, memory.layers, strict=True):
            expected = cross.remember(context)
            close(kept.k, expected.k)
            close(kept.v, expected.v)


@pytest.mark.parametrize("head", HEADS)
def test_an_item_of_several_images_does_not_depend_on_its_batch(make_qa, picture, questions, images, head):
    qa = make_qa(dict(registers=2), images=images, **HEADS[head])
    items = [
        [picture(0), picture(1, 16, 48)],
        picture(2),
        None,
        [picture(3, 8, 72), None, picture(4)],
        [],
        [picture(5)],
    ]
    groups = [questions[:3], questions[1:2], questions[:1], questions[2:4], questions[5:], []]
    answers = qa.ask(qa.look(items), groups)
    assert [len(group) for group in answers] == [3, 1, 1, 2, 1, 0]
    shown = []
    for item, group in zip(items, answers, strict=True):
        alone = qa.look([item])
        for answer in group:
            expected = qa.ask(alone, answer.question)
            assert answer.text == expected.text
            close(torch.tensor(answer.logs), torch.tensor(expected.logs))
            shown.append(answer.logs[0])
            for image in range(answer.attention.images):
                if alone.grids[0][image] is not None:
                    close(answer.attention.map(0, image=image), expected.attention.map(0, image=image))
    assert len({round(value, 3) for value in shown}) > 5, "the items and questions must matter"


def test_an_item_of_one_picture_is_what_it_was(make_qa, picture, questions, images):
    qa = make_qa(images=images)
    plain = logits(qa, qa.look(picture(0)), questions)
    for item in ([[picture(0)]], [(picture(0),)], [picture(0)], [[picture(0), None]], [[picture(0), None, None]]):
        assert torch.equal(logits(qa, qa.look(item), questions), plain)
    assert not torch.allclose(logits(qa, qa.look([[picture(0), picture(1)]]), questions), plain, atol=1e-3)


def test_without_an_index_the_place_and_order_of_images_make_no_difference(make_qa, picture, questions):
    qa = make_qa(dict(registers=2))
    pictures = [picture(0), picture(1, 16, 48), picture(2)]
    straight = logits(qa, qa.look([pictures]), questions)
    close(logits(qa, qa.look([pictures[::-1]]), questions), straight)
    assert torch.equal(logits(qa, qa.look([[None, picture(0)]]), questions), logits(qa, qa.look(picture(0)), questions))


def test_with_an_index_they_do(make_qa, picture, questions):
    qa = make_qa(dict(registers=2), images=3)
    pictures = [picture(0), picture(1, 16, 48), picture(2)]
    straight = logits(qa, qa.look([pictures]), questions)
    assert not torch.allclose(logits(qa, qa.look([pictures[::-1]]), questions), straight, atol=1e-2)
    second = logits(qa, qa.look([[None, picture(0)]]), questions)
    assert not torch.allclose(second, logits(qa, qa.look(picture(0)), questions), atol=1e-2)


def test_the_index_starts_at_nothing_and_learns(make_qa, picture, questions):
    plain, qa = make_qa(random=False), make_qa(random=False, images=3)
    assert torch.equal(qa.image_index.weight, torch.zeros(3, 32))
    assert plain.image_index is None
    qa.load_state_dict({**plain.state_dict(), "image_index.weight": qa.image_index.weight})
    items = [[picture(0), picture(1)], picture(2)]
    encoded = qa.tokenizer(questions[:2], 64)
    assert torch.equal(*(logits(model, model.remember(items), questions[:2]) for model in (plain, qa)))
    qa.logits(qa.remember(items), encoded.ids, encoded.mask).pow(2).sum().backward()
    grad = qa.image_index.weight.grad
    assert [(row != 0).any().item() for row in grad] == [True, True, False], "the third has no image"


def test_the_gradient_of_an_item_reaches_every_one_of_its_images(make_qa, picture, questions, images):
    qa = make_qa(dict(registers=2), dict(gate=True), images=images)
    pictures = [
        picture(seed, *size).requires_grad_() for seed, size in enumerate([(24, 40), (16, 48), (24, 40), (8, 72)])
    ]
    encoded = qa.tokenizer(questions[:3], 64)
    memory = qa.remember([[pictures[0], None, pictures[1]], pictures[2], [pictures[3]]])
    qa.logits(memory, encoded.ids, encoded.mask)[:2].pow(2).sum().backward()
    assert all((p.grad != 0).any() for p in pictures[:3])
    assert pictures[3].grad is None or not pictures[3].grad.any()


def test_images_of_one_size_are_encoded_together_whatever_items_they_are_of(make_qa, picture, monkeypatch):
    qa = make_qa(images=3)
    forward, batches = qa.vit.forward, []
    monkeypatch.setattr(qa.vit, "forward", lambda x: batches.append(tuple(x.shape)) or forward(x))
    qa.look([[picture(0), picture(1, 16, 48)], picture(2), None, [None, picture(3), picture(4, 16, 48)]])
    assert batches == [(3, 3, 24, 40), (2, 3, 16, 48)]
    batches.clear()
    qa.look([[picture(0), picture(1)], [picture(2), picture(3)]])
    assert batches == [(4, 3, 24, 40)]


@pytest.mark.parametrize("vit", LAYOUTS.values(), ids=LAYOUTS)
def test_maps_are_split_by_image_and_sum_to_one_together(make_qa, picture, questions, vit, images):
    qa = make_qa(vit, images=images)
    answer = qa.ask(qa.look([[picture(0), None, picture(1, 16, 48)], picture(2)]), [questions[:1], []])[0][0]
    maps = answer.attention
    assert maps.images == 3
    special = qa.config.vit.class_token + qa.config.vit.registers
    assert maps.rows().shape[-1] == 2 * special + 15 + 12
    for number, word in enumerate(maps.words):
        for layer, head in (("mean", "mean"), (0, 1), (-1, "mean")):
            first, last = (maps.map(number, layer, head, image=i) for i in (0, 2))
            assert (first.shape, last.shape) == ((3, 5), (2, 6))
            assert torch.equal(maps.map(number, layer, head, image=-1), last)
            assert torch.equal(maps.map(number, layer, head), first)
            masses = [maps.mass(number, layer, head, image=i) for i in (0, 2)]
            assert sum(share for mass in masses for share in mass.values()) == pytest.approx(1, abs=1e-5)
            for heat, mass in zip((first, last), masses, strict=True):
                assert mass["patches"] == pytest.approx(heat.sum().item(), abs=1e-6)
                assert mass["patches"] > 0.01
        assert torch.equal(maps[word], maps.map(word, image=0))


def test_swapped_images_swap_their_maps(make_qa, picture, questions):
    qa = make_qa()
    front, back = picture(0), picture(1, 16, 48)
    one, two = (qa.ask(qa.look([pair]), questions[0]).attention for pair in ([front, back], [back, front]))
    for word in one.words:
        close(one.map(word, image=0), two.map(word, image=1))
        close(one.map(word, image=1), two.map(word, image=0))


def test_an_image_that_answers_the_question_draws_the_map(make_qa, picture):
    """The key that a word looks for is planted in one patch of the second image."""
    qa = make_qa(dict(class_token=False, pooling="mean"))
    memory = qa.look([[picture(0), picture(1, 16, 48)]])
    question = "What colour is the car?"
    asked = []
    encoded = qa.tokenizer([question], 64)
    with torch.inference_mode():
        qa.read(memory, encoded.ids, encoded.mask, asked=asked)
        word = encoded.words[0][0].tokens[0]
        for kept, q in zip(memory.layers[:1], asked, strict=False):
            kept.k[0, :, 15 + 7] = 50 * q[0, :, word] / q[0, :, word].norm(dim=-1, keepdim=True) ** 2
    heat = qa.ask(memory, question).attention.map(0, layer=0, image=1)
    assert divmod(int(heat.argmax()), 6) == (1, 1)
    assert heat.max() > 0.9


def test_what_an_answer_token_read_is_split_by_image(make_qa, picture, questions, images):
    qa = make_qa(dict(registers=2), images=images, head="rank")
    answer = qa.ask(qa.look([[picture(0), picture(1, 16, 48)]]), questions[0])
    for token in range(len(answer.written.tokens)):
        first, second = (answer.written.map(token, image=image) for image in (0, 1))
        assert (first.shape, second.shape) == ((3, 5), (2, 6))
        assert 0 < first.sum() + second.sum() < 1
        assert torch.equal(answer.written.map(token), first)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda maps: maps.map("car", image=3), "image 3 does not exist: the question was asked of 3"),
        (lambda maps: maps.map("car", image=-4), "image -4 does not exist"),
        (lambda maps: maps.mass("car", image="first"), "image 'first' does not exist"),
        (lambda maps: maps.map("car", image=1), "image 1 of this question is none"),
        (lambda maps: maps.mass("car", image=1), "image 1 of this question is none"),
    ],
)
def test_maps_of_images_that_are_not_there_are_refused(make_qa, picture, questions, use, says):
    maps = make_qa().ask(make_qa().look([[picture(0), None, picture(1)]]), questions[0]).attention
    with pytest.raises(InputError, match=says):
        use(maps)


@pytest.mark.parametrize("item", [None, [], [None], [None, None]], ids=str)
def test_an_item_without_any_image_is_no_image(make_qa, picture, questions, item):
    qa = make_qa(images=2)
    memory = qa.look([item, [picture(0), picture(1)]])
    blind = qa.ask(memory, [questions[:1], []])[0][0]
    assert blind.top == qa.ask(qa.look(None), questions[0]).top
    for use in (lambda maps: maps.rows(), lambda maps: maps[maps.words[0]], lambda maps: maps.mass(0)):
        with pytest.raises(InputError, match="asked without an image"):
            use(blind.attention)


def test_more_images_than_the_model_tells_apart_are_refused(make_qa, picture):
    qa = make_qa(images=2)
    four = [picture(seed) for seed in range(4)]
    assert make_qa().look([four]).grids == (((3, 5),) * 4,)
    for call in (qa.look, qa.remember):
        with pytest.raises(InputError, match="item 1 has 4 images, this model tells 2 apart"):
            call([picture(0), four])
    assert len(qa.look(four)) == 4, "a list of pictures is a list of items"
    for bad in ([[[picture(0)]]], [[picture(0), [None]]]):
        with pytest.raises(InputError, match="list within a list within a list"):
            qa.look(bad)
    with pytest.raises(InputError, match="images is 0"):
        make_qa(images=0)


def test_a_memory_of_several_images_is_cut_joined_and_saved(make_qa, picture, questions, tmp_path):
    qa = make_qa(dict(registers=2), images=3)
    items = [[picture(0), picture(1, 16, 48)], picture(2), [None, picture(3)]]
    memory = qa.look(items)
    memory.save(tmp_path / "memory")
    loaded = type(memory).load(tmp_path / "memory")
    assert loaded.grids == memory.grids == (((3, 5), (2, 6)), ((3, 5),), (None, (3, 5)))
    expected = qa.ask(memory, questions[:3])
    for again in (loaded, memory[:1] + memory[[1, 2]], memory[[2, 0, 1]][[1, 2, 0]]):
        for a, b in zip(qa.ask(again, questions[:3]), expected, strict=True):
            close(torch.tensor(a.logs), torch.tensor(b.logs))
            close(a.attention.map(0, image=-1), b.attention.map(0, image=-1))
    assert qa.ask(loaded, questions[:3]) == expected
    with torch.no_grad():
        qa.image_index.weight[1] += 0.1
    with pytest.raises(InputError, match="other weights"):
        qa.ask(memory, questions[:3])


def test_a_model_for_several_images_is_saved_and_older_ones_open(make_qa, picture, questions, tmp_path):
    qa = make_qa(images=3)
    qa.save_pretrained(tmp_path / "several")
    again = ImageQA.from_pretrained(tmp_path / "several")
    assert torch.equal(again.image_index.weight, qa.image_index.weight)
    item = [[picture(0), picture(1)]]
    assert again.ask(qa.look(item), questions) == qa.ask(again.look(item), questions)
    single = make_qa()
    single.save_pretrained(tmp_path / "single")
    path = tmp_path / "single" / "config.json"
    passport = json.loads(path.read_text())
    del passport["images"]
    path.write_text(json.dumps(passport))
    opened = ImageQA.from_pretrained(tmp_path / "single")
    assert isinstance(opened.config, ImageQAConfig)
    assert opened.config.images == 1
    assert opened.ask(single.look(picture(0)), questions) == single.ask(single.look(picture(0)), questions)


def test_relevance_is_of_one_picture_as_the_first_of_its_item(make_qa, picture, questions):
    qa = make_qa(images=2)
    found = answer_relevance(qa, picture(0), questions[0], "red")
    encoded = qa.tokenizer(questions[:1], 64)
    expected = qa.logits(qa.remember(picture(0)[None]), encoded.ids, encoded.mask)[0, qa.config.answers.index("red")]
    assert found.logit == pytest.approx(expected.item(), abs=1e-5)
    for bad in ([[picture(0), picture(1)]], [picture(0), picture(1)], None, [[]]):
        with pytest.raises(InputError, match="one, by itself"):
            answer_relevance(qa, bad, questions[0])


def test_batches_of_uint8_pictures_make_items_too(make_qa, picture):
    qa = make_qa()
    pixels = torch.randint(0, 256, (2, 3, 24, 40), dtype=torch.uint8)
    pair = qa.look([[pixels[0], qa.preprocess(pixels[1])[0]]])
    assert torch.equal(pair.layers[0].k, qa.look([list(pixels)]).layers[0].k)
    assert len(qa.look(pixels)) == 2
    assert copy.deepcopy(qa).look([tuple(pixels)]).grids == (((3, 5), (3, 5)),)
