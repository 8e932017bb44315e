"""A planted head that alone carries the answer is found, by gradient and by ablation; random others are not."""

import pytest
import torch

from regard.crossattn import ImageQA
from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps.importance import head_importance, head_report
from regard.vit.maps.knockout import knock_out

PLANTED = (1, 2)
SIZE = dict(dim=64, depth=3, heads=4, hidden_dim=64, positions="none", layer_scale=1.0)
BRIGHT = slice(0, 8)  # the channels in which a patch says how bright it is


@pytest.fixture
def toy(vit):
    """A ViT in which one head alone copies the patches' brightness to the class token, and all others copy noise.

    The answer, read from the class token, is whether the picture is bright on the whole.
    """
    model = vit(**SIZE)
    with torch.no_grad():
        model.cls.zero_()
        model.tokenizer.proj.weight.mul_(0.02)
        model.tokenizer.proj.bias.normal_(0, 0.5)
        model.tokenizer.proj.weight[BRIGHT] = torch.full_like(model.tokenizer.proj.weight[BRIGHT], 0.1)
        model.tokenizer.proj.bias[BRIGHT] = 0
        for number, block in enumerate(model.blocks):
            attn = block.attn
            block.scale1.gamma.fill_(1)
            block.mlp.fc2.weight.zero_()
            block.mlp.fc2.bias.zero_()
            attn.out.weight.mul_(0.2)
            attn.out.weight[BRIGHT] = 0  # nobody writes to these channels
            attn.out.bias.zero_()
            attn.to_v.weight[:, BRIGHT] = 0  # and nobody reads them
            attn.to_q.weight.zero_()  # every row looks everywhere
            attn.to_q.bias.zero_()
            if number == PLANTED[0]:
                own = slice(PLANTED[1] * 16, PLANTED[1] * 16 + 8)
                attn.to_v.weight[own] = 0
                attn.to_v.weight[own, BRIGHT] = torch.eye(8)
                attn.to_v.bias[own] = 0
                attn.out.weight[:, own] = 0
                attn.out.weight[BRIGHT, own] = torch.eye(8)
    return model.eval()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(64) % 2
    return torch.randn(64, 3, 16, 24) + (labels * 2 - 1)[:, None, None, None] * 0.6, labels


def logit(model, images: torch.Tensor) -> torch.Tensor:
    return model(images).cls[:, BRIGHT].mean(dim=1) * 4


def loss_of(model):
    def loss(batch):
        images, labels = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logit(model, images), labels.float(), reduction="none"
        )

    return loss


def answers_right(model, data):
    images, labels = data
    with torch.no_grad():
        return (logit(model, images) > 0).long() == labels


@pytest.mark.parametrize("by", ["gradient", "ablation"])
def test_the_planted_head_ranks_first(toy, data, by):
    batches = [tuple(part[i : i + 16] for part in data) for i in range(0, 64, 16)]
    found = head_importance(toy, batches, loss_of(toy), by=by)
    assert found.samples == 64
    assert found.ranking()[0] == PLANTED
    others = [score for layer, row in enumerate(found.scores) for h, score in enumerate(row) if (layer, h) != PLANTED]
    assert found.scores[1][2] > 5 * max(abs(score) for score in others)
    assert "importance of heads" in str(found)
    assert found.as_dict()["ranking"][0] == PLANTED


def test_without_the_planted_head_answers_are_lost_and_without_random_others_they_are_not(toy, data):
    report = head_report(lambda: answers_right(toy, data).double(), toy, [PLANTED], controls=20)
    assert report.intact > 0.95
    assert report.knocked_out < 0.7
    assert report.drop_interval[0] > 0.2
    assert report.excess_interval[0] > 0.2
    assert max(abs(drop) for drop in report.control_drops) < 0.1
    assert len(report.controls) == 20
    assert report.distinct == 3  # a layer of four heads has no more
    assert all(PLANTED not in off and [layer for layer, _ in off] == [1] for off in report.controls)
    assert report.p_value == 0.25
    assert "3 different" in str(report)


def test_a_head_that_does_nothing_is_no_worse_than_its_controls(toy, data):
    report = head_report(lambda: answers_right(toy, data).double(), toy, {0: [0], 2: [3]}, controls=24)
    assert abs(report.drop) < 0.05
    assert report.excess_interval[0] <= 0 <= report.excess_interval[1]
    assert all(sorted(layer for layer, _ in off) == [0, 2] for off in report.controls)
    assert not {(0, 0), (2, 3)} & {head for off in report.controls for head in off}
    assert report.distinct == 9


def test_a_report_is_the_same_with_the_same_seed(toy, data):
    def again(seed):
        return head_report(lambda: answers_right(toy, data).double(), toy, [PLANTED], seed=seed)

    assert again(3) == again(3)
    assert again(3).controls != again(4).controls


