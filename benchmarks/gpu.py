"""Training speed on one GPU in six minutes at most: ViT-S/B/L and DINO, ours beside timm, in bf16, compiled.

    python benchmarks/gpu.py [--seconds 350] [--parts small base large loader dino]
    python benchmarks/gpu.py --smoke        # tiny networks on a CPU, to see that it runs; its figures mean nothing

Each part prints one JSON line as soon as it is done, so that what was measured stays when time runs out; a part that
would not fit any more is named and left out. Per part:

* images per second: the median over batches, by events on the device; the share of the device's dense bf16 peak (MFU)
  by the formulas of `regard.vit.flops`; peak memory; graphs compiled after the warm-up, which should be none; and the
  attention kernel that ran;
* `small`, `base`, `large`: a supervised step at 224 pixels on synthetic pictures: forward, loss, backward, fused AdamW,
  ours and timm's with the same compilation of every block, in turns;
* `loader`: our small one fed with 500-pixel JPEGs through the data loader and its augmentation, as a share of the same
  step on synthetic pictures;
* `dino`: a step of `DistillModule`: ViT-S/16, 2 crops of 224 and 8 of 96 pixels, 65,536 prototypes, AdamW, teacher.

Goals on one H200: small 9,000, base 3,600, large 1,150, DINO 2,000 images per second; loader-fed 95 % of synthetic.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import peer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from regard.train.compiling import compile_blocks
from regard.train.meter import GIB, peak_flops
from regard.train.optim import parameter_groups
from regard.vit import ViT
from regard.vit.flops import distill_flops, training_flops

GOALS = {"small": 9000, "base": 3600, "large": 1150, "dino": 2000}
SHARES = {"small": 0.2, "base": 0.2, "large": 0.25, "loader": 0.15, "dino": 0.2}  # of the time
Step = Callable[[], Tensor]


class Setting:
    """What differs between the real run and the smoke test."""

    def __init__(self, smoke: bool):
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.size, self.local = (32, 16) if smoke else (224, 96)
        self.batch = {"small": 4, "base": 4, "large": 4, "loader": 4, "dino": 2}
        if not smoke:
            self.batch = {"small": 512, "base": 256, "large": 128, "loader": 512, "dino": 128}
        self.changes: dict[str, Any] = {"dim": 64, "heads": 2, "depth": 2} if smoke else {}
        self.backend = "eager" if smoke else "inductor"
        self.prototypes = 128 if smoke else 65_536
        self.files = 16 if smoke else 4096
        self.pixels = 40 if smoke else 500

    def vit(self, name: str, **more: Any) -> ViT:
        return ViT.preset(name, patch_size=16, image_size=(self.size, self.size), **self.changes, **more)

    def half(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=350)
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--smoke", action="store_true")
    flags = parser.parse_args()
    if not flags.smoke and not torch.cuda.is_available():
        sys.exit("no GPU here; --smoke runs tiny networks on the CPU")
    setting, end = Setting(flags.smoke), time.monotonic() + flags.seconds
    torch.manual_seed(0)
    if not flags.smoke:
        torch.set_float32_matmul_precision("high")
    tell({"part": "device", "name": name_of(setting), "torch": torch.__version__, "smoke": flags.smoke})
    for number, part in enumerate(flags.parts):
        left = end - time.monotonic()
        budget = left * SHARES[part] / sum(SHARES[p] for p in flags.parts[number:])
        if left < (2 if flags.smoke else 25):
            tell({"part": part, "left_out": f"{left:.0f} s are left"})
            continue
        began = time.monotonic()
        try:
            run = {"loader": loader, "dino": dino}.get(part)
            result = run(setting, budget) if run else supervised(part, setting, budget)
        except Exception as error:  # the other parts are worth their time
            result = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        if setting.smoke:
            result["claims"] = "nothing"
        tell({"part": part, **result, "took_s": round(time.monotonic() - began, 1)})
        torch._dynamo.reset()
        counters.clear()
        if not setting.smoke:
            torch.cuda.empty_cache()


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


# parts ---------------------------------------------------------------------------------------------------------------


def supervised(name: str, setting: Setting, budget: float) -> dict[str, Any]:
    """Ours and timm's, one after the other, each compiled and warm, in turns of batches."""
    batch = setting.batch[name]
    images = torch.randn(batch, 3, setting.size, setting.size, device=setting.device)
    labels = torch.randint(0, 1000, (batch,), device=setting.device)
    ours = setting.vit(name, classes=1000).to(setting.device)
    compile_blocks([ours], setting.backend)
    steps = {"regard": step_of(ours, ours.classify, images, labels, setting)}
    if (timm := peer("timm")) is not None:
        changes = {"embed_dim": 64, "num_heads": 2, "depth": 2} if setting.smoke else {}
        theirs = timm.create_model(f"vit_{name}_patch16_224", pretrained=False, img_size=setting.size, **changes)
        theirs = theirs.to(setting.device).train()
        for block in theirs.blocks:
            block.compile(dynamic=False, backend=setting.backend)
        steps["timm"] = step_of(theirs, theirs, images, labels, setting)
    measured = race(steps, setting, budget)
    flops = training_flops(ours.config)
    result = {who: speeds(m, batch, flops, setting) for who, m in measured.items()}
    result["attention"] = attention_of(steps["regard"], setting)
    if "timm" in measured:
        pairs = zip(measured["timm"]["seconds"], measured["regard"]["seconds"], strict=True)
        result["times_faster_than_timm"] = round(statistics.median(t / o for t, o in pairs), 3)
    return {"batch": batch, "goal_images_per_s": GOALS[name], **result}


