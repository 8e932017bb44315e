"""The same numbers in fewer passes over memory, for a block that runs eagerly on a CPU.

Beside its matrix products a block is passes over activations that no cache holds. Here a residual sum is made by the
matrix product itself, and an activation where its input lies. A graph that is being captured gets the ordinary lines:
a compiler finds these by itself.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

LARGE = 2**15  # elements; below, calling an operation costs more than its pass over memory


def pays(x: Tensor) -> bool:
    """Whether `x` is large, and computed eagerly on a CPU in fp32 or wider: elsewhere there is nothing to win."""
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and x.numel() >= LARGE
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and its kin want no step in place
        and not torch_module._has_any_global_hook()
    )


def is_bare(layer: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling `layer` is no more than `kind.forward`: adapters, hooks and quantised stand-ins are called."""
    if type(layer) is not kind:
        return False
    own = layer.__dict__  # past Module.__getattr__, which would take longer than the question
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or own.get("_compiled_call_impl")
        or "forward" in own
    )


def is_plain_linear(layer: nn.Module | None, x: Tensor) -> bool:
    """Whether `layer` is a bare Linear with a bias and ordinary weights of the dtype of `x`."""
    if not is_bare(layer, nn.Linear):
        return False
    weight, bias = layer.__dict__["_parameters"]["weight"], layer.__dict__["_parameters"]["bias"]
    return type(weight) is nn.Parameter and type(bias) is nn.Parameter and weight.dtype == bias.dtype == x.dtype


def add_linear(x: Tensor, z: Tensor, layer: nn.Linear) -> Tensor:
    """`x + layer(z)`, `(…, D)`, the sum made inside the matrix product: x and the bias are where it starts from."""
    start = (x + layer.bias).flatten(0, -2)
    return start.addmm_(z.flatten(0, -2), layer.weight.t()).view(x.shape)


def gelu(x: Tensor, act: nn.GELU) -> Tensor:
    """`act(x)`, in the memory of `x` where no gradient needs what was there; `x` must be the caller's alone."""
    if x.requires_grad or not is_bare(act, nn.GELU):
        return act(x)
    return torch.ops.aten.gelu_(x, approximate=act.approximate)
