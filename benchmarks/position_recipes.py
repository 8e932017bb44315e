"""How far a position-resize recipe moves the tokens of a model away from what its authors get, by image size.

    python benchmarks/position_recipes.py facebook/dinov2-small photo.jpg

Prints, for each size, the relative distance of all tokens (Frobenius norm) to those with the authors' recipe.
"""

import argparse
import dataclasses

import torch

from regard import ViT, open_image


def tokens(vit: ViT, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out = vit(images)
    cls = [] if out.cls is None else [out.cls[:, None]]
    return torch.cat([*cls, out.registers, out.patches], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("image")
    parser.add_argument("--recipes", nargs="+", default=["timm", "transformers"])
    given = parser.parse_args()
    authors = ViT.from_pretrained(given.model)
    others = {name: ViT.from_pretrained(given.model, position_resize=name) for name in given.recipes}
    print(authors.report)
    (height, width), patch = authors.config.grid, authors.config.patch_size
    grids = [(16, 16), (32, 32), (16, 24), (1, 28), (height, width), (height * 3 // 2, width * 3 // 2)]
    print("size".ljust(14), *(f"{name:>14}" for name in others))
    for grid in grids:
        size = (grid[0] * patch, grid[1] * patch)
        preprocess = dataclasses.replace(authors.preprocess, size=size, fit="squash")
        images = preprocess(open_image(given.image))
        expected = tokens(authors, images)
        moved = [((tokens(vit, images) - expected).norm() / expected.norm()).item() for vit in others.values()]
        print(f"{size[0]} x {size[1]}".ljust(14), *(f"{share:>13.2%} " for share in moved))


if __name__ == "__main__":
    main()
