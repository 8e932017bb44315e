"""A tiny model with really random weights, and pictures of 24 x 40 pixels (3 x 5 patches) or other non-square sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.crossattn import Answer, ImageQA, TextConfig
from regard.crossattn.decoder import DecoderConfig, TextDecoder

QUESTIONS = (
    "What colour is the car?",
    "Is it asleep?",
    "How many dogs do not run?",
    "Where is the café?",
    "What animal is left of the red house, and is it larger than the green one near the old tree?",
    "Who?",
)
ANSWERS = ("yes", "no", "red", "two", "left")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small only lose by sharing their work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def questions() -> list[str]:
    return list(QUESTIONS)


@pytest.fixture(scope="session")
def randomize() -> Callable[[nn.Module], nn.Module]:
    """Noise on every parameter, gates, registers, tables, norms and biases too."""

    def add_noise(module: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        return module

    return add_noise


@pytest.fixture(scope="session")
def make_qa(randomize) -> Callable[..., ImageQA]:
    def make(vit=None, text=None, *, questions=QUESTIONS, answers=ANSWERS, random=True, **options) -> ImageQA:
        torch.manual_seed(0)
        qa = ImageQA.preset(
            questions=questions,
            answers=answers,
            vit=dict(image_size=(24, 40), patch_size=8, dim=32, depth=2, heads=4) | (vit or {}),
            text=dict(dim=32, depth=2, heads=4) | (text or {}),
            **options,
        )
        return (randomize(qa) if random else qa).eval()

    return make


@pytest.fixture(scope="session")
def make_decoder(randomize) -> Callable[..., TextDecoder]:
    """A tiny decoder of random weights; token 1 begins its answers, token 2 ends them, more often than others do."""

    def make(*, vocab_size=20, text=None, end=3.0, context_dim=24, **fields) -> TextDecoder:
        config = TextConfig(vocab_size, **(dict(dim=32, depth=2, heads=4, max_tokens=12, norm="post") | (text or {})))
        decoder = TextDecoder(DecoderConfig(config, **(dict(first=1, last=2, min_tokens=0) | fields)), context_dim)
        torch.manual_seed(0)
        decoder.reset_parameters()
        decoder = randomize(decoder).eval()
        decoder.bias.data[2] += end
        return decoder

    return make


@pytest.fixture(scope="session")
def picture() -> Callable[..., Tensor]:
    """A preprocessed picture `(3, height, width)`, always the same one for the same seed and size."""
    return lambda seed, height=24, width=40: torch.randn(
        3, height, width, generator=torch.Generator().manual_seed(1000 * seed + 10 * height + width)
    )


@pytest.fixture(scope="session")
def scores() -> Callable[[Answer], Tensor]:
    """The probability of each of `ANSWERS`, in that order; the answer was asked for with `top=5`."""
    return lambda answer: torch.tensor([dict(answer.top)[text] for text in ANSWERS])