def test_the_bootstrap_interval_covers_as_often_as_it_says():
    chance, attn, covered = torch.Generator().manual_seed(0), Attention(8, 2), 0
    for _ in range(40):
        noise = 0.5 + torch.randn(30, generator=chance)

        def metric(noise=noise):
            off = attn.edit is not None and 0 in attn.edit.heads
            return torch.zeros(30) if off else noise  # turning head 0 off costs 0.5 on average

        low, high = head_report(metric, [attn], [(0, 0)]).drop_interval
        covered += low <= 0.5 <= high
    assert covered >= 34


def test_importance_by_gradient_is_that_of_a_factor_on_the_head(vit):
    """I_h = |d loss / d xi_h| for each sample, where xi_h = 1 multiplies what the head puts out."""
    model = vit().double()
    images = torch.randn(3, 3, 24, 40, dtype=torch.float64)

    def loss(batch):
        return model(batch).patches.pow(2).mean(dim=(1, 2))

    found = head_importance(model, [images[:2], images[2:]], loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    step = 1e-5
    for layer, block in enumerate(model.blocks):
        for head in range(2):
            values = []
            for factor in (1 + step, 1 - step):
                scale = torch.ones(2, 1, 1, dtype=torch.float64)
                scale[head] = factor
                block.attn.edit = lambda z, kv, scale=scale: z * scale
                with torch.no_grad():
                    values.append(loss(images))
                block.attn.edit = None
            by_hand = ((values[0] - values[1]) / (2 * step)).abs().mean().item()
            assert found.scores[layer][head] == pytest.approx(by_hand, rel=1e-5)


def test_importance_by_ablation_is_what_the_loss_grows_by(vit):
    model, images = vit(), torch.randn(3, 3, 24, 40)

    def loss(batch):
        return model(batch).patches.pow(2).mean(dim=(1, 2))

    found = head_importance(model, [images[:1], images[1:]], loss, by="ablation", how="uniform")
    with torch.no_grad(), knock_out(model, [(2, 1)], "uniform"):
        off = loss(images)
    assert found.scores[2][1] == pytest.approx((off - loss(images)).mean().item(), abs=1e-6)


def test_frozen_weights_have_the_same_importance_and_norms_are_per_layer(vit):
    model, images = vit(), torch.randn(2, 3, 24, 40)

    def loss(batch):
        return model(batch).patches.pow(2).mean(dim=(1, 2))

    with torch.no_grad():
        free = head_importance(model, [images], loss)
    frozen = head_importance(model.requires_grad_(False), [images], loss, norm=True)
    for row, normed in zip(free.scores, frozen.scores, strict=True):
        length = sum(score**2 for score in row) ** 0.5
        assert normed == pytest.approx([score / length for score in row], rel=1e-4)


def test_a_question_is_a_sample_of_its_own_in_the_cross_attention(noisy):
    questions = ["is there a red square?", "what is there now?", "is it really blue?"]
    model = ImageQA.preset(
        questions=questions, answers=["yes", "no"], vit={"dim": 48, "depth": 1}, text={"dim": 48, "depth": 2}
    )
    noisy(model).eval()
    encoded = model.tokenizer(questions * 2, 32)
    images = torch.randn(2, 3, 64, 64)

    def loss(rows):
        of = torch.tensor([0, 0, 0, 1, 1, 1])[rows] if len(rows) < 6 else None
        return model.logits(model.remember(images), encoded.ids[rows], encoded.mask[rows], of).logsumexp(dim=1)

    together = head_importance(model, [torch.arange(6)], loss, part="words")
    alone = head_importance(model, [torch.tensor([row]) for row in range(6)], loss, part="words")
    assert together.samples == alone.samples == 6
    for row, expected in zip(together.scores, alone.scores, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    of_images = head_importance(model, [torch.arange(6)], loss, part="vit")
    assert of_images.samples == 2


def test_mistakes_are_named(toy, data):
    with pytest.raises(InputError, match="one loss for every sample"):
        head_importance(toy, [data], lambda batch: loss_of(toy)(batch).mean())
    with pytest.raises(InputError, match="has no gradient"):
        head_importance(toy, [data], torch.no_grad()(loss_of(toy)))
    with pytest.raises(InputError, match="no samples"):
        head_importance(toy, [], loss_of(toy))
    with pytest.raises(InputError, match="choose gradient or ablation"):
        head_importance(toy, [data], loss_of(toy), by="guess")
    with pytest.raises(InputError, match="at least 20"):
        head_report(lambda: torch.ones(3), toy, [(0, 0)], controls=5)
    with pytest.raises(InputError, match="layer 0 has 1 other heads"):
        head_report(lambda: torch.ones(3), toy, {0: [0, 1, 2]})
    with pytest.raises(InputError, match="one value per sample"):
        head_report(lambda: 0.5, toy, [(0, 0)])
    with pytest.raises(InputError, match="no heads were named"):
        head_report(lambda: torch.ones(3), toy, [])
    assert all(block.attn.edit is None for block in toy.blocks)