def loader(setting: Setting, budget: float) -> dict[str, Any]:
    """The small ViT on JPEGs from disk: our data loader and augmentation against the same step on one batch."""
    from regard.datasets import load_pictures
    from regard.datasets.augment.views import TrainView
    from regard.train.pictures import PictureBatches, PictureData

    batch = setting.batch["loader"]
    model = setting.vit("small", classes=10).to(setting.device)
    compile_blocks([model], setting.backend)
    mean, std = (
        torch.tensor(v, device=setting.device)[:, None, None] for v in (model.preprocess.mean, model.preprocess.std)
    )
    optimizer = adamw(model, setting)

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        pixels = pixels.to(setting.device, non_blocking=True)
        labels = labels.to(setting.device, non_blocking=True)
        with setting.half():
            loss = F.cross_entropy(model.classify((pixels.float() / 255 - mean) / std), labels)
        return stepped(loss, optimizer)

    fixed = torch.zeros(batch, 3, setting.size, setting.size, dtype=torch.uint8, device=setting.device)
    zeros = torch.zeros(batch, dtype=torch.long, device=setting.device)
    synthetic = race({"regard": lambda: step(fixed, zeros)}, setting, budget * 0.4)["regard"]
    with tempfile.TemporaryDirectory() as folder:
        draw_pictures(Path(folder), setting)
        view = TrainView(size=(setting.size, setting.size))
        batches = PictureBatches(load_pictures(folder, "train"), view, seed=0)
        workers = 0 if setting.smoke else max(1, (os.cpu_count() or 2) - 1)
        data = PictureData(batches, None, batch=batch, seed=0, workers=workers)
        data.setup("fit")
        images, began, until = 0, 0.0, time.monotonic() + budget * 0.5
        warm = 1 if setting.smoke else workers  # each worker has one batch ready before the clock starts
        feeding, epoch = data.train_dataloader(), 0
        while time.monotonic() < until:
            data.train_batches.set_position(epoch)
            for number, made in enumerate(feeding):
                step(made.pixels, made.labels)
                if began:
                    images += len(made.labels)
                elif number + 1 >= warm or epoch:
                    synchronize(setting)
                    began = time.perf_counter()
                if time.monotonic() > until:
                    break
            epoch += 1
            if setting.smoke and epoch == 2:
                break
        synchronize(setting)
        rate = images / max(time.perf_counter() - began, 1e-9)
    alone = batch / statistics.median(synthetic["seconds"])
    return {
        "batch": batch,
        "workers": workers,
        "loader_images_per_s": round(rate, 1),
        "synthetic_images_per_s": round(alone, 1),
        "share_of_synthetic": round(rate / alone, 3),
        "goal_share": 0.95,
    }


def dino(setting: Setting, budget: float) -> dict[str, Any]:
    """Ours alone: student and teacher, all crops, heads, loss, optimizer, teacher's average."""
    from regard.train.distill.auto import derived
    from regard.train.distill.module import DistillModule
    from regard.train.distill.network import move_teacher
    from regard.train.distill.recipe import DistillRecipe
    from regard.train.pictures import PictureBatch

    batch = setting.batch["dino"]
    recipe = DistillRecipe(
        prototypes=setting.prototypes, local_size=(setting.local, setting.local), batch=batch, knn_every=0
    )
    recipe, _ = derived(recipe, 1_281_167, batch)
    module = DistillModule(setting.vit("small", drop_path=recipe.drop_path), recipe).to(setting.device).train()
    compile_blocks(module.networks(), setting.backend)
    optimizer = adamw(module, setting)
    sizes = [setting.size] * 2 + [setting.local] * recipe.local_crops
    made = PictureBatch(
        pixels=[torch.randint(0, 256, (batch, 3, s, s), dtype=torch.uint8, device=setting.device) for s in sizes],
        labels=torch.full((batch,), -1, device=setting.device),
        counts=torch.ones(batch, dtype=torch.bool, device=setting.device),
        ids=[str(number) for number in range(batch)],
        indices=torch.arange(batch),
        epochs=torch.zeros(batch, dtype=torch.long),
        bad=[],
    )

    def step() -> Tensor:
        with setting.half():
            loss = module.losses(made)
        loss = stepped(loss, optimizer)
        move_teacher(module.teacher, module.student, 0.996)
        return loss

    measured = race({"regard": step}, setting, budget)["regard"]
    flops = distill_flops(
        module.student.backbone.config,
        local_size=(setting.local, setting.local),
        local_crops=recipe.local_crops,
        prototypes=setting.prototypes,
    )
    attention = attention_of(step, setting)
    return {
        "batch": batch,
        "goal_images_per_s": GOALS["dino"],
        "regard": speeds(measured, batch, flops, setting),
        "attention": attention,
    }


