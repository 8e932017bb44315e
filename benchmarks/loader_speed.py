"""Pictures per second on one core: our loader against torchvision's ImageFolder and DataLoader, in one run.

    python benchmarks/loader_speed.py [--data FOLDER] [--size 375 500] [--rounds 9] [--interpolation bilinear] [--json]

Without `--data` it makes `root/<class>/*.jpg` of 500 x 375 pixels, quality 90, out of scikit-image's photographs. All
read the same files in the same order and end in a normalised float batch `(B, 3, 224, 224)`: RandomResizedCrop(224), a
flip in half of the cases, to float, mean and std. The peers are torchvision's transforms on PIL images, as in its
reference recipe, and version 2 of them on tensors. No worker processes, one thread.

They take turns; a ratio is the median, over the rounds, of peer's time / ours. Above 1 ours is faster. Time is that of
the processor, which another program on the same core does not lengthen. Our decoding at a reduced scale is told apart,
because its pixels are others; a crop of less than twice 224 pixels leaves nothing to reduce, so that it pays for larger
photographs (`--size 1500 2000`).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import peer
from PIL import Image
from torch.utils.data import DataLoader

SIDE = 224
Work = Callable[[], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder root/<class>/*.jpg of your own")
    parser.add_argument("--files", type=int, default=200, help="how many pictures are made")
    parser.add_argument("--size", type=int, nargs=2, default=[375, 500], help="height and width of what is made")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--interpolation", choices=["bilinear", "bicubic"], default="bilinear")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or photographs(Path(folder), arguments.files, *arguments.size)
        result = compare(data, arguments.batch, arguments.rounds, arguments.interpolation)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<44} {value}")


def photographs(folder: Path, count: int, height: int = 375, width: int = 500) -> Path:
    """Cuts of scikit-image's photographs as JPEGs, in four class folders."""
    from skimage import data

    sources = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "coffee", "chelsea", "rocket")]
    rng = np.random.default_rng(0)
    for number in range(count):
        source = sources[number % len(sources)]
        left, top = rng.integers(0, source.width // 6), rng.integers(0, source.height // 6)
        right = source.width - rng.integers(0, source.width // 6)
        bottom = source.height - rng.integers(0, source.height // 6)
        picture = source.resize((width, height), Image.Resampling.BICUBIC, (left, top, right, bottom))
        home = folder / f"class_{number % len(sources)}"
        home.mkdir(exist_ok=True)
        picture.save(home / f"{number:05}.jpg", quality=90)
    return folder


def compare(data: Path, batch: int, rounds: int, interpolation: str) -> dict[str, Any]:
    from regard.datasets import load_pictures
    from regard.datasets.decode import decoder_name

    pictures = load_pictures(data, "train")
    works = {
        "regard": ours(pictures, batch, interpolation, reduced=False),
        "regard, reduced scale": ours(pictures, batch, interpolation, reduced=True),
        "torchvision": torchvisions(data, batch, interpolation, tensors=False),
        "torchvision v2 on tensors": torchvisions(data, batch, interpolation, tensors=True),
    }
    for name, work in works.items():
        assert work() == len(pictures), name
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(timed(works[name]))
    result: dict[str, Any] = {
        "pictures": f"{len(pictures)} of {pictures.image(0).height} x {pictures.image(0).width}, {interpolation}",
        "jpeg decoder": decoder_name(),
    }
    for name, times in seconds.items():
        result[f"pictures/s, {name}"] = round(len(pictures) / statistics.median(times))
    for name in names[2:]:
        for mine in names[:2]:
            ratio = statistics.median(t / o for t, o in zip(seconds[name], seconds[mine], strict=True))
            result[f"{mine}: times as fast as {name}"] = round(ratio, 2)
    for name, work in stages(pictures, batch, interpolation).items():
        result[f"ms/picture, {name}"] = round(
            1000 * statistics.median(timed(work) for _ in range(5)) / len(pictures), 3
        )
    return result


def timed(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def ours(pictures: Any, batch: int, interpolation: str, *, reduced: bool) -> Work:
    """As a training reads them, in file order, with the model's normalisation after it."""
    from regard.datasets.augment.views import TrainView
    from regard.train.pictures import PictureBatches
    from regard.train.sampling import EvalBatches
    from regard.vit import Preprocess

    view = TrainView((SIDE, SIDE), interpolation=interpolation)  # type: ignore[arg-type]
    batches = PictureBatches(pictures, view, seed=0, reduced=reduced)
    loader = DataLoader(batches, batch_sampler=EvalBatches(len(pictures), batch), collate_fn=lambda made: made)
    preprocess = Preprocess((SIDE, SIDE))

    def work() -> int:
        seen = 0
        for made in loader:
            pixels = preprocess.normalize(made.pixels)
            assert pixels.shape == (len(made.ids), 3, SIDE, SIDE)
            seen += int(made.counts.sum())
        return seen

    return work


def torchvisions(data: Path, batch: int, interpolation: str, *, tensors: bool) -> Work:
    peer("torchvision")
    from torchvision import datasets, transforms
    from torchvision.transforms import v2

    from regard.vit.preprocess import IMAGENET_MEAN, IMAGENET_STD

    mode = transforms.InterpolationMode(interpolation)
    if tensors:
        steps = [
            v2.ToImage(),
            v2.RandomResizedCrop(SIDE, interpolation=mode, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    else:
        steps = [
            transforms.RandomResizedCrop(SIDE, interpolation=mode),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    loader = DataLoader(datasets.ImageFolder(str(data), transforms.Compose(steps)), batch_size=batch, num_workers=0)

    def work() -> int:
        seen = 0
        for pixels, labels in loader:
            assert pixels.shape == (len(labels), 3, SIDE, SIDE)
            seen += len(labels)
        return seen

    return work


def stages(pictures: Any, batch: int, interpolation: str) -> dict[str, Work]:
    """The parts of our loader, each alone."""
    from regard.datasets.augment.dice import Dice
    from regard.datasets.augment.geometry import crop_boxes, flip
    from regard.datasets.decode import decode
    from regard.datasets.raws import FileRaws
    from regard.vit import Preprocess

    files = [pictures.read(index) for index in range(len(pictures))]
    decoded = [Image.fromarray(decode(file, "")) for file in files]
    raws = FileRaws(decoded)
    boxes = crop_boxes(raws.sizes, Dice(0, [0] * len(raws), list(range(len(raws)))), "crop")
    cut = raws.cut(boxes, (SIDE, SIDE), interpolation)
    half = torch.arange(len(cut)) % 2 == 0
    preprocess = Preprocess((SIDE, SIDE))

    def each(of: list[Any], do: Callable[[Any], Any]) -> Work:
        def work() -> int:
            for one in of:
                do(one)
            return len(of)

        return work

    return {
        "read": each(list(range(len(pictures))), pictures.read),
        "decode": each(files, lambda file: decode(file, "")),
        "crop and resize": lambda: len(raws.cut(boxes, (SIDE, SIDE), interpolation)),
        "flip": lambda: len(flip(cut, half)),
        "to float and normalise": each(list(cut.split(batch)), preprocess.normalize),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
