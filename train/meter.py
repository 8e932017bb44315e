"""How fast a run is, and what it waits for: images per second, share of the device's peak, waiting for data, memory.

Nothing here makes the host wait for the device. On a GPU, events mark where a step ends and the next begins on the
device, and are read when they have come by; what lies between them is time in which the device had nothing to do but
receive its batch. On a CPU the same is the time spent fetching it.
"""

import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from regard.train.steps import train_batches

GIB = 2**30
PEAKS = {  # dense bf16 FLOP/s by name of the device, the most special name first
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A6000": 154.85e12,
}


@dataclass(frozen=True)
class Reading:
    """Totals since the run began; the difference of two is what happened between them.

    Attributes:
        images: seen by all devices.
        seconds: spent on training batches, validation and checkpoints left out.
        waited: of these, seconds without a batch to work on.
    """

    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def __sub__(self, earlier: "Reading") -> "Reading":
        return Reading(self.images - earlier.images, self.seconds - earlier.seconds, self.waited - earlier.waited)

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time, 0 to 1."""
        return min(1.0, self.waited / max(self.seconds, 1e-9))


class Meter(Callback):
    """Counts images and time on every rank; `now()` is a `Reading`."""

    def __init__(self) -> None:
        self.flops: float | None = None
        self.peak: float | None = None
        self.world = 1
        self._total = Reading()
        self._begun: float | None = None
        self._fetching = 0.0
        self._fetched = 0.0
        self._gaps: deque[tuple[Any, Any]] = deque()
        self._ended: Any = None
        self._gpu = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._gpu, self.world = device.type == "cuda", trainer.world_size
        self.flops = getattr(pl_module, "picture_flops", lambda: None)()
        self.peak = peak_flops(device, str(trainer.precision))
        loop: Any = trainer.fit_loop.epoch_loop
        before, after = type(loop)._on_before_fetch, type(loop)._on_after_fetch

        def begin() -> None:
            self._fetching = time.perf_counter()
            if self._begun is None:
                self._begun = self._fetching
            before(loop)

        def end() -> None:
            after(loop)
            self._fetched += time.perf_counter() - self._fetching

        loop._on_before_fetch, loop._on_after_fetch = begin, end

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun, self._ended = None, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._gpu and self._ended is not None:
            self._gaps.append((self._ended, _event()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        begun = self._begun if self._begun is not None else now
        data = train_batches(trainer)
        waited = self._fetched
        if self._gpu:
            self._ended, waited = _event(), self._read_gaps()
        total = self._total
        self._total = Reading(
            total.images + data.batch_size * data.world, total.seconds + now - begun, total.waited + waited
        )
        # A checkpoint or a validation after this is nobody's waiting for data: the clock goes on at the next fetch.
        self._begun, self._fetched = None, 0.0

    def now(self) -> Reading:
        """Totals so far."""
        return self._total

    def rate(self, reading: Reading) -> str | None:
        """Share of the devices' peak where that is known, else FLOP/s; None where nobody counted the FLOPs."""
        if self.flops is None or not reading.images:
            return None
        rate = self.flops * reading.images_per_second
        if self.peak is not None:
            return f"MFU {rate / (self.peak * self.world):.1%}"
        return f"{rate / 1e9:.0f} GFLOP/s" if rate < 1e13 else f"{rate / 1e12:.0f} TFLOP/s"

    def describe(self, reading: Reading) -> list[str]:
        """The parts of a status line: images/s, MFU or GFLOP/s, waiting for data, peak memory."""
        memory = peak_memory(self._gpu)
        parts = [
            f"{reading.images_per_second:.0f} images/s",
            self.rate(reading),
            f"data wait {reading.data_wait:.0%}",
            None if memory is None else f"memory {memory / GIB:.1f} GiB",
        ]
        return [part for part in parts if part is not None]

    def _read_gaps(self) -> float:
        waited = 0.0
        while self._gaps and self._gaps[0][1].query():
            begin, end = self._gaps.popleft()
            waited += begin.elapsed_time(end) / 1e3
        return waited


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense FLOP/s of the device in half precision; None where that is not known or not what the run computes in."""
    if device.type != "cuda" or not precision.startswith(("bf16", "16")):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if all(word in name for word in known.split())), None)


def peak_memory(gpu: bool) -> int | None:
    """Bytes at the peak so far: of this process's tensors on its GPU, or of the process itself."""
    if gpu:
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
