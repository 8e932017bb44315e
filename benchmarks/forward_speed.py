"""Forward and training-step speed of a ViT against timm and transformers with the same weights, in one run.

    python benchmarks/forward_speed.py [--cases vit-s/16 dinov3-s/16 ...] [--pairs 9] [--compiled] [--json]
    python benchmarks/forward_speed.py --device cuda --dtype bfloat16 --compiled          # needs a GPU

The three take turns in one process; a ratio is the median, over the rounds, of peer's time / ours. Above 1 ours is
faster. For each case it also tells:

* the matrix products alone: `torch.mm` at the model's own shapes in the same run, its GFLOP/s, and which share of our
  forward that is;
* the ceiling: the faster peer's time over matrix products and fused attention alone, that is the ratio of a forward
  in which everything else were free;
* where our forward's time goes, by the profiler;
* peak memory beside the weights, ours / timm's (CPU: storages alive at once, seen by a dispatch mode).

Compilation takes a minute or more per case, library and mode.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from peers import peer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], Any]
Call = Callable[[Tensor], Tensor]

CASES: dict[str, tuple[str, int, int]] = {  # timm's name, image size, batch size on a CPU
    "vit-s/16": ("vit_small_patch16_224", 224, 8),
    "vit-b/16": ("vit_base_patch16_224", 224, 4),
    "dinov3-s/16": ("vit_small_patch16_dinov3", 256, 8),
    "dinov2-s/14": ("vit_small_patch14_dinov2", 518, 2),
}
KINDS = {
    "matmul": ("mm", "linear", "gemm"),
    "attention": ("scaled_dot_product", "flash", "fmha"),
    "gelu": ("gelu",),
    "norm": ("layer_norm",),
    "copies": ("copy_", "cat", "roll", "clone"),
    "adds and products": ("add", "mul"),
}  # of a profiler's names, the first that fits; fused kernels of a compiler go under "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--modes", nargs="+", choices=["forward", "training"], default=["forward", "training"])
    parser.add_argument("--pairs", type=int, default=9, help="rounds")
    parser.add_argument("--batch", type=int, help="images at once; default: by case, 64 on a GPU")
    parser.add_argument("--compiled", action="store_true", help="also under torch.compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    results = []
    for name in flags.cases:
        for result in case(name, flags):
            results.append(result)
            if not flags.json:
                tell(result)
    if flags.json:
        print(json.dumps(results))


def case(name: str, flags: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Measure one model in every mode asked for."""
    architecture, size, batch = CASES[name]
    batch = flags.batch or (batch if flags.device == "cpu" else 64)
    models = {k: m.to(flags.device, getattr(torch, flags.dtype)) for k, m in same_weights(architecture).items()}
    images = torch.randn(batch, 3, size, size, device=flags.device, dtype=getattr(torch, flags.dtype))
    for compiled, mode in itertools.product([False, True] if flags.compiled else [False], flags.modes):
        torch._dynamo.reset()
        calls = {k: torch.compile(call) if compiled else call for k, call in callers(models).items()}
        works = {k: forward(call, images) if mode == "forward" else training(call, images) for k, call in calls.items()}
        seconds = race(works, flags.pairs, flags.device)
        ours = statistics.median(seconds["regard"])
        result: dict[str, Any] = {
            "case": f"{name} at {size}, batch {batch}",
            "mode": f"{mode}, {'compiled' if compiled else 'eager'}",
            "where": f"{flags.device} {flags.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}",
            "ms": {k: round(statistics.median(s) * 1e3, 2) for k, s in seconds.items()},
            "times_faster_than": {k: round(ratio(seconds, k), 3) for k in seconds if k != "regard"},
        }
        if mode == "forward":
            floor = {"matmul": matmul(models["regard"], images), "attention": attention(models["regard"], images)}
            alone = race({k: work for k, (work, _) in floor.items()}, flags.pairs, flags.device)
            ms = {k: statistics.median(s) for k, s in alone.items()}
            peer = min(statistics.median(s) for k, s in seconds.items() if k != "regard")
            per_second = floor["matmul"][1] / ms["matmul"]
            result |= {
                "alone_ms": {k: round(v * 1e3, 2) for k, v in ms.items()},
                "matmul_gflop_per_s": round(per_second / 1e9),
                "share_of_matmul_peak": round(sum(count for _, count in floor.values()) / ours / per_second, 3),
                "ceiling": round(peer / sum(ms.values()), 3),
                "time_goes_to": breakdown(works["regard"], flags.device),
            }
        if not compiled:
            result["peak_memory_over_timm"] = round(
                peak_bytes(works["regard"], flags.device) / peak_bytes(works["timm"], flags.device), 3
            )
        yield result


# models --------------------------------------------------------------------------------------------------------------


