"""How much memory a training step will take, before it is taken.

The step runs once on tensors that have a shape and no content; what is alive is counted as it goes, so that the frozen,
the adapted, the recomputed and the half-precise are counted as they are.
"""

import contextlib
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.train.building import freezes_vit, starts_pretrained
from regard.train.precision import precision_of
from regard.train.recipe import AnswerRecipe

GIB = 2**30
_MOMENTS = 2  # AdamW's, per trained weight


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device at the peak of a training step.

    Attributes:
        weights, gradients, optimizer: of the model.
        activations: what the forward pass keeps for the backward pass, and what either needs beside it.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ", ".join(f"{n} {getattr(self, n) / GIB:.3g}" for n in vars(self))
        return f"about {self.total / GIB:.3g} GiB for training on each device ({parts})"


def estimate(module: nn.Module, batch: Any, autocast: torch.dtype | None = None) -> MemoryEstimate:
    """The memory of one step of `module`, whose `losses(batch)` are one per sample, or already their sum.

    `batch` is looked at for its shapes alone. `autocast` is the dtype of mixed precision, None for none.
    The model stays as it is, and so does the random state.
    """
    parameters = dict(module.named_parameters())
    gradients = sum(_bytes(p) for p in parameters.values() if p.requires_grad)
    held = sum(_bytes(tensor) for tensor in (*parameters.values(), *module.buffers()))
    mixed = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    step = _Step(module)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as shapes:
        given: dict[str, Tensor] = {
            name: shapes.from_tensor(tensor) for name, tensor in (*step.named_parameters(), *step.named_buffers())
        }
        with _Alive(given.values()) as alive:
            with mixed:
                loss = torch.func.functional_call(step, given, (batch,))
            forward = alive.peak
            loss.backward()
    # The gradients of the last step live until the forward pass is over.
    return MemoryEstimate(held, gradients, _MOMENTS * gradients, max(forward, alive.peak - gradients))


def needed(module: nn.Module, batch: Any, precision: str) -> MemoryEstimate:
    """The same for a precision of Lightning's Trainer, such as `bf16-mixed`."""
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    need = estimate(module, batch, half)
    if precision in ("bf16-true", "16-true"):  # the weights become so when the run starts
        return MemoryEstimate(*(size // 2 for size in vars(need).values()))
    return need


def told(recipe: AnswerRecipe, module: nn.Module, batch: Any) -> str:
    """What a run will need, and where that is more than there is, what to turn."""
    need = needed(module, batch, precision_of(recipe.trainer))
    there = available(str(recipe.trainer.get("accelerator", "auto")))
    if there is None or need.total <= there[0]:
        return f"memory: {need}"
    ways = [] if recipe.gradient_checkpointing else ["gradient_checkpointing true"]
    ways += ["lora_rank 8"] if not recipe.lora_rank and starts_pretrained(recipe) else []
    ways += [] if freezes_vit(recipe) else ["freeze_vit true"]
    ways += [f"batch_images below {recipe.batch_images}"] if recipe.batch_images > 1 else []
    more = f"; less with {', '.join(ways)}" if ways else ""
    return f"memory: {need}\nwarning: that is more than the {there[0] / GIB:.1f} GiB of {there[1]}{more}"


def available(accelerator: str = "auto") -> tuple[int, str] | None:
    """Bytes of the memory that a run will use, and what it is; None where the system does not tell."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, "the GPU"
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    except (AttributeError, ValueError, OSError):  # Windows
        return None


class _Step(nn.Module):
    """The loss as a module's forward pass, to be called with other parameters."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        losses: Any = self.module.losses
        return losses(batch).sum()


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and not yet gone."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self.now += size
            self.peak = max(self.peak, self.now)
            self._seen[key] = weakref.ref(storage, lambda _: self._lose(key, size))

    def _lose(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
