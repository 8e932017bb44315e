"""Heads and registers turned off: what is left is exactly what should be, and afterwards all is as before."""

import pytest
import torch

from regard.crossattn import ImageQA
from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import attention_rows
from regard.vit.maps.knockout import attentions, head_means, knock_out, knock_out_registers, others

WAYS = ["zero", "mean", "shuffle", "uniform"]
QUESTIONS = ["is there a red square?", "what is there?", "is it blue?"]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 24, 40)


@pytest.fixture
def qa(noisy):
    model = ImageQA.preset(
        questions=QUESTIONS, answers=["yes", "no"], vit={"dim": 48, "depth": 2}, text={"dim": 48, "depth": 2}
    )
    return noisy(model).eval()


def patches(model, images) -> torch.Tensor:
    with torch.no_grad():
        return model(images).patches


def seen(model, images, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer's heads hand over to the output projection, `(B, S, H * K)`, and what the projection makes of it."""
    kept = {}
    hook = model.blocks[layer].attn.out.register_forward_hook(lambda m, i, o: kept.update(joined=i[0], out=o))
    patches(model, images)
    hook.remove()
    return kept["joined"], kept["out"]


def test_no_heads_off_is_the_identity_to_the_bit(vit, images):
    model = vit()
    before = patches(model, images)
    for nothing in ([], {}, {0: [], 2: []}):
        with knock_out(model, nothing):
            assert all(block.attn.edit is None for block in model.blocks)
            assert torch.equal(patches(model, images), before)


def test_with_all_heads_off_the_attention_puts_out_its_bias(vit, images):
    model = vit(layer_scale=0.5)
    block = model.blocks[1]
    x = torch.randn(2, 16, 32)
    with knock_out(model, {1: [0, 1]}), torch.no_grad():
        attended = block.attn(x)
        y = block(x)
    assert torch.equal(attended, block.attn.out.bias.expand_as(attended))
    by_hand = x + block.scale1(block.attn.out.bias)
    by_hand = by_hand + block.scale2(block.mlp(block.norm2(by_hand)))
    torch.testing.assert_close(y, by_hand, rtol=1e-5, atol=1e-5)


def test_the_heads_and_the_bias_add_up_to_the_attention(vit):
    model = vit().double()
    attn, x = model.blocks[0].attn, torch.randn(2, 16, 32, dtype=torch.float64)
    with torch.no_grad():
        alone = []
        for head in range(attn.heads):
            with knock_out([attn], {0: [h for h in range(attn.heads) if h != head]}):
                alone.append(attn(x) - attn.out.bias)
        assert not torch.allclose(alone[0], alone[1])
        torch.testing.assert_close(sum(alone) + attn.out.bias, attn(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("options", [{}, dict(registers=2, head_dim=24, positions="rope", qk_norm=True)])
def test_only_the_named_head_is_replaced_and_by_what_was_said(vit, images, how, options):
    model = vit(**options)
    width = model.blocks[1].attn.head_dim
    before, _ = seen(model, images, 1)
    kept = {}
    hook = model.blocks[1].attn.to_v.register_forward_hook(lambda m, i, o: kept.update(v=o))
    with knock_out(model, [(1, 1)], how, seed=4):
        after, _ = seen(model, images, 1)
    hook.remove()
    assert torch.equal(after[..., :width], before[..., :width])
    mine = before[..., width:]
    expected = {
        "zero": torch.zeros_like(mine),
        "mean": mine.mean(dim=(0, 1)).expand_as(mine),
        "shuffle": mine[others(3, 4)],
        "uniform": kept["v"][..., width:].mean(dim=1, keepdim=True).expand_as(mine),
    }[how]
    torch.testing.assert_close(after[..., width:], expected)
    assert not torch.allclose(after[..., width:], mine)


def test_a_mean_can_be_that_of_a_whole_set(vit, images):
    model = vit()
    batches = [images, torch.randn(2, 3, 16, 16)]
    means = head_means(model, batches)
    by_hand = torch.cat([seen(model, batch, 2)[0].flatten(0, 1) for batch in batches]).mean(dim=0)
    torch.testing.assert_close(means[2].flatten().float(), by_hand)
    with knock_out(model, {2: [0]}, "mean", means=means):
        after, _ = seen(model, images, 2)
    torch.testing.assert_close(after[..., :16], by_hand[:16].expand_as(after[..., :16]))
    assert all(block.attn.edit is None for block in model.blocks)


def test_knock_outs_nest_and_leave_nothing_behind_after_an_exception(vit, images):
    model = vit()
    before = patches(model, images)
    with knock_out(model, {0: [0], 1: [1]}):
        both = patches(model, images)

    def fail_within() -> None:
        with knock_out(model, {0: [0]}):
            outer = patches(model, images)
            with knock_out(model, {1: [1]}):
                assert torch.equal(patches(model, images), both)
            assert torch.equal(patches(model, images), outer)
            with pytest.raises(ValueError, match="inner"), knock_out(model, {0: [1]}):
                raise ValueError("inner")
            assert torch.equal(patches(model, images), outer)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_within()
    assert torch.equal(patches(model, images), before)


def test_a_head_that_is_off_twice_is_edited_from_the_outside_in(vit, images):
    model = vit()
    with knock_out(model, [(0, 0)]):
        zero = patches(model, images)
        with knock_out(model, [(0, 0)], "mean"):  # the mean of zeros
            assert torch.equal(patches(model, images), zero)


def test_numbers_below_zero_count_from_the_end_and_both_ways_of_naming_agree(vit, images):
    model = vit()
    with knock_out(model, {2: [1], 0: [0]}):
        named = patches(model, images)
    with knock_out(model, [(-1, -1), (-3, 0), (2, 1)]):
        assert torch.equal(patches(model, images), named)


@pytest.mark.parametrize("how", WAYS)
def test_gradients_flow_around_a_head_that_is_off(vit, images, how):
    model = vit(layer_scale=0.5, drop_path=0.0).train()
    with knock_out(model, [(2, 0)], how):
        model(images).patches.pow(2).sum().backward()
    value = model.blocks[2].attn.to_v.weight.grad
    query = model.blocks[2].attn.to_q.weight.grad
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert value[16:].abs().sum() > 0
    assert (value[:16].abs().sum() > 0) == (how != "zero")
    assert (query[:16].abs().sum() > 0) == (how in ("mean", "shuffle"))


def test_a_compiled_model_loses_the_same_head_and_gets_it_back(vit, images):
    model = vit(depth=1)
    compiled = torch.compile(model, backend="eager")
    before = patches(compiled, images)
    for how in ("shuffle", "uniform"):
        with knock_out(model, [(0, 0)], how):
            expected = patches(model, images)
        with knock_out(compiled, [(0, 0)], how):
            torch.testing.assert_close(patches(compiled, images), expected)
        assert not torch.allclose(expected, before)
    torch.testing.assert_close(patches(compiled, images), before)


def test_maps_see_the_heads_that_are_left(vit, images):
    model = vit(registers=2)
    whole = attention_rows(model, images, layers="all")
    with knock_out(model, [(0, 0)]):
        rows = attention_rows(model, images, layers="all")
    assert torch.equal(rows.patches[:, 0], whole.patches[:, 0])
    assert not torch.allclose(rows.patches[:, 1], whole.patches[:, 1])


@pytest.mark.parametrize("part", ["vit", "words"])
def test_both_sides_of_an_image_qa_can_lose_heads(qa, part):
    pictures = torch.randn(2, 3, 64, 64)
    questions = [[QUESTIONS[0], QUESTIONS[1]], [QUESTIONS[2], QUESTIONS[0]]]

    def asked() -> torch.Tensor:
        answers = qa.ask(qa.look(pictures), questions)
        return torch.tensor([[answer.probability for answer in row] for row in answers])

    before = asked()
    for how in WAYS:
        with knock_out(qa, [(0, 1)], how, part=part):
            assert not torch.equal(asked(), before)
    assert torch.equal(asked(), before)
    assert len(attentions(qa, part)) == 2


def test_with_every_cross_attention_head_off_the_picture_does_not_matter(qa):
    one, other = torch.randn(2, 3, 64, 64)
    with knock_out(qa, {0: [0, 1, 2], 1: [0, 1, 2]}, part="words"):
        first, second = (qa.ask(qa.look(picture), QUESTIONS) for picture in (one, other))
    assert [a.probability for a in first] == [a.probability for a in second]


def test_shuffle_gives_every_image_that_of_another_each_once():
    for count in (2, 3, 7):
        donors = others(count, seed=1)
        assert sorted(donors) == list(range(count))
        assert all(donor != image for image, donor in enumerate(donors))


def test_mistakes_are_named(vit, qa, images):
    model = vit()
    for heads, message in [
        ([(3, 0)], "layer 3 does not exist"),
        ({0: [2]}, "head of layer 0 2 does not exist"),
        ([0, 1], r"give pairs \(layer, head\)"),
    ]:
        with pytest.raises(InputError, match=message), knock_out(model, heads):
            pass
    with pytest.raises(InputError, match="choose one of zero, mean"), knock_out(model, [(0, 0)], "off"):
        pass
    with pytest.raises(InputError, match="'vit' or 'words'"), knock_out(qa, [(0, 0)]):
        pass
    with pytest.raises(InputError, match="no words"), knock_out(model, [(0, 0)], part="words"):
        pass
    with pytest.raises(InputError, match="no Attention"), knock_out(torch.nn.Linear(2, 2), [(0, 0)]):
        pass
    with pytest.raises(InputError, match="at least two"), knock_out(model, [(0, 0)], "shuffle"):
        patches(model, images[:1])
    assert all(block.attn.edit is None for block in model.blocks)


def test_any_module_with_attention_in_it_can_lose_heads():
    stack = torch.nn.Sequential(Attention(32, 4), torch.nn.LayerNorm(32), Attention(32, 2))
    x = torch.randn(1, 5, 32)
    before = stack(x)
    with knock_out(stack, {-1: [1]}):
        assert not torch.equal(stack(x), before)
    assert torch.equal(stack(x), before)


# Registers


@pytest.mark.parametrize("place", ["after_cls", "end"])
@pytest.mark.parametrize("how", ["zero", "mean", "shuffle", "noise"])
def test_the_named_register_is_replaced_after_every_block(vit, images, place, how):
    model = vit(registers=3, registers_place=place)
    whole = model.intermediates(images, "all")
    with knock_out_registers(model, 1, how, seed=2):
        off = model.intermediates(images, "all")
    with knock_out_registers(model, 1, how, seed=2):  # the same seed, so the same noise
        torch.testing.assert_close(model(images).registers, model.norm(off[-1].registers))
    held, now = whole[0].registers, off[0].registers
    assert torch.equal(now[:, [0, 2]], held[:, [0, 2]])  # after the first block nothing else has changed yet
    assert torch.equal(off[0].patches, whole[0].patches)
    assert not torch.allclose(off[1].patches, whole[1].patches)
    if how == "noise":
        torch.testing.assert_close(now[:, 1].std(), held[:, 1].std(), rtol=0.5, atol=0)
        assert not torch.allclose(now[:, 1], held[:, 1])
    else:
        expected = {
            "zero": torch.zeros_like(held[:, 1]),
            "mean": held[:, 1].mean(dim=0).expand_as(held[:, 1]),
            "shuffle": held[others(3, 2), 1],
        }[how]
        torch.testing.assert_close(now[:, 1], expected)
    assert all(block.edit is None for block in model.blocks)


def test_registers_without_their_own_content_do_not_tell_images_apart(vit, images):
    model = vit(registers=2)
    for how in ("zero", "mean"):
        with knock_out_registers(model, "all", how):
            registers = model(images).registers
        assert torch.equal(registers[0], registers[1])
        assert torch.equal(registers[0], registers[2])


def test_maps_see_the_registers_that_are_off(vit, images):
    model = vit(registers=2)
    with knock_out_registers(model, how="zero"), torch.no_grad():
        rows = attention_rows(model, images, layers="all")
        x, _ = model.embed(images)
        for block in model.blocks[:2]:
            x = block(x, None)
        block = model.blocks[2]
        q, kv = block.attn.project(block.norm1(x))
        by_hand = block.attn.weights(q[:, :, :1], kv.k)
    torch.testing.assert_close(rows.registers[:, 2, :, 0], by_hand[:, :, 0, 1:3])
    assert not torch.allclose(attention_rows(model, images).registers, rows.registers[:, 2:])


def test_registers_that_are_off_in_compiled_and_nested_models_and_in_training(vit, images):
    model = vit(registers=2, depth=2)
    with knock_out_registers(model, 0), knock_out_registers(model, 1):
        nested = patches(model, images)
    with knock_out_registers(model):
        both = patches(model, images)
        torch.testing.assert_close(patches(torch.compile(model, backend="eager"), images), both)
        model(images).patches.sum().backward()
    assert torch.equal(nested, both)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert not model.blocks[0].edit


def test_mistakes_with_registers_are_named(vit, images):
    with pytest.raises(InputError, match="no registers"), knock_out_registers(vit()):
        pass
    model = vit(registers=2)
    with pytest.raises(InputError, match="register 2 does not exist"), knock_out_registers(model, [0, 2]):
        pass
    with pytest.raises(InputError, match="at least two"), knock_out_registers(model, how="mean"):
        model(images[:1])
    assert all(block.edit is None for block in model.blocks)
