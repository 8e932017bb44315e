"""Class-token rows of every layer: what they cost over a plain forward, and over transformers with eager attention.

    python benchmarks/maps_memory.py [--size 1024] [--pairs 3] [--limit-gib 10] [--json]          # Linux

1. A ViT-S/8 of random weights on size x size pixels (1024: 16,385 tokens). `attention_rows(vit, images, layers="all")`
   and the plain fused forward take turns; told are the median ratio of their times and the peak memory above the plain
   forward's. A dense map of one layer is shown for scale.
2. transformers' ViTModel with attn_implementation="eager" and output_attentions=True, at the largest size that it
   survives with `--limit-gib` of address space, found by doubling from 128 px in processes of their own. There, in one
   process and with the same weights, the two take turns. The class-token rows must agree.

Memory is the peak of the resident set (VmHWM, reset before each call) above what was resident before the call.
"""

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.vit import ViT, attention_rows

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="pixels a side")
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--limit-gib", type=float, default=10.0, help="address space transformers may use")
    parser.add_argument("--parts", nargs="+", choices=["forward", "transformers"], default=["forward", "transformers"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--survive", type=int, help=argparse.SUPPRESS)  # what the processes of part 2 are started with
    flags = parser.parse_args()
    torch.manual_seed(0)
    if flags.survive:
        limit = int(flags.limit_gib * (1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        theirs(peer(flags.survive), pixels(flags.survive))
        return
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    if "forward" in flags.parts:
        results["forward"] = over_forward(flags.size, flags.pairs)
        tell(results["forward"], flags.json)
    if "transformers" in flags.parts:
        results["transformers"] = over_transformers(flags.pairs, flags.limit_gib)
        tell(results["transformers"], flags.json)
    if flags.json:
        print(json.dumps(results))


@torch.inference_mode()
def over_forward(size: int, pairs: int) -> dict[str, Any]:
    """Rows of all layers beside the plain fused forward."""
    vit, images = ViT.preset("small", patch_size=8).eval(), pixels(size)
    calls = {"forward": lambda: vit(images).patches[0, 0], "rows": lambda: attention_rows(vit, images, layers="all")}
    vit(images[..., :64, :64])  # whatever the first call sets up
    seconds, peaks = take_turns(calls, pairs)
    tokens = (size // 8) ** 2 + 1
    return {
        "tokens": tokens,
        "rows time / plain forward's": ratio(seconds["rows"], seconds["forward"]),
        "peak above the plain forward's, MiB": max(peaks["rows"]) - min(peaks["forward"]),
        "plain forward's peak, MiB": statistics.median(peaks["forward"]),
        "a dense map of one layer, MiB": vit.config.heads * tokens**2 * 4 / MIB,
        "seconds of a forward here": statistics.median(seconds["forward"]),
    }


@torch.inference_mode()
def over_transformers(pairs: int, limit_gib: float) -> dict[str, Any]:
    """Rows of all layers beside transformers' dense ones, at the largest size that these survive."""
    size = largest(limit_gib)
    model, images = peer(size), pixels(size)
    vit = ViT.from_pretrained(model).eval()
    calls: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: torch.stack([layer[:, :, 0].clone() for layer in theirs(model, images)], dim=1),
        "rows": lambda: class_rows(vit, images),
    }
    seconds, peaks = take_turns(calls, pairs)
    apart = (calls["dense"]() - calls["rows"]()).abs().max().item()
    if apart > 1e-5:
        raise SystemExit(f"the rows of the two differ by {apart:.2g}")
    return {
        "size": size,
        "tokens": (size // 8) ** 2 + 1,
        "transformers' time / ours": ratio(seconds["dense"], seconds["rows"]),
        "transformers' peak / ours": statistics.median(peaks["dense"]) / statistics.median(peaks["rows"]),
        "transformers' peak, MiB": statistics.median(peaks["dense"]),
        "our peak, MiB": statistics.median(peaks["rows"]),
        "largest difference of the rows": apart,
    }


def largest(limit_gib: float) -> int:
    """The largest side, doubling from 128 px, at which the dense maps fit."""
    size = 0
    for candidate in (128 * 2**i for i in range(6)):
        command = [sys.executable, __file__, "--survive", str(candidate), "--limit-gib", str(limit_gib)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            break
        size = candidate
    if not size:
        raise SystemExit(f"transformers does not survive 128 px with {limit_gib} GiB; is it installed?")
    return size


def peer(size: int) -> Any:
    """transformers' ViT-S/8 of random weights that attends eagerly."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        patch_size=8,
        image_size=size,
        attn_implementation="eager",
    )
    return ViTModel(config, add_pooling_layer=False).eval()


@torch.inference_mode()
def theirs(model: Any, images: Tensor) -> tuple[Tensor, ...]:
    found = model(images, output_attentions=True).attentions
    assert len(found) == model.config.num_hidden_layers  # an empty tuple is what a fused kernel gives there
    return found


def class_rows(vit: ViT, images: Tensor) -> Tensor:
    """`(B, L, H, S)` in the order class token, patches."""
    rows = attention_rows(vit, images, layers="all")
    assert rows.cls is not None
    return torch.cat((rows.cls[..., None], rows.patches.flatten(-2)), dim=-1)[:, :, :, 0]


def pixels(size: int) -> Tensor:
    return torch.randn(1, 3, size, size)


Measured = dict[str, list[float]]


def take_turns(calls: dict[str, Callable[[], Any]], pairs: int) -> tuple[Measured, Measured]:
    """Seconds and peak MiB of each call in each round; every other round goes backwards."""
    seconds: Measured = {name: [] for name in calls}
    peaks: Measured = {name: [] for name in calls}
    for turn in range(pairs):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what an earlier call freed is not resident for this one
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, start = resident("VmRSS"), time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
            peaks[name].append(resident("VmHWM") - before)
    return seconds, peaks


def resident(field: str) -> float:
    """MiB of the resident set (`VmRSS`) or its peak (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def tell(result: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        print(*(f"{name:40} {value:,.4g}" for name, value in result.items()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
