"""A bright square decides the answer; the map of the word must peak on it."""

import pytest
import torch
import torch.nn.functional as F

GRID, PATCH = (3, 5), 8


def with_square(cell, red, generator):
    """Every patch is pale red or blue at random; the one at `cell` is bright, and of the colour that is asked for."""
    shade = torch.randint(2, (GRID[0] * GRID[1],), generator=generator) - 0.5
    shade[cell] = 1.0 if red else -1.0
    image = torch.stack((shade, torch.zeros(len(shade)), -shade))
    image[1, cell] += 2
    image = image.unflatten(1, GRID).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    return image + 0.1 * torch.randn(image.shape, generator=generator)


def peak(where):
    return where.flatten().argmax().item()


@pytest.fixture(scope="module")
def planted(make_qa):
    """Weights set by hand: a patch offers its brightness as key, and only the word `square` asks for it."""
    qa = make_qa(
        dict(depth=1, heads=1, positions="none", class_token=False, pooling="mean"),
        dict(depth=1, heads=1),
        questions=["Where is the square?"],
        random=False,
    )
    with torch.no_grad():
        for block in qa.vit.blocks:  # patches keep to themselves
            block.attn.out.weight.zero_()
            block.mlp.fc2.weight.zero_()
        qa.vit.tokenizer.proj.weight.zero_()
        qa.vit.tokenizer.proj.weight[0] = 1 / (3 * PATCH**2)
        qa.vit.tokenizer.proj.bias.copy_(torch.linspace(-1, 1, 32))
        (cross,) = qa.text.asking
        qa.text.layers[0].attn.out.weight.zero_()  # words keep to themselves
        qa.text.positions.zero_()
        qa.text.words.weight[:, 0] = qa.text.words.weight[:, 1:].mean(dim=1)  # nothing asked, after the norm
        square = qa.tokenizer(["square"], 64).ids[0, 1]
        qa.text.words.weight[square] = 0
        qa.text.words.weight[square, 0] = 30
        cross.attn.to_q.weight.zero_()
        cross.attn.to_q.weight[0, 0] = 10
        cross.attn.to_k.weight.zero_()
        cross.attn.to_k.weight[0, 0] = 10
    return qa


@pytest.mark.parametrize("cell", range(GRID[0] * GRID[1]))
def test_the_word_that_asks_for_brightness_finds_the_square(planted, cell):
    image = with_square(cell, red=True, generator=torch.Generator().manual_seed(cell))
    answer = planted.ask(planted.look(image), "Where is the square?")
    where = answer.attention["square"]
    assert where.shape == GRID
    assert divmod(peak(where), GRID[1]) == divmod(cell, GRID[1])
    assert where[divmod(cell, GRID[1])] > 0.9
    torch.testing.assert_close(answer.attention["Where"], torch.full(GRID, 1 / 15), atol=1e-4, rtol=0)


def test_a_square_in_another_size_of_picture_is_found_too(planted):
    image = 0.1 * torch.randn(3, 16, 56, generator=torch.Generator().manual_seed(0))
    image[:, 8:, 32:40] += 1
    where = planted.ask(planted.look([image, torch.zeros(3, 24, 40)]), ["square?"] * 2)[0].attention["square"]
    assert where.shape == (2, 7)
    assert divmod(peak(where), 7) == (1, 4)


def test_a_trained_model_looks_at_the_square_that_decides(make_qa):
    qa = make_qa(
        dict(depth=1, positions="none", class_token=False, pooling="mean"),
        dict(depth=1),
        questions=["What colour is the square?"],
        answers=["red", "blue"],
        random=False,
    )
    qa.vit.blocks.requires_grad_(False)
    for block in qa.vit.blocks:  # patches keep to themselves: what the words want to know they must look for
        block.attn.out.weight.zero_()
        block.mlp.fc2.weight.zero_()
    generator = torch.Generator().manual_seed(0)
    encoded = qa.tokenizer(["What colour is the square?"], 64)
    optimizer = torch.optim.AdamW(qa.parameters(), lr=1e-3)
    qa.train()
    for _ in range(400):
        cells = torch.randint(15, (16,), generator=generator).tolist()
        red = [bool(r) for r in torch.randint(2, (16,), generator=generator)]
        images = torch.stack([with_square(c, r, generator) for c, r in zip(cells, red, strict=True)])
        memory = qa.remember(images)
        logits = qa.logits(memory, encoded.ids.expand(16, -1), encoded.mask.expand(16, -1), torch.arange(16))
        loss = F.cross_entropy(logits, torch.tensor([0 if r else 1 for r in red]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    cases = [(cell, red) for cell in range(15) for red in (True, False)]
    pictures = [with_square(cell, red, generator) for cell, red in cases]
    answers = qa.ask(qa.look(pictures), ["What colour is the square?"] * len(cases))
    assert [a.text for a in answers] == ["red" if red else "blue" for _, red in cases]
    maps = [a.attention["square"] for a in answers]
    assert [peak(where) for where in maps] == [cell for cell, _ in cases]
    assert sum(where.max() for where in maps) / len(maps) > 5 / 15, "far above the even share of 1/15"
