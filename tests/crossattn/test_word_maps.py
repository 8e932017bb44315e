import copy
import math

import pytest
import torch
import torch.nn.functional as F

from regard.crossattn import ImageQA, ImageQAConfig, TextConfig, TextTokenizer
from regard.vit import InputError

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "what",
    "colour",
    "is",
    "the",
    "ele",
    "##ph",
    "##ant",
    "?",
    "big",
    "##ger",
]
LAYOUTS = {
    "class token": dict(),
    "registers at the end": dict(registers=3, registers_place="end", position_rows="cls+registers+patches"),
    "no class token": dict(class_token=False, registers=2, pooling="mean"),
    "patches only": dict(class_token=False, pooling="mean"),
}


@pytest.fixture
def splitting(make_qa, randomize, tmp_path):
    """A model whose vocabulary splits `elephant` in three and `bigger` in two."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    tokenizer = TextTokenizer.from_file(path)

    def make(vit=None, **text):
        config = make_qa(vit).config.vit
        text = TextConfig(vocab_size=len(tokenizer), **dict(dim=32, depth=2, heads=4) | text)
        return randomize(ImageQA(ImageQAConfig(config, text, ("yes", "no")), tokenizer)).eval()

    return make


def layer_norm(x, norm):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def rows_by_hand(qa, image, ids):
    """The rows of every asking layer `(L, H, T, N)`, from the weights alone, in float64, pre- and post-norm."""
    qa = copy.deepcopy(qa).double()
    tokens = qa.vit(image[None].double())
    context = torch.cat([*([] if tokens.cls is None else [tokens.cls]), tokens.registers[0], tokens.patches[0]])
    heads, post = qa.config.text.heads, qa.config.text.norm == "post"
    text = qa.text
    x = text.words.weight[ids] + text.positions[: len(ids)]
    x = layer_norm(x, text.norm) if post else x
    found = []

    def attend(attn, x, context):
        q, k, v = (
            F.linear(t, m.weight, m.bias) for t, m in ((x, attn.to_q), (context, attn.to_k), (context, attn.to_v))
        )
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (q, k, v))  # (H, tokens, K)
        if isinstance(attn.norm_q, torch.nn.LayerNorm):
            q, k = layer_norm(q, attn.norm_q), layer_norm(k, attn.norm_k)
        rows = torch.exp(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]))
        rows = rows / rows.sum(dim=-1, keepdim=True)
        return F.linear((rows @ v).transpose(0, 1).flatten(1), attn.out.weight, attn.out.bias), rows

    def add(x, norm, branch, post=post):
        return layer_norm(x + branch(x), norm) if post else x + branch(layer_norm(x, norm))

    for layer in text.layers:
        x = add(x, layer.norm1, lambda y, layer=layer: attend(layer.attn, y, y)[0])
        if layer.cross is not None:

            def ask(y, cross=layer.cross):
                out, rows = attend(cross.attn, y, context)
                found.append(rows)
                return out if cross.gate is None else torch.tanh(cross.gate) * out

            x = add(x, layer.norm2, ask, post and layer.cross.gate is None)
        mlp = layer.mlp
        x = add(x, layer.norm3, lambda y, m=mlp: F.linear(F.gelu(F.linear(y, m.fc1.weight, m.fc1.bias)), m.fc2.weight, m.fc2.bias))  # fmt: skip  # noqa: E501
    return torch.stack(found)


@pytest.mark.parametrize("vit", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("text", [{}, dict(norm="post", gate=True, qk_norm=True, depth=3, cross_every=2)], ids=str)
def test_a_map_equals_a_recomputation_from_the_weights(splitting, picture, vit, text):
    qa = splitting(vit, **text)
    question = "What colour is the elephant?"
    ids = qa.tokenizer([question], 64).ids[0]
    with torch.no_grad():
        rows = rows_by_hand(qa, picture(0), ids)
    lead = qa.config.vit.class_token + qa.config.vit.registers
    assert rows.shape == (2, 4, 10, lead + 15)
    maps = qa.ask(qa.look(picture(0)), question).attention
    torch.testing.assert_close(maps.rows().double(), rows, atol=1e-5, rtol=0)
    expected = rows[..., lead:].unflatten(-1, (3, 5))
    assert expected.std() > 1e-3, "flat maps would prove nothing"
    words = {"What": [1], "colour": [2], "is": [3], "the": [4], "elephant": [5, 6, 7], "?": [8]}
    for number, (word, places) in enumerate(words.items()):
        for layer in (0, 1, -1):
            for head in (0, 3, -2):
                one = maps.map(word, layer=layer, head=head).double()
                torch.testing.assert_close(one, expected[layer, head, places].mean(dim=0), atol=1e-5, rtol=0)
        whole = expected[:, :, places].mean(dim=(0, 1, 2))
        torch.testing.assert_close(maps[word].double(), whole, atol=1e-5, rtol=0)
        assert torch.equal(maps.map(number), maps[word])
        assert torch.equal(maps.map(number - 6), maps[word])
        half = expected[1][:, places].mean(dim=(0, 1))
        torch.testing.assert_close(maps.map(word, layer=1).double(), half, atol=1e-5, rtol=0)
        third = expected[:, 2, places].mean(dim=(0, 1))
        torch.testing.assert_close(maps.map(word, head=2).double(), third, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vit", LAYOUTS.values(), ids=LAYOUTS)
def test_every_word_has_a_map_whose_parts_sum_to_one(make_qa, picture, questions, vit):
    qa = make_qa(vit)
    memory = qa.look([picture(0), None, picture(1, 16, 48)])
    for image, grid in ((0, (3, 5)), (2, (2, 6))):
        for answer in qa.ask(memory[image], questions):
            assert len(answer.attention.words) >= 2
            for number, word in enumerate(answer.attention.words):
                for layer, head in (("mean", "mean"), (0, 1), (1, "mean"), ("mean", 3)):
                    where = answer.attention.map(number, layer, head)
                    mass = answer.attention.mass(number, layer, head)
                    assert where.shape == grid
                    assert (where >= 0).all()
                    assert sum(mass.values()) == pytest.approx(1, abs=1e-5)
                    assert mass["patches"] == pytest.approx(where.sum().item(), abs=1e-6)
                    assert (mass["cls"] > 0) == qa.config.vit.class_token
                    assert (mass["registers"] > 0) == (qa.config.vit.registers > 0)
                assert answer.attention[word].shape == grid


def test_maps_of_a_batch_equal_maps_one_by_one(make_qa, picture, questions):
    qa = make_qa(dict(registers=2))
    pictures = [picture(0), picture(1, 16, 48), picture(2, 40, 24)]
    together = qa.ask(qa.look([*pictures, None]), [questions, questions, questions, questions])
    for image, answers in zip(pictures, together, strict=False):
        memory = qa.look(image)
        for question, answer in zip(questions, answers, strict=True):
            alone = qa.ask(memory, question).attention
            assert answer.attention.words == alone.words
            torch.testing.assert_close(answer.attention.rows(), alone.rows(), atol=1e-5, rtol=0)


def test_padding_of_questions_and_images_never_appears(make_qa, picture):
    qa = make_qa(dict(registers=2))
    memory = qa.look([picture(0, 8, 16), picture(1, 40, 48)])
    short, long = qa.ask(memory, ["Who?", "Is it " * 9 + "asleep?"])
    assert short.attention.rows().shape == (2, 4, 4, 1 + 2 + 2)
    assert long.attention.rows().shape == (2, 4, 22, 1 + 2 + 30)
    for answer in (short, long):
        sums = answer.attention.rows().sum(dim=-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_asking_for_maps_changes_nothing(make_qa, picture, questions, scores):
    qa = make_qa()
    memory = qa.look(picture(0))
    first = qa.ask(memory, questions)
    maps = [{word: where.clone() for word, where in answer.attention.items()} for answer in first]
    second = qa.ask(memory, questions)
    for a, b, kept in zip(first, second, maps, strict=True):
        assert a.top == b.top
        for word, where in b.attention.items():
            assert torch.equal(where, kept[word])
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in qa.modules())


def test_a_map_tells_what_was_asked_even_if_the_model_learns_on(make_qa, randomize, picture, questions):
    qa = make_qa()
    early, late = (qa.ask(qa.look(picture(0)), questions[0]).attention for _ in range(2))
    expected = early["car"]
    randomize(qa, seed=7)
    qa.train()
    assert torch.equal(late["car"], expected)


def test_maps_can_be_drawn_outside_inference_mode(make_qa, picture, questions):
    where = make_qa().ask(make_qa().look(picture(0)), questions[0]).attention["car"]
    where /= where.sum()
    assert where.numpy().shape == (3, 5)
    assert not where.requires_grad


def test_sub_tokens_are_joined_to_words(splitting, picture):
    qa = splitting()
    answer = qa.ask(qa.look(picture(0)), "Bigger elephant, bigger the zebra?")
    assert answer.attention.words == ("Bigger", "elephant", ",", "bigger", "the", "zebra", "?")
    assert answer.unknown == (",", "zebra")
    assert len(qa.tokenizer([answer.question], 64).ids[0]) == 2 + 2 + 3 + 1 + 2 + 1 + 1 + 1


def test_a_word_that_stands_twice_gives_the_mean_of_its_places(make_qa, picture):
    answer = make_qa().ask(make_qa().look(picture(0)), "the red house, the green tree, The car")
    maps = answer.attention
    assert maps.words == ("the", "red", "house", ",", "the", "green", "tree", ",", "The", "car")
    first, second = maps.map(0), maps.map(4)
    assert not torch.allclose(first, second, atol=1e-4)
    torch.testing.assert_close(maps["the"], (first + second) / 2)
    assert torch.equal(maps["The"], maps.map(8))
    assert list(maps) == ["the", "red", "house", ",", "green", "tree", "The", "car"]
    assert len(maps) == len(list(maps)) == len(maps.items())


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is THE Car", ["What", "is", "THE", "Car"]),
        ("What?! is: it...", ["What", "?", "!", "is", ":", "it", ".", ".", "."]),
        ("don't it’s", ["don", "'", "t", "it", "’", "s"]),
        ("Où est le CAFÉ?", ["Où", "est", "le", "CAFÉ", "?"]),
        ("cafe\u0301s or cafe\u0301", ["cafe\u0301s", "or", "cafe\u0301"]),
        ("狗在哪里", ["狗", "在", "哪", "里"]),
        ("is 狗it", ["is", "狗", "it"]),
        ("is it 🐕 or 👍🏽?", ["is", "it", "🐕", "or", "👍🏽", "?"]),
        ("   What \t is\n\n it   ", ["What", "is", "it"]),
        ("Straße İs", ["Straße", "İs"]),
        ("[SEP] [PAD]", ["[", "SEP", "]", "[", "PAD", "]"]),
        ("12.5%", ["12", ".", "5", "%"]),
    ],
)
def test_words_are_spelled_as_typed(make_qa, picture, question, words):
    qa = make_qa()
    answer = qa.ask(qa.look(picture(0)), question)
    assert answer.question == question
    assert list(answer.attention.words) == words
    for number, word in enumerate(words):
        assert answer.attention[word].shape == answer.attention.map(number).shape == (3, 5)


def test_words_layers_and_heads_that_do_not_exist_are_named(make_qa, picture):
    qa = make_qa()
    maps = qa.ask(qa.look(picture(0)), "What is it?").attention
    with pytest.raises(InputError, match=r"no word 'zebra'; its words are What, is, it, \?"):
        maps["zebra"]
    with pytest.raises(InputError, match="no word 'what'"):
        maps["what"]
    for number in (4, -5):
        with pytest.raises(InputError, match=f"word {number} does not exist: the question has 4 words"):
            maps.map(number)
    for wrong in (2, -3, "all", None):
        with pytest.raises(InputError, match=r"layer .* does not exist: choose 0 to 1, or 'mean'"):
            maps.map("it", layer=wrong)
    for wrong in (4, -5, "max"):
        with pytest.raises(InputError, match=r"head .* does not exist: choose 0 to 3, or 'mean'"):
            maps.map("it", head=wrong)
    assert "it" in maps
    assert "zebra" not in maps
    assert 0 not in maps


def test_without_an_image_there_is_no_map_but_words(make_qa, picture):
    qa = make_qa()
    blind, seeing = qa.ask(qa.look([None, picture(0)]), ["What is it?", "What is it?"])
    assert blind.attention.words == ("What", "is", "it", "?")
    assert "it" in blind.attention
    for use in (lambda m: m["it"], lambda m: m.map(0), lambda m: m.mass("it"), lambda m: m.rows(), dict):
        with pytest.raises(InputError, match="asked without an image; there is no map"):
            use(blind.attention)
    assert seeing.attention["it"].shape == (3, 5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_maps_under_autocast_read_after_it(make_qa, picture, questions, qk_norm):
    qa = make_qa(text=dict(qk_norm=qk_norm, gate=True))
    plain = qa.ask(qa.look(picture(0)), questions[0]).attention["car"]
    with torch.autocast("cpu", torch.bfloat16):
        answer = qa.ask(qa.look(picture(0)), questions[0])
    assert answer.attention["car"].dtype == torch.float32
    torch.testing.assert_close(answer.attention["car"], plain, atol=2e-2, rtol=0)


def test_maps_are_in_full_precision_under_autocast_too(make_qa, picture, questions):
    qa = make_qa()
    with torch.autocast("cpu", torch.bfloat16):
        answer = qa.ask(qa.look(picture(0)), questions[0])
        assert answer.attention.rows().dtype == torch.float32


def test_maps_survive_a_norm_that_autocast_keeps_in_full_precision(make_qa, picture, questions):
    qa = make_qa(text=dict(qk_norm=True))
    for cross in qa.text.asking:  # on a GPU autocast does this by itself
        for norm in (cross.attn.norm_q, cross.attn.norm_k):
            norm.register_forward_hook(lambda module, inputs, output: output.float())
    with torch.autocast("cpu", torch.bfloat16):
        answer = qa.ask(qa.look(picture(0)), questions[0])
    assert answer.attention["car"].shape == (3, 5)
