"""`--trainer.strategy fsdp2`: weights, gradients and optimizer state in pieces, one on each device.

Lightning has no strategy of this name; its ModelParallelStrategy leaves the sharding to the module and by default
splits single layers instead of the batch (Lightning PR #21184). Here each transformer block is a piece, and the rest of
the module, whatever it is, is one more that is whole while a step runs: a step may call any method of its networks, and
each block as often as it likes (Zhao et al., 2023, arXiv:2304.11277).

Checkpoints are gathered: a file holds plain, whole tensors, with the names and the order that DDP would give them, and
can be resumed under either.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from regard.train.compiling import blocks_of
from regard.vit.errors import InputError

FSDP2 = "fsdp2"
_HALF = {"32-true": None, "bf16-mixed": torch.bfloat16}
_STEPS = ("training_step", "validation_step")


def strategy_of(name: Any, precision: str) -> Any:
    """What Lightning is to be given as `strategy`: ours for `fsdp2`, else the same.

    Raises InputError for a precision that cannot be had with sharded weights.
    """
    if name != FSDP2:
        return name
    if precision not in _HALF:
        why = (
            "scales the loss, which sharded gradients do not know" if precision == "16-mixed" else "has no fp32 weights"
        )
        raise InputError(f"trainer.strategy fsdp2 goes with trainer.precision {' or '.join(_HALF)}; {precision} {why}")
    return ShardedStrategy()


class ShardedStrategy(ModelParallelStrategy):
    """Fully sharded data parallelism over all devices of the run."""

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay on their device while they accumulate."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return getattr(optimizer, "_optimizer", optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Gather what is in pieces, on all ranks, and write it on the first."""
        whole = tree_map_only(DTensor, self._gather, checkpoint)
        ParallelStrategy.save_checkpoint(self, whole, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
        placed_ = {name: placed(value, own[name]) if name in own else value for name, value in saved.items()}
        self.lightning_module.load_state_dict(placed_, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {
                    name: placed(value, parameters[number])
                    if isinstance(value, Tensor) and value.shape == parameters[number].shape
                    else value
                    for name, value in values.items()
                }
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    def _gather(self, tensor: DTensor) -> Tensor | None:
        whole = tensor.full_tensor()
        return whole.cpu() if self.is_global_zero else None


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank holds, in pieces as `like` is; unchanged where `like` is whole."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def shard(module: Any, mesh: DeviceMesh, precision: str) -> None:
    """Split a LightningModule over `mesh`: each block of `module.networks()`, then the rest, its weights kept in fp32.

    Under `bf16-mixed` weights are gathered, and activations run, in bf16; gradients are summed in fp32. All ranks begin
    with the weights of the first. Raises InputError for a weight that cannot be cut, one number without a dimension.
    """
    if scalars := [name for name, parameter in module.named_parameters() if not parameter.dim()]:
        raise InputError(f"trainer.strategy fsdp2 cannot cut {scalars[0]} into pieces, it is a single number; use ddp")
    module.to(mesh.device_type if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device()))
    for tensor in (*module.parameters(), *module.buffers()):
        torch.distributed.broadcast(tensor.detach(), 0)
    half = _HALF[precision]
    policy: dict[str, Any] = {"param_dtype": half, "reduce_dtype": None if half is None else torch.float32}
    for block in blocks_of(module.networks()):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    # Freed after the forward pass too: between two steps every weight is in pieces, for the optimizer and for averages.
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(**policy, cast_forward_inputs=False),
        reshard_after_forward=True,
    )
    for step in _STEPS:
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)


def unshard(module: nn.Module) -> None:
    """Undo `shard`: plain modules with whole weights on the CPU. All ranks call it together."""
    whole: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor) and id(parameter) not in whole:
                full = parameter.full_tensor().cpu()
                whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    for part in list(module.modules()):
        _strip(part)
        for name, piece in part._parameters.items():
            if id(piece) in whole:
                part._parameters[name] = whole[id(piece)]


def _strip(part: Any) -> None:
    """Take the hooks that sharding put on a module away, and give it its own class back."""
    for hooks in (part._state_dict_pre_hooks, part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks):
        for key in [key for key, hook in hooks.items() if "fsdp" in getattr(hook, "hook", hook).__module__]:
            del hooks[key]
    if isinstance(part, FSDPModule):
        state: Any = part._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for step in _STEPS:
            part.__dict__.pop(step, None)
        part.__class__ = type(part).__bases__[1]