# steps and timing ----------------------------------------------------------------------------------------------------


def step_of(model: nn.Module, call: Any, images: Tensor, labels: Tensor, setting: Setting) -> Step:
    model.train()
    optimizer = adamw(model, setting)

    def step() -> Tensor:
        with setting.half():
            loss = F.cross_entropy(call(images), labels)
        return stepped(loss, optimizer)

    return step


def adamw(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model, 0.05), lr=1e-4, fused=not setting.smoke)


def stepped(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def race(steps: dict[str, Step], setting: Setting, budget: float) -> dict[str, dict[str, Any]]:
    """Warm each up, then take turns of batches until the time is over; seconds of a step, memory, late graphs."""
    end = time.monotonic() + budget
    measured: dict[str, dict[str, Any]] = {name: {"seconds": [], "graphs": 0, "memory": 0} for name in steps}
    turn = 1 if setting.smoke else 10
    for step in steps.values():
        for _ in range(2 if setting.smoke else 5):
            step()
    synchronize(setting)
    for round_ in range(10_000):
        for name, step in steps.items():
            graphs = counters["stats"]["unique_graphs"]
            if not setting.smoke:
                torch.cuda.reset_peak_memory_stats()
            measured[name]["seconds"].append(timed(step, turn, setting))
            measured[name]["graphs"] += counters["stats"]["unique_graphs"] - graphs
            if not setting.smoke:
                measured[name]["memory"] = max(measured[name]["memory"], torch.cuda.max_memory_allocated())
        if round_ >= 2 and (setting.smoke or time.monotonic() > end):
            break
    return measured


def timed(step: Step, times: int, setting: Setting) -> float:
    """Seconds of one of `times` steps, all in flight at once."""
    if setting.smoke:
        began = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - began) / times
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def speeds(measured: dict[str, Any], batch: int, flops: float, setting: Setting) -> dict[str, Any]:
    rate = batch / statistics.median(measured["seconds"])
    peak = None if setting.smoke else peak_flops(setting.device, "bf16-mixed")
    return {
        "images_per_s": round(rate, 1),
        "mfu": None if peak is None else round(rate * flops / peak, 4),
        "tflop_per_s": round(rate * flops / 1e12, 3),
        "peak_memory_gib": round(measured["memory"] / GIB, 2),
        "graphs_after_warm_up": measured["graphs"],
        "turns": len(measured["seconds"]),
    }


def attention_of(step: Step, setting: Setting) -> list[str]:
    """The names of torch's fused attention operators in one step."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not setting.smoke)) as profiled:
        step()
        synchronize(setting)
    names = {event.key for event in profiled.key_averages()}
    return sorted(name for name in names if name.startswith("aten::_scaled_dot_product"))


def synchronize(setting: Setting) -> None:
    if not setting.smoke:
        torch.cuda.synchronize()


def name_of(setting: Setting) -> str:
    return "cpu" if setting.smoke else torch.cuda.get_device_name()


def draw_pictures(folder: Path, setting: Setting) -> None:
    """JPEGs with the entropy of photographs, more or less: smooth noise. A few are drawn, the rest are copies."""
    from PIL import Image

    side = setting.pixels
    drawn = []
    for number in range(min(setting.files, 64)):
        coarse = torch.randint(0, 256, (1, 3, side // 4, side // 4), generator=torch.Generator().manual_seed(number))
        pixels = F.interpolate(coarse.float(), (side, side), mode="bicubic").clamp(0, 255)[0].permute(1, 2, 0)
        file = folder / f"drawn{number}.jpg"
        Image.fromarray(pixels.byte().numpy()).save(file, quality=90)
        drawn.append(file)
    for number in range(setting.files):
        place = folder / "train" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(drawn[number % len(drawn)].read_bytes())
    for file in drawn:
        file.unlink()


if __name__ == "__main__":
    main()
