import torch

from regard.datasets.augment.dice import Dice


def test_a_sample_has_its_numbers_whatever_batch_it_is_in():
    batch = Dice(7, [3, 3, 4], [10, 11, 10])
    alone = Dice(7, [3], [11])
    assert torch.equal(batch.uniform("flip", 5)[1:2], alone.uniform("flip", 5))
    assert torch.equal(batch.levels("noise", 13)[1:2], alone.levels("noise", 13))
    assert torch.equal(batch.each(["a", "b"]).uniform("flip")[4], alone.each(["a", "b"]).uniform("flip")[1])
    assert torch.equal(batch.rows(torch.tensor([1])).uniform("flip"), alone.uniform("flip"))


def test_seed_epoch_sample_and_name_each_give_other_numbers():
    start = Dice(1, [2], [3]).uniform("flip", 4)
    others = [
        Dice(2, [2], [3]).uniform("flip", 4),
        Dice(1, [3], [3]).uniform("flip", 4),
        Dice(1, [2], [4]).uniform("flip", 4),
        Dice(1, [2], [3]).uniform("crop", 4),
        Dice(1, [2], [3]).each(["flip"]).uniform("flip", 4),
    ]
    assert not any((other == start).any() for other in others)


def test_numbers_are_uniform_and_independent_between_names_samples_and_counts():
    count = 20_000
    dice = Dice(0, [0] * count, range(count))
    first, second = dice.uniform("a", 2).unbind(1)
    third = dice.uniform("b")[:, 0]
    inner = dice.each(["x", "y"]).uniform("a")[:count, 0]
    for numbers in (first, second, third, inner):
        assert ((numbers >= 0) & (numbers < 1)).all()
        shares = torch.histc(numbers, 10, 0, 1) / count
        assert (shares - 0.1).abs().max() < 4 * (0.1 * 0.9 / count) ** 0.5
    for one, other in ((first, second), (first, third), (first, inner), (first[1:], first[:-1])):
        correlation = torch.corrcoef(torch.stack((one, other)))[0, 1]
        assert abs(correlation) < 4 / count**0.5


def test_noise_takes_every_level_alike():
    noise = Dice(0, [0] * 64, range(64)).levels("noise", 1001)
    assert noise.shape == (64, 1001)
    assert noise.dtype == torch.uint8
    counts = torch.bincount(noise.flatten().long(), minlength=256)
    expected = noise.numel() / 256
    assert (counts - expected).abs().max() < 5 * expected**0.5
