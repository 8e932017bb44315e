"""Do a few heads carry the answer? The lecture's retrieval-head experiment on our own model.

    regard train answer --recipe easy_vqa_demo --out runs/demo
    python benchmarks/knock_out_heads.py --model runs/demo [--images 200] [--how zero] [--out docs/knock_out.png]

The heads of the cross-attention are ranked by their gradient importance on the training images that were held out. Then
the k best of them are turned off, or k others drawn at random (20 draws), and easy-VQA test questions are asked. The
random heads leave out the k best as long as there are k others; beyond half of all heads they must take some of them.
Random heads come from all layers, so a layer that matters as a whole shows in the gap; the last line therefore sets the
best heads against others of their own layer. Prints a table and writes it as JSON beside the figure.

`--how mean` takes the means over the held-out questions.
"""

import argparse
import json
import random
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from regard.crossattn import ImageQA, Memory
from regard.datasets import QuestionSet, load_questions
from regard.models import open_qa
from regard.train.questions import Batch, QuestionBatches
from regard.train.recipe import load_recipe
from regard.train.sampling import EvalBatches
from regard.vit.maps.importance import head_importance, head_report
from regard.vit.maps.knockout import attentions, head_means, knock_out

DRAWS = 20
Looked = tuple[Memory, Batch]


@torch.no_grad()
def looked(model: ImageQA, questions: QuestionSet, images_at_once: int = 50) -> list[Looked]:
    """Every image encoded once: turning off heads of the cross-attention changes nothing before it."""
    data = QuestionBatches(
        questions, model.tokenizer, model.config.text.max_tokens, model.config.answers, model.preprocess, seed=0
    )
    batches = [data.__getitems__(draws) for draws in EvalBatches(len(data), images_at_once)]
    return [(model.remember(model.preprocess.normalize(batch.pixels)), batch) for batch in batches]


def logits(model: ImageQA, batch: Looked) -> Tensor:
    memory, asked = batch
    return model.logits(memory, asked.ids, asked.mask, asked.of)


def losses(model: ImageQA, batch: Looked) -> Tensor:
    """The loss of every question; what only fills an image's share of them counts as 0."""
    asked = batch[1]
    each = -(logits(model, batch).log_softmax(dim=-1) * asked.targets).sum(dim=-1)
    return each * asked.counts


@torch.no_grad()
def right(model: ImageQA, batches: list[Looked]) -> np.ndarray:
    """1 where a question is answered right, 0 elsewhere."""
    hits = [
        (logits(model, batch).argmax(dim=-1) == batch[1].targets.argmax(dim=-1))[batch[1].counts] for batch in batches
    ]
    return torch.cat(hits).double().numpy()


def draw(ranking: list[tuple[int, int]], count: int, chance: random.Random) -> list[tuple[int, int]]:
    """`count` heads at random, none of the first `count` of the ranking while there are enough others."""
    rest = ranking[count:]
    if count <= len(rest):
        return chance.sample(rest, count)
    return rest + chance.sample(ranking[:count], count - len(rest))


@matplotlib.rc_context(matplotlib.rcParamsDefault)
def picture(result: dict, path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = result["table"]
    off = [row["off"] for row in rows]
    half = len(rows[1:]) / 2
    axes.plot(off, [100 * row["random"] for row in rows], color="#2b7a78", marker="o", label=f"random ({DRAWS} draws)")
    axes.fill_between(
        off, [100 * row["low"] for row in rows], [100 * row["high"] for row in rows], color="#2b7a78", alpha=0.22,
        linewidth=0, label="95 % of the draws",
    )  # fmt: skip
    axes.plot(off, [100 * row["top"] for row in rows], color="#c1440e", marker="o", label="most important first")
    axes.axvspan(half, off[-1], color="0.5", alpha=0.08, linewidth=0)
    axes.text(off[-1], 3, "random must include\nimportant heads", ha="right", fontsize=8, color="0.35")
    axes.set(
        xlabel=f"heads of the cross-attention turned off, of {off[-1]}",
        ylabel="easy-VQA test questions right, %",
        ylim=(0, 102),
        xlim=(0, off[-1]),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"{result['questions']} questions on {result['images']} images, heads off: {result['how']}", fontsize=9
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo"), help="folder of a run of `regard train answer`")
    parser.add_argument("--images", type=int, default=200, help="of the test split's 1,000")
    parser.add_argument("--held-out", type=int, default=400, help="held-out training images that rank the heads")
    parser.add_argument("--how", choices=["zero", "mean", "shuffle", "uniform"], default="zero")
    parser.add_argument("--out", type=Path, default=Path("docs/knock_out.png"))
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    flags = parser.parse_args()

    model = open_qa(flags.model, "cpu").eval()
    recipe = load_recipe(flags.model / "recipe.yaml" if (flags.model / "recipe.yaml").exists() else "easy_vqa_demo")
    held_out = load_questions(recipe.data, "train").split(recipe.held_out, recipe.seed)[1].subset(flags.held_out)
    ranked_on = looked(model, held_out)
    importance = head_importance(model, ranked_on, lambda batch: losses(model, batch), part="words")
    ranking, layers = importance.ranking(), attentions(model, "words")

    questions = load_questions("easy-vqa", "test").subset(flags.images)
    asked = looked(model, questions)
    means = None
    if flags.how == "mean":
        means = head_means(model, ranked_on, lambda batch: logits(model, batch), part="words")
    chance, known = random.Random(0), {}

    def accuracy(off: list[tuple[int, int]]) -> float:
        heads = tuple(sorted(off))
        if heads not in known:
            with knock_out(model, heads, flags.how, part="words", means=means):
                known[heads] = float(right(model, asked).mean())
        return known[heads]

    table = []
    for count in range(len(ranking) + 1):
        drawn = [accuracy(draw(ranking, count, chance)) for _ in range(DRAWS)]
        low, high = np.quantile(drawn, [0.025, 0.975])
        table.append(
            {"off": count, "top": accuracy(ranking[:count]), "random": float(np.mean(drawn)), "low": float(low),
             "high": float(high), "draws": drawn}
        )  # fmt: skip
    best = max(1, min(attn.heads for attn in layers) // 4)  # few enough to leave many others in their layer
    report = head_report(lambda: right(model, asked), model, ranking[:best], how=flags.how, part="words")
    result = {
        "command": f"python benchmarks/knock_out_heads.py --model RUN --images {flags.images} --how {flags.how}",
        "recipe": "easy_vqa_demo" if recipe.about else "changed",
        "layers": len(layers),
        "heads": [attn.heads for attn in layers],
        "how": flags.how,
        "images": len(questions.images),
        "questions": questions.n_questions,
        "ranked_on": {"images": len(held_out.images), "questions": held_out.n_questions},
        "importance": importance.as_dict(),
        "table": table,
        "report": report.as_dict(),
        "torch": torch.__version__,
    }
    picture(result, flags.out)
    flags.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if flags.json:
        print(json.dumps(result))
        return
    print(importance)
    print(f"\n{'off':>4}{'most important':>16}{'random':>10}   95 % of {DRAWS} draws   turned off")
    for row in table:
        names = ", ".join(f"{layer}.{head}" for layer, head in ranking[: row["off"]])
        interval = f"{row['low']:.2%} to {row['high']:.2%}"
        print(f"{row['off']:>4}{row['top']:>16.2%}{row['random']:>10.2%}   {interval:<22}{names}")
    print(f"\n{report}")
    print(f"\nwritten: {flags.out}, {flags.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
