"""Look once, ask many: seconds per further question against encoding the picture for every question.

    python benchmarks/look_once.py [--pairs 9] [--size demo|base] [--json]

The peer is the same model asked the way libraries without a memory do it: `look` and `ask` for each question.
Both run in turn, in one process, fp32; the ratio of medians is printed, and the floor that the operation
count of the two ways sets.
"""

import argparse
import json
import statistics
import time

import torch

from regard.crossattn import ImageQA

QUESTIONS = [f"is there a {colour} {shape}?" for colour in ("red", "blue", "teal", "gray") for shape in
             ("circle", "square", "triangle", "shape")]  # fmt: skip
BASE = {
    "vit": {"image_size": (224, 224), "patch_size": 16, "dim": 768, "depth": 12, "heads": 12},
    "text": {"dim": 768, "depth": 6, "heads": 12},
}


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--size", choices=["demo", "base"], default="demo")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()

    torch.manual_seed(0)
    changes = BASE if flags.size == "base" else {}
    model = ImageQA.preset("demo", questions=QUESTIONS, answers=["yes", "no"], **changes).eval()
    picture = torch.randn(3, *model.config.vit.image_size)
    memory = model.look(picture)

    def further() -> None:
        for question in QUESTIONS:
            model.ask(memory, [question])

    def together() -> None:
        model.ask(memory, QUESTIONS)

    def every_time() -> None:
        for question in QUESTIONS:
            model.ask(model.look(picture), [question])

    ways = {"look once, ask one by one": further, "look once, ask together": together, "look every time": every_time}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(flags.pairs):
        for name, work in ways.items():
            seconds[name].append(timed(work) / len(QUESTIONS))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    peer = medians["look every time"]
    result = {
        "size": flags.size,
        "pairs": flags.pairs,
        "questions": len(QUESTIONS),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "times_faster_than_look_every_time": {name: round(peer / m, 2) for name, m in medians.items()},
    }
    if flags.json:
        print(json.dumps(result))
        return
    print(f"{flags.size}, {len(QUESTIONS)} questions on one picture, {flags.pairs} rounds, median per further question")
    for name, ratio in result["times_faster_than_look_every_time"].items():
        print(f"  {name:<28} {ratio:6.2f}x the speed of looking every time")


if __name__ == "__main__":
    main()