def same_weights(architecture: str) -> dict[str, nn.Module]:
    """timm's model, ours made from it, transformers' from ours; their tokens are compared before anything is timed."""
    timm = peer("timm")
    transformers = peer("transformers")
    from regard.vit import ViT

    torch.manual_seed(0)
    theirs = timm.create_model(architecture, pretrained=False, num_classes=0).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # no gate, bias or scale stays at a 0 or 1e-5 that would hide it
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    ours = ViT.from_pretrained(theirs).eval()
    with tempfile.TemporaryDirectory() as folder:
        ours.export(f"{folder}/model", "transformers")
        third = transformers.AutoModel.from_pretrained(f"{folder}/model").eval()
    models = {"regard": ours, "timm": theirs, "transformers": third}
    images = torch.randn(1, 3, *ours.config.image_size)
    with torch.no_grad():
        tokens = {k: call(images) for k, call in callers(models).items()}
    for k, other in tokens.items():
        distance = ((other - tokens["regard"]).norm() / other.norm()).item()
        assert distance < 1e-5, f"{k} computes something else: {distance}"
    return models


def callers(models: dict[str, Any]) -> dict[str, Call]:
    """Each library's own way to the normed patch tokens of the last layer, `(B, N, D)`."""
    config = models["regard"].config
    lead = config.class_token + config.registers
    return {
        "regard": lambda images: models["regard"](images).patches,
        "timm": lambda images: models["timm"].forward_features(images)[:, lead:],
        "transformers": lambda images: models["transformers"](pixel_values=images).last_hidden_state[:, lead:],
    }


# timing --------------------------------------------------------------------------------------------------------------


def forward(call: Call, images: Tensor) -> Work:
    @torch.inference_mode()
    def work() -> None:
        call(images)

    return work


def training(call: Call, images: Tensor) -> Work:
    def work() -> None:
        call(images).float().square().mean().backward()

    return work


def race(works: dict[str, Work], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each, taking turns; who begins moves on from round to round."""
    for work in works.values():
        for _ in range(2):
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            synchronize(device)
            start = time.perf_counter()
            works[name]()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def ratio(seconds: dict[str, list[float]], peer: str) -> float:
    return statistics.median(t / o for t, o in zip(seconds[peer], seconds["regard"], strict=True))


# the floor -----------------------------------------------------------------------------------------------------------


def matmul(model: nn.Module, images: Tensor) -> tuple[Work, int]:
    """Every Linear of one forward as a bare `torch.mm` into memory that is there, and its operations."""
    shapes: list[tuple[int, int, int]] = []

    def note(layer: nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        shapes.append((inputs[0].numel() // layer.in_features, layer.in_features, layer.out_features))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    like = {"device": images.device, "dtype": images.dtype}
    known = {
        s: (torch.randn(s[0], s[1], **like), torch.randn(s[2], s[1], **like).t(), torch.empty(s[0], s[2], **like))
        for s in set(shapes)
    }

    @torch.inference_mode()
    def work() -> None:
        for shape in shapes:
            a, b, out = known[shape]
            torch.mm(a, b, out=out)

    return work, sum(2 * rows * inner * outer for rows, inner, outer in shapes)


def attention(model: nn.Module, images: Tensor) -> tuple[Work, int]:
    """The fused attention of one forward alone, and its operations."""
    config: Any = model.config
    tokens = config.class_token + config.registers + config.grid[0] * config.grid[1]
    shape = (len(images), tokens, config.heads, config.width_of_head)
    q, k, v = (torch.randn(shape, device=images.device, dtype=images.dtype).transpose(1, 2) for _ in range(3))

    @torch.inference_mode()
    def work() -> None:
        for _ in range(config.depth):
            F.scaled_dot_product_attention(q, k, v)

    return work, config.depth * 4 * len(images) * config.heads * tokens**2 * config.width_of_head


# where time and memory go --------------------------------------------------------------------------------------------


def breakdown(work: Work, device: str) -> dict[str, float]:
    """Shares of the profiler's own time, by kind of operation."""
    gpu = device != "cpu"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu) as profiled:
        for _ in range(3):
            work()
        synchronize(device)
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in profiled.key_averages():
        kind = next((k for k, parts in KINDS.items() if any(p in event.key.lower() for p in parts)), "other")
        spent[kind] += event.self_device_time_total if gpu else event.self_cpu_time_total
    return {kind: round(time / sum(spent.values()), 3) for kind, time in spent.items()}


def peak_bytes(work: Work, device: str) -> int:
    """The most memory that is alive at once beside what was there before."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with Alive() as alive:
        work()
    return alive.peak


class Alive(TorchDispatchMode):
    """Counts the bytes of storages made inside it, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for made in tensors(out):
            storage = made.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.end, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def end(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def tell(result: dict[str, Any]) -> None:
    print(f"\n{result['case']} · {result['mode']} · {result['where']}")
    print("  median ms      " + ", ".join(f"{k} {v}" for k, v in result["ms"].items()))
    print("  times faster   " + ", ".join(f"than {k} {v}" for k, v in result["times_faster_than"].items()))
    if "alone_ms" in result:
        alone = result["alone_ms"]
        print(f"  alone          matmul {alone['matmul']} ms ({result['matmul_gflop_per_s']} GFLOP/s), ", end="")
        print(f"attention {alone['attention']} ms: everything else free would be {result['ceiling']} x the faster peer")
        print(f"  of that peak   {result['share_of_matmul_peak']:.1%} reached by our forward")
        print("  time goes to   " + ", ".join(f"{k} {v:.1%}" for k, v in result["time_goes_to"].items()))
    if "peak_memory_over_timm" in result:
        print(f"  peak memory    {result['peak_memory_over_timm']} of timm's", flush=True)


if __name__ == "__main__":
    main()
