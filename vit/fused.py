"""The same numbers in fewer passes over memory, for a block that runs eagerly on a CPU.

Beside its matrix products a block is passes over activations that no cache holds. Here the matrix product itself adds
the bias and the residual stream and applies the activation. A graph that is being captured gets the ordinary lines: a
compiler finds these by itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

LARGE = 2**15  # elements; below, calling an operation costs more than its pass over memory
# oneDNN's linear layer on ordinary weights; private to torch, so it may be missing.
_PACKET: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_POINTWISE: Any = getattr(_PACKET, "default", None)
_POINTWISE_SUM: Any = getattr(_PACKET, "binary", None)


def pays(x: Tensor) -> bool:
    """Whether `x` is large, and computed eagerly on a CPU, in fp32 or wider, without gradients: elsewhere there is
    nothing to win.
    """
    return (
        x.is_cpu
        and not torch.is_grad_enabled()
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and x.numel() >= LARGE
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and its kin want no step in place
        and forward_ad._current_level < 0  # no_grad leaves forward-mode derivatives on
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


def _onednn(x: Tensor) -> bool:
    """Whether oneDNN's product may stand for a plain linear layer on `x`; modes that watch operators do not know it."""
    return (
        _POINTWISE is not None
        and x.dtype == torch.float32
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_mkldnn_enabled()
    )


def pays_with(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of `x` and a weight is worth it: also for a few rows of a large weight, as words have them.

    With 3 to 192 rows oneDNN's product took a third to three quarters of the other's time; a single row is the other's.
    """
    return pays(x) or (x.numel() > x.shape[-1] and pays(weight))


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """`layer(x)`."""
    if isinstance(layer, nn.Linear) and is_plain_linear(layer, x) and pays_with(x, layer.weight) and _onednn(x):
        return _POINTWISE(x, layer.weight, layer.bias, "none", [], "")
    return layer(x)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.linear(x, weight, bias)`."""
    plain = type(weight) is type(bias) is nn.Parameter and weight.dtype == x.dtype
    if plain and pays_with(x, weight) and _onednn(x):
        return _POINTWISE(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def add_linear(x: Tensor, z: Tensor, layer: nn.Linear) -> Tensor:
    """`x + layer(z)`, `(…, D)`, the sum made inside the matrix product."""
    if _onednn(z):
        return _POINTWISE_SUM(z, x, layer.weight, layer.bias, "add")
    start = (x + layer.bias).flatten(0, -2)  # where the product starts from
    return start.addmm_(z.flatten(0, -2), layer.weight.t()).view(x.shape)


def linear_gelu(x: Tensor, layer: nn.Linear, act: nn.GELU) -> Tensor:
    """`act(layer(x))`, both bare, with one tensor for the two."""
    if _onednn(x):
        return _POINTWISE(x, layer.weight, layer.bias, "gelu", [], act.approximate)
    return torch.ops.aten.gelu_(F.linear(x, layer.weight, layer.bias), approximate=act.approximate)
