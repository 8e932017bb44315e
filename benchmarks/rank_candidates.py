"""Ranking answers by their exact log-probability, against a straightforward batched implementation, in one run.

    python benchmarks/rank_candidates.py [--candidates 128] [--questions 1] [--pairs 5] [--json]               # Linux
    python benchmarks/rank_candidates.py --device cuda --dtype bfloat16 --questions 16                   # needs a GPU
    python benchmarks/rank_candidates.py --candidates 3128 --alone                    # a whole answer list, ours only

A decoder of BLIP-base's size with random weights: 12 layers, width 768, 12 heads, 30,524 tokens, a question of 12.
Candidates of 1 to 3 tokens (70, 20 and 10 in 100; the longer ones begin as one of the shorter do, as in "black" and
"black and white"). The peers, with the same weights:

* repeated: the question's states repeated for each candidate, every candidate padded to the longest and read by itself,
  scores of the whole vocabulary at every place: what BLIP's own code does.
* padded: the same with the question's keys and values held once.

The three take turns; a ratio is the median, over the rounds, of peer's / ours: above 1 ours is faster, or smaller. The
floor is the ratio of multiplications. Memory is the peak above what was held before the call (CPU: resident set).
"""

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.crossattn.decoder import DecoderConfig, TextDecoder
from regard.crossattn.rank import rank
from regard.crossattn.text import TextConfig

MIB, LENGTH = 1 << 20, 12
TEXT = TextConfig(30524, dim=768, depth=12, heads=12, max_tokens=512, norm="post", norm_eps=1e-12)
Candidates = list[tuple[int, ...]]
Call = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--questions", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    result = measure(flags)
    if flags.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<44} {json.dumps(value)}")


@torch.inference_mode()
def measure(flags: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    decoder = TextDecoder(DecoderConfig(TEXT, first=30522, last=102, tied=True), TEXT.dim)
    decoder.reset_parameters()
    decoder = decoder.to(flags.device, getattr(torch, flags.dtype)).eval()
    states = torch.randn(flags.questions, LENGTH, TEXT.dim).to(flags.device, getattr(torch, flags.dtype))
    candidates = answers(flags.candidates)
    calls: dict[str, Call] = {"ours": lambda: rank(decoder, decoder.remember(states), None, candidates)}
    if not flags.alone:
        calls |= {
            "repeated": lambda: repeated(decoder, states, candidates),
            "padded": lambda: padded(decoder, decoder.remember(states), flags.questions, candidates),
        }
    found = {name: call() for name, call in calls.items()}
    worst = max((found["ours"] - other).abs().max().item() for other in found.values())
    seconds, peaks = take_turns(calls, flags.pairs, flags.device)
    nodes = len({ids[:n] for ids in candidates for n in range(len(ids) + 1)})
    places = len(candidates) * (1 + max(map(len, candidates)))
    floors = {
        "repeated": multiplications(places, LENGTH * len(candidates)),
        "padded": multiplications(places, LENGTH),
    }
    ours = multiplications(nodes, LENGTH)
    peers = list(calls)[1:]
    return {
        "candidates": len(candidates),
        "questions": flags.questions,
        "tokens read: ours, peers": [nodes, places],
        "where": f"{flags.device} {flags.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "rounds": flags.pairs,
        "largest difference of log-probabilities": worst,
        "times_faster_than": {k: round(ratio(seconds[k], seconds["ours"]), 2) for k in peers},
        "ratio_of_multiplications": {k: round(floors[k] / ours, 2) for k in peers},
        "times_smaller_than": {k: round(ratio(peaks[k], peaks["ours"]), 2) for k in peers},
        "ms": {k: round(statistics.median(s) * 1e3, 1) for k, s in seconds.items()},
        "peak_mib": {k: round(statistics.median(p)) for k, p in peaks.items()},
        "resident_peak_mib_weights_included": round(resident("VmHWM")),
    }


def answers(count: int) -> Candidates:
    """Token ids as a vocabulary of VQA answers has them."""
    draw = random.Random(0)
    words = draw.sample(range(1996, 29612), count)  # whole words of BERT's vocabulary
    found: dict[tuple[int, ...], None] = dict.fromkeys((word,) for word in words[: round(0.7 * count)])
    begins = list(found)
    while len(found) < count:
        longer = 2 if len(found) < round(0.9 * count) else 3
        begin = draw.choice(begins)
        found[(*begin, *draw.choices(words, k=longer - 1))] = None
    return draw.sample(list(found), count)


# peers ---------------------------------------------------------------------------------------------------------------


def repeated(decoder: TextDecoder, states: Tensor, candidates: Candidates) -> Tensor:
    rows = states.repeat_interleave(len(candidates), dim=0)
    return padded(decoder, decoder.remember(rows), len(states), candidates)


def padded(decoder: TextDecoder, kept: tuple, questions: int, candidates: Candidates) -> Tensor:
    first, last, device = decoder.config.first, decoder.config.last, decoder.bias.device
    ids = pad_sequence([torch.tensor([first, *ids, last]) for ids in candidates], batch_first=True, padding_value=-1)
    ids = ids.repeat(questions, 1).to(device)
    logs = decoder.logits(decoder(ids[:, :-1].clamp_min(0), kept)).float().log_softmax(dim=-1)
    wanted = ids[:, 1:]
    logs = logs.gather(2, wanted.clamp_min(0)[..., None])[..., 0].masked_fill(wanted < 0, 0.0)
    return logs.sum(dim=1).view(questions, -1)


# measures ------------------------------------------------------------------------------------------------------------


def multiplications(tokens: int, question: int) -> int:
    """Of one question: tokens read with their scores, and question tokens projected to keys and values.

    Attention itself, about 1 in 100 of it, is left out.
    """
    square = TEXT.dim**2
    layer = 4 * square + 2 * square + 8 * square  # self-attention, queries and output of cross-attention, MLP
    return tokens * (TEXT.depth * layer + square + TEXT.dim * TEXT.vocab_size) + question * TEXT.depth * 2 * square


def take_turns(
    calls: dict[str, Call], pairs: int, device: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and peak MiB of each call in each round; every other round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(pairs):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            before = reset_peak(device)
            start = time.perf_counter()
            calls[name]()
            if device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            peaks[name].append(peak(device) - before)
    return seconds, peaks


def reset_peak(device: str) -> float:
    """Let the peak begin anew; returns what is held now, in MiB."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / MIB
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what an earlier call freed is not resident for this one
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: str) -> float:
    return resident("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated() / MIB


def resident(field: str) -> float:
    """MiB of the resident set (`VmRSS`) or its peak (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def ratio(others: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(others, ours, strict=True))


if __name__ == "__main__":
    main()
