"""What the easy-VQA recipes reach, and in what time: accuracy on the official test split over several seeds.

    python benchmarks/recipe_scores.py [--recipe easy_vqa] [--seeds 0 1 2] [--out FOLDER]

Peers, on the same split: 93.8 % by the easy-vqa package's own Keras model, 99.5 % by its larger one trained on
twice the data, 67.0 % by the best answer to a question without its picture. Each seed draws its own weights,
data order, augmentation and held-out images; the test split is read once, after training.
"""

import argparse
import tempfile
import time
from pathlib import Path

from regard import ImageQA, evaluate_answer, train_answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="easy_vqa")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="keep the runs here")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in flags.seeds:
            folder = (flags.out or Path(scratch)) / f"seed{seed}"
            start = time.perf_counter()
            trained = train_answer(flags.recipe, out=folder, seed=seed)
            minutes = (time.perf_counter() - start) / 60
            score = evaluate_answer(model=str(folder))
            size = sum(p.numel() for p in ImageQA.from_pretrained(folder).parameters())
            print(
                f"seed {seed}: test {score.accuracy:.2%} ({score.n_correct} of {score.n_questions}),"
                f" yes/no {score.yes_no:.2%}, other {score.other:.2%}, held out {trained.fit.best_score:.2%},"
                f" {size / 1e6:.2f} M parameters, {minutes:.1f} min",
                flush=True,
            )


if __name__ == "__main__":
    main()
