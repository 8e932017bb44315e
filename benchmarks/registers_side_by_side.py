"""The same recipe with 0 and with 4 registers: accuracy, norms, outliers and where the class token looks, side by side.

    regard train answer --recipe easy_vqa_demo --out runs/plain
    regard train answer --recipe easy_vqa_demo --vit.registers 4 --out runs/registers
    python benchmarks/registers_side_by_side.py runs/plain runs/registers [--images 200] [--out docs/registers.png]

Prints a table per layer over easy-VQA test images, and draws both models' maps of one of them, each with its own scale.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import regard
from regard.crossattn import ImageQA
from regard.datasets import load_questions, open_image
from regard.vit.maps import ROBUST, outlier_report, register_report


def described(name: str, model: ImageQA, images: torch.Tensor) -> None:
    vit = model.vit
    outliers, looks = outlier_report(vit, images, "all", rule=ROBUST), register_report(vit, images)
    norms = outliers.norms
    print(f"\n{name}: {vit.config.registers} registers, class token and registers looking, mean of heads")
    print(
        "layer  median norm  max/median  cls norm  register norms      outliers  gap   cls->cls  ->registers  ->patches"
    )
    for layer in range(vit.config.depth):
        registers = "/".join(f"{n:.0f}" for n in norms.registers[:, layer].mean(0).tolist()) or "-"
        row = {part: mass[:, layer, :, 0].mean().item() for part, mass in looks.mass.items()}
        print(
            f"{layer:>5}  {norms.medians()[:, layer].mean():>11.1f}  {norms.peaks()[:, layer].mean():>10.2f}"
            f"  {norms.cls[:, layer].mean():>8.1f}  {registers:<18}  {outliers.fraction[:, layer].mean():>8.2%}"
            f"  {outliers.gap[:, layer].mean():.2f}"
            f"  {row['cls']:>8.1%}  {row['registers']:>11.1%}  {row['patches'] + row['outliers']:>9.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plain")
    parser.add_argument("registers")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--out", default="docs/registers.png")
    given = parser.parse_args()
    chosen = load_questions("easy-vqa", "test").images[: given.images]
    with torch.inference_mode():
        for name in (given.plain, given.registers):
            model = ImageQA.from_pretrained(name)
            pictures = [open_image(image.path) for image in chosen]
            described(name, model, model.vit.preprocess(pictures))
            scored = regard.evaluate_answer(model=name, data="easy-vqa", split="test")
            print(scored)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "test.png"
        open_image(chosen[0].path).save(picture)
        regard.look(
            picture, model=given.plain, against=given.registers, layer="all", scale="each", out=given.out, panel=120
        )
    print(f"maps: {given.out}")


if __name__ == "__main__":
    main()
