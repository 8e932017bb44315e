"""What self-distillation makes of Fashion-MNIST without its labels: neighbours and attention maps, before and after.

    regard train distill --recipe fashion_mnist --out runs/dino
    python benchmarks/dino_fashion.py --model runs/dino [--out docs/dino_fashion.png] [--json]

`before` is the same ViT with the weights that the run began with, `pixels` the pictures themselves. The k-NN asks the
test split about the training split, whose labels nothing else has seen. In the picture: the class token's attention of
the last layer, mean over heads, each map in its own scale; the mass on the patches stands above it.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import evaluate_knn, load_pictures
from regard.train.distill.building import build
from regard.train.distill.recipe import DistillRecipe
from regard.train.recipe import RECIPE, load_recipe
from regard.verbs.evaluate import PIXELS
from regard.vit import ViT, attention_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the run")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--out", type=Path, help="PNG of the maps")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    recipe = load_recipe(Path(flags.model) / RECIPE, DistillRecipe)
    torch.manual_seed(recipe.seed)
    vits = {"before": build(recipe).eval(), "after": ViT.from_pretrained(flags.model)}
    untrained = Path(flags.model) / "untrained"
    vits["before"].save_pretrained(untrained)
    for name, model in {"pixels": PIXELS, "before": untrained, "after": flags.model}.items():
        score = evaluate_knn(model=model, data=flags.data)
        print(json.dumps({"features": name, **score.as_dict()}) if flags.json else f"{name}: {score}", flush=True)
    if flags.out is not None:
        draw(vits, flags.data, flags.out)


def draw(vits: dict[str, ViT], data: str, out: Path) -> None:
    """One row a class: the picture, and the map of each model."""
    pictures = load_pictures(data, "test")
    firsts = [int((pictures.labels == label).nonzero()[0]) for label in range(len(pictures.classes))]
    figure, axes = plt.subplots(1 + len(vits), len(firsts), figsize=(1.4 * len(firsts), 5.2), squeeze=False)
    for column, index in enumerate(firsts):
        image = pictures.image(index)
        axes[0][column].imshow(image)
        axes[0][column].set_title(pictures.classes[int(pictures.labels[index])], fontsize=8)
        for row, (name, vit) in enumerate(vits.items(), start=1):
            rows = attention_rows(vit, vit.preprocess(image), queries="cls", layers=-1)
            mass = float(rows.mass()["patches"][0, 0, :, 0].mean())
            axes[row][column].imshow(rows.patches[0, 0, :, 0].mean(dim=0), cmap="viridis")
            axes[row][column].set_title(f"{name}, {mass:.0%}", fontsize=8)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
