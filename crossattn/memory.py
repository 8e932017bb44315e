"""What a model keeps of images it has looked at: keys and values, projected once per layer.

B items, H heads, N tokens of an item, K head width. An item is what one question can see: an image, several, or none.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from regard.vit.attention import KeysValues
from regard.vit.checkpoint import read_tensors
from regard.vit.errors import InputError, reason
from regard.vit.files import typed_path, write_atomically

Grid = tuple[int, int]  # (grid height, grid width)
_KIND, _FORMAT = "regard.Memory", "1"


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """B remembered items. `len`, slices, lists of numbers and `+` are those of a list of items.

    Attributes:
        layers: keys and values of every layer that asks, each `(B, H, N, K)`. The images of an item stand side by
            side, each with its class token, its registers, its patches; behind them is padding.
        visible: which of the N tokens exist, bool `(B, N)`; None when all do. A row of False is "no image".
        grids: for each item the (grid height, grid width) of each of its images in order, None for "no image".
        cls, registers: how many class tokens and registers each image has.
        fingerprint: tells the weights that made it from others, see `looking.fingerprint`; None where `remember` made
            it in training, and then nobody checks.
    """

    layers: tuple[KeysValues, ...]
    visible: Tensor | None
    grids: tuple[tuple[Grid | None, ...], ...]
    cls: int
    registers: int
    fingerprint: str | None = None

    def __repr__(self) -> str:
        size = f"{self.nbytes / 2**20:.1f} MiB in {self.dtype} on {self.device}"
        return f"Memory({len(self)} items, {len(self.layers)} layers, {size})"

    def __len__(self) -> int:
        """Number of items."""
        return len(self.grids)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Memory":
        """Some of the items, as a memory of their own, without padding that these do not need.

        A number or a slice copies nothing; a list of numbers `(B',)`, in any order, copies.
        Raises IndexError for an item that does not exist.
        """
        numbers: Sequence[int]
        if isinstance(index, slice):
            numbers = range(len(self))[index]
        elif isinstance(index, Sequence) or (isinstance(index, Tensor) and index.dim() == 1):
            numbers = [self._number(i) for i in (index.tolist() if isinstance(index, Tensor) else index)]
        else:
            number = self._number(index)
            numbers = range(number, number + 1)
        rows: slice | Tensor
        if isinstance(numbers, range) and numbers.step > 0:
            rows = slice(numbers.start, numbers.stop, numbers.step)
        else:
            rows = torch.tensor(numbers, dtype=torch.long, device=self.device)
        lengths = [self.length(number) for number in numbers]
        longest = max([1, *lengths])
        layers = tuple(KeysValues(kv.k[:, :, :longest], kv.v[:, :, :longest])[rows] for kv in self.layers)
        grids = tuple(self.grids[number] for number in numbers)
        if self.visible is None or all(length == longest for length in lengths):
            return replace(self, layers=layers, visible=None, grids=grids)
        return replace(self, layers=layers, visible=self.visible[rows, :longest], grids=grids)

    def __add__(self, other: "Memory") -> "Memory":
        return Memory.cat([self, other]) if isinstance(other, Memory) else NotImplemented

    @classmethod
    def cat(cls, memories: "Iterable[Memory]") -> "Memory":
        """The items of several memories of one model, in order.

        Raises InputError for none, and for memories of different models, devices or dtypes.
        """
        parts = list(memories)
        if not parts:
            raise InputError("there is no memory to join; give at least one")
        first = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            if (part.device, part.dtype) != (first.device, first.dtype):
                raise InputError(
                    f"memory {number} is in {part.dtype} on {part.device}, memory 0 in {first.dtype} on"
                    f" {first.device}; bring them together with memory.to(device, dtype)"
                )
            if part._made_by() != first._made_by():
                raise InputError(f"memory {number} and memory 0 were made by different models or weights; look again")
        lengths = [part.length(item) for part in parts for item in range(len(part))]
        longest = max([1, *lengths])
        layers = tuple(
            KeysValues(*(torch.cat([_padded(t, longest) for t in side]) for side in zip(*pairs, strict=True)))
            for pairs in zip(*([(kv.k, kv.v) for kv in part.layers] for part in parts), strict=True)
        )
        grids = tuple(grids for part in parts for grids in part.grids)
        return replace(first, layers=layers, visible=existing(lengths, first.device), grids=grids)

    def to(self, *args: Any, **kwargs: Any) -> "Memory":
        """On another device or in another floating-point dtype, given as to `Tensor.to`.

        Raises InputError for a dtype that is no floating point, and for values that float16 cannot hold.
        """
        layers = tuple(KeysValues(kv.k.to(*args, **kwargs), kv.v.to(*args, **kwargs)) for kv in self.layers)
        visible = None if self.visible is None else self.visible.to(layers[0].k.device)
        moved = replace(self, layers=layers, visible=visible)
        if not moved.dtype.is_floating_point:
            raise InputError(f"a memory cannot be held in {moved.dtype}; use a floating-point dtype")
        if moved.dtype != self.dtype:
            moved.require_finite()
        return moved

    def save(self, path: str | Path) -> None:
        """Write one safetensors file for `load`, whole or not at all.

        Raises InputError for what `remember` made in training, which does not know its weights; OSError as the file
        system gives it.
        """
        if self.fingerprint is None:
            raise InputError("this memory does not know which weights made it; save one that `look` made")
        tensors = {}
        for number, kv in enumerate(self.layers):
            tensors[f"layers.{number}.k"] = kv.k.detach().cpu().contiguous()
            tensors[f"layers.{number}.v"] = kv.v.detach().cpu().contiguous()
        told = {"kind": _KIND, "format": _FORMAT, "grids": json.dumps(self.grids), "cls": str(self.cls)}
        told["registers"] = str(self.registers)
        told["fingerprint"] = self.fingerprint
        write_atomically(typed_path(path), lambda file: file.write(to_safetensors(tensors, told)))

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Memory":
        """Open what `save` wrote, every value as it was; nothing in a file is executed.

        Raises InputError for a file that is missing, broken, or something else.
        """
        path = typed_path(path)
        if not path.is_file():
            raise InputError(f"{path}: no such file; a memory is a file that Memory.save wrote")
        tensors = read_tensors(path)
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
        if told.get("kind") != _KIND:
            raise InputError(f"{path}: is no memory that Memory.save wrote; a model is opened with from_pretrained")
        if told.get("format") != _FORMAT:
            raise InputError(
                f"{path}: format {told.get('format')}, this version of Regard reads format {_FORMAT}; look again"
            )
        try:
            memory = _from_file(tensors, told)
            memory.require_finite()
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path}: a broken memory ({reason(error)}); look again and save anew") from error
        return memory.to(device)

    def length(self, item: int) -> int:
        """How many tokens an item has, padding left out."""
        special = self.cls + self.registers
        return sum(special + grid[0] * grid[1] for grid in self.grids[item] if grid is not None)

    def spans(self, item: int = 0) -> tuple[slice | None, ...]:
        """Where the tokens of each of an item's images stand among the N, None for "no image"."""
        spans: list[slice | None] = []
        start, special = 0, self.cls + self.registers
        for grid in self.grids[item]:
            stop = start if grid is None else start + special + grid[0] * grid[1]
            spans.append(None if grid is None else slice(start, stop))
            start = stop
        return tuple(spans)

    @property
    def device(self) -> torch.device:
        return self.layers[0].k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].k.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its keys, values and `visible`, those of views counted as their own."""
        held = [tensor for kv in self.layers for tensor in (kv.k, kv.v)]
        return sum(tensor.nbytes for tensor in (held if self.visible is None else [*held, self.visible]))

    def require_finite(self) -> None:
        """Raise InputError where keys or values are not finite numbers, as when float16 has overflowed."""
        if not all(bool(torch.isfinite(tensor).all()) for kv in self.layers for tensor in (kv.k, kv.v)):
            raise InputError(
                f"keys or values of the images are not finite numbers in {self.dtype}; use torch.bfloat16 or"
                " torch.float32, and look at the weights if they are not finite there either"
            )

    def _number(self, index: object) -> int:
        if isinstance(index, bool):
            raise TypeError("items of a memory are chosen by number, slice or list of numbers, not by truth")
        number = operator.index(index)  # type: ignore[arg-type]
        if not -len(self) <= number < len(self):
            raise IndexError(f"item {number} of a memory of {len(self)}")
        return number % len(self)

    def _made_by(self) -> tuple[Any, ...]:
        return self.fingerprint, self.cls, self.registers, [(kv.k.shape[1], kv.k.shape[3]) for kv in self.layers]


def existing(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Which tokens exist where the shorter items are padded to the longest, bool `(B, N)`; None where all do."""
    longest = max([1, *lengths])
    if all(length == longest for length in lengths):
        return None
    return torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def _padded(tensor: Tensor, tokens: int) -> Tensor:
    return F.pad(tensor[:, :, :tokens], (0, 0, 0, tokens - min(tokens, tensor.shape[2])))


