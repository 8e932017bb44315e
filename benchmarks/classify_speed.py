"""What the training loop costs, and how our step compares with timm's, on one classification step after another.

    python benchmarks/classify_speed.py [--rounds 7] [--steps 12] [--model tiny] [--batch 16] [--clock cpu] [--json]

Three do the same work, AdamW on cross-entropy in fp32, on the same pictures in memory, in turns:

* `regard`: our ViT under `regard.train.loop.fit`, with clipping, the finite check, checkpoints, logs and status lines;
* `bare`: our ViT in a bare PyTorch loop, with the same clipping;
* `timm`: timm's ViT in a bare PyTorch loop, with the same clipping.

A ratio is the median over the rounds of peer's time / ours. `fit` is timed from its third batch to its last, in its own
callbacks, so that its start and its checkpoint at the end are not counted as steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule
from peers import peer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from regard.train.loop import fit
from regard.train.module import RegardModule
from regard.train.optim import configure
from regard.train.sampling import Draw, TrainBatches
from regard.vit import ViT
from regard.vit.flops import training_flops

WARM = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
now = CLOCKS["wall"]
CLASSES = 10


class Pictures(Dataset[Any]):
    """A batch of pictures in memory, always the same one: what is timed is the step."""

    def __init__(self, batch: int, size: int, steps: int):
        self.batch, self.steps = batch, steps
        self.pixels = torch.randn(batch, 3, size, size)
        self.labels = torch.arange(batch) % CLASSES

    def __len__(self) -> int:
        return self.batch * self.steps

    def __getitems__(self, draws: list[Draw]) -> tuple[Tensor, Tensor]:
        return self.pixels, self.labels


class Data(LightningDataModule):
    def __init__(self, pictures: Pictures):
        super().__init__()
        self.pictures = pictures

    def setup(self, stage: str) -> None:
        self.train_batches = TrainBatches(len(self.pictures), self.pictures.batch, seed=0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.pictures, batch_sampler=self.train_batches, collate_fn=lambda batch: batch)


class Module(RegardModule):
    def __init__(self, model: ViT):
        super().__init__(lr=1e-4)
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, labels = batch
        loss = F.cross_entropy(self.model.classify(pixels), labels)
        self.log("train/loss", loss.detach(), batch_size=len(labels))
        return self.check_finite(loss, range(len(labels)))

    def picture_flops(self) -> float:
        return float(training_flops(self.model.config))


class Clock(Callback):
    """Marks the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(now())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: this process's own, on a busy machine")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    global now
    now = CLOCKS[flags.clock]
    models = same_weights(flags.model, flags.size)
    pictures = Pictures(flags.batch, flags.size, flags.steps + WARM)
    works = {"regard": lambda: ours(models["regard"], pictures)}
    works |= {name: lambda call=call: bare(*call, pictures) for name, call in callers(models).items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(flags.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took = works[name]()
            if turn:  # the first round warms caches
                seconds[name].append(took)
    result = {
        "case": f"ViT {flags.model}/16 at {flags.size}, batch {flags.batch}",
        "where": f"cpu float32, {torch.get_num_threads()} threads, torch {torch.__version__}, {flags.clock} time",
        "ms_per_step": {name: round(statistics.median(times) * 1e3, 2) for name, times in seconds.items()},
        "times_faster_than_timm": ratio(seconds, "timm", "regard") if "timm" in seconds else None,
        "overhead_of_the_loop": round(1 / ratio(seconds, "bare", "regard") - 1, 4),
        "bare_times_faster_than_timm": ratio(seconds, "timm", "bare") if "timm" in seconds else None,
    }
    if flags.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:30}{value}")


def ratio(seconds: dict[str, list[float]], peer: str, of: str) -> float:
    return round(statistics.median(p / o for p, o in zip(seconds[peer], seconds[of], strict=True)), 4)


def same_weights(name: str, size: int) -> dict[str, Any]:
    """Our model and timm's with the same weights; ours alone where there is no timm."""
    torch.manual_seed(0)
    timm = peer("timm")
    if timm is None:
        return {"regard": ViT.preset(name, patch_size=16, image_size=(size, size), classes=CLASSES)}
    theirs = timm.create_model(f"vit_{name}_patch16_224", pretrained=False, num_classes=CLASSES, img_size=size)
    mine = ViT.from_pretrained(theirs, classes=CLASSES)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        distance = (mine.eval().classify(images) - theirs.eval()(images)).norm() / theirs(images).norm()
    assert distance < 1e-5, f"timm computes something else: {distance}"
    return {"regard": mine.train(), "timm": theirs.train()}


def callers(models: dict[str, Any]) -> dict[str, tuple[nn.Module, Any]]:
    calls = {"bare": (models["regard"], models["regard"].classify)}
    return calls | ({"timm": (models["timm"], models["timm"])} if "timm" in models else {})


def bare(model: nn.Module, call: Any, pictures: Pictures) -> float:
    """Seconds of a step in the loop that everybody writes."""
    optimizer = configure(model, lr=1e-4, weight_decay=0.05, total_steps=1000, warmup_steps=0)["optimizer"]
    loader = DataLoader(pictures, batch_size=pictures.batch, collate_fn=lambda batch: batch)
    for step, (pixels, labels) in enumerate(loader):
        if step == WARM:
            began = now()
        loss = F.cross_entropy(call(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return (now() - began) / (pictures.steps - WARM)


def ours(model: ViT, pictures: Pictures) -> float:
    """Seconds of a step under `fit`."""
    clock = Clock()
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "callbacks": [clock]}
    with tempfile.TemporaryDirectory() as out:
        fit(Module(model), Data(pictures), out=out, epochs=1, seed=0, trainer=settings)
    return (clock.ends[-1] - clock.ends[WARM - 1]) / (len(clock.ends) - WARM)


if __name__ == "__main__":
    main()
