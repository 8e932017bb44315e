"""Are the maps evidence? How often the map of a shape or colour word peaks on the drawn shape of easy-VQA.

    python benchmarks/maps_on_shapes.py --model demo [--images N] [--json]

A pixel belongs to the shape when it differs from the picture's background (the median of its border) by more
than 30 of 255 in any channel. A map's peak is one patch; two readings are reported: the patch's centre lies on
the shape (strict), and the patch holds a pixel of the shape. Only questions answered correctly count.

Controls: a patch chosen at random, and the same model with fresh random weights (its maps on the same
questions, right or wrong, since it answers few).
"""

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch

from regard import ImageQA, load_questions, open_image
from regard.datasets import QuestionSet

THRESHOLD = 30
WORDS = {"circle", "rectangle", "triangle", "black", "blue", "brown", "gray", "green", "red", "teal", "yellow"}


@dataclass
class Peaks:
    """How many maps were judged, and the share whose peak lies on the shape, by each reading."""

    centre_on_shape: float
    patch_touches_shape: float
    maps: int
    questions: int


def shape_of(pixels: np.ndarray) -> np.ndarray:
    """Where the shape is drawn, bool (height, width)."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return np.abs(pixels.astype(int) - np.median(border, axis=0)).max(axis=-1) > THRESHOLD


def judge(shape: np.ndarray, cell: tuple[int, int], grid: tuple[int, int]) -> tuple[bool, bool]:
    """Whether the centre of a patch, and any of its pixels, lie on the shape."""
    height, width = shape.shape[0] // grid[0], shape.shape[1] // grid[1]
    top, left = cell[0] * height, cell[1] * width
    patch = shape[top : top + height, left : left + width]
    middle = patch[height // 2 - 1 : height // 2 + 1, width // 2 - 1 : width // 2 + 1]
    return bool(middle.any()), bool(patch.any())


def measure(model: ImageQA, questions: QuestionSet, *, only_right: bool, at_random: bool = False) -> Peaks:
    """Ask every question that names a shape or a colour, and see where the named word's map peaks."""
    found: list[tuple[bool, bool]] = []
    asked = 0
    chance = np.random.default_rng(0)
    for image in questions.images:
        named = [q for q in image.questions if WORDS & set(q.text.rstrip("?").split())]
        if not named:
            continue
        picture = open_image(image.path)
        shape = shape_of(np.asarray(picture))
        for question, answer in zip(named, model.ask(model.look(picture), [q.text for q in named]), strict=True):
            if only_right and answer.text != question.majority:
                continue
            asked += 1
            for word in WORDS & set(answer.attention.words):
                heat = answer.attention[word]
                grid = (heat.shape[0], heat.shape[1])
                peak = int(chance.integers(heat.numel())) if at_random else int(heat.argmax())
                found.append(judge(shape, divmod(peak, grid[1]), grid))
    centre, touches = np.mean(found, axis=0) if found else (0.0, 0.0)
    return Peaks(float(centre), float(touches), len(found), asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--images", type=int, default=1000, help="of the test split's 1,000")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    torch.manual_seed(0)
    questions = load_questions("easy-vqa", "test").subset(flags.images)
    model = ImageQA.from_pretrained(flags.model)
    untrained = ImageQA(model.config, model.tokenizer).eval()
    result = {
        "trained": measure(model, questions, only_right=True),
        "random patch": measure(model, questions, only_right=True, at_random=True),
        "untrained model": measure(untrained, questions, only_right=False),
    }
    if flags.json:
        print(json.dumps({name: asdict(peaks) for name, peaks in result.items()}))
        return
    print(f"{'':<18}centre on shape   patch touches shape   maps")
    for name, peaks in result.items():
        print(f"{name:<18}{peaks.centre_on_shape:>15.1%}{peaks.patch_touches_shape:>22.1%}{peaks.maps:>7}")


if __name__ == "__main__":
    main()