def _from_file(tensors: dict[str, Tensor], told: Mapping[str, str]) -> Memory:
    """A memory from what its file holds. Raises LookupError, ValueError or TypeError where that does not fit."""
    if unstated := sorted({"grids", "cls", "registers"} - told.keys()):
        raise ValueError(f"{unstated[0]} is not stated")
    names = [(f"layers.{number}.k", f"layers.{number}.v") for number in range(max(1, len(tensors) // 2))]
    if odd := sorted(tensors.keys() ^ {name for pair in names for name in pair}):
        raise ValueError(f"tensor {odd[0]} is {'not expected' if odd[0] in tensors else 'missing'}")
    layers = tuple(KeysValues(tensors[k], tensors[v]) for k, v in names)
    grids = tuple(
        tuple(None if grid is None else (operator.index(grid[0]), operator.index(grid[1])) for grid in item)
        for item in json.loads(told["grids"])
    )
    memory = Memory(layers, None, grids, int(told["cls"]), int(told["registers"]), told.get("fingerprint"))
    lengths = [memory.length(item) for item in range(len(memory))]
    rows, tokens = len(memory), max([1, *lengths])
    if memory.cls not in (0, 1) or memory.registers < 0 or any(g and min(g) < 1 for item in grids for g in item):
        raise ValueError("impossible numbers of tokens")
    for kv in layers:
        for tensor in (kv.k, kv.v):
            if tensor.dim() != 4 or tensor.shape != kv.k.shape or (len(tensor), tensor.shape[2]) != (rows, tokens):
                raise ValueError(f"a tensor has shape {tuple(tensor.shape)}, its {rows} items have {tokens} tokens")
            if tensor.dtype != memory.dtype or not tensor.is_floating_point():
                raise ValueError(f"a tensor holds {tensor.dtype}")
    return replace(memory, visible=existing(lengths, memory.device))
