"""Trained weights that packages carry, for the benchmarks that need real ones; none of the packages is imported."""

import importlib.util
import sys
from pathlib import Path

import torch
from peers import OWNERS
from torch import Tensor


def package(name: str) -> Path:
    """The folder of an installed package that carries weights; it is not imported."""
    sys.path.append(str(OWNERS))
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name}, which carries the weights, is not installed; see the head of this file")
    return Path(found.origin).parent


def dinov2_small(folder: Path) -> dict[str, Tensor]:
    """The tensors of the package's ONNX graph under the names transformers writes.

    The graph names the biases; each linear weight is the matrix multiplied just before its bias is added, transposed.
    """
    import onnx

    graph = onnx.load(folder / "models" / "vit_s_focus.onnx").graph
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def values(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(stored[name]).copy())

    tensors = {name.removeprefix("backbone."): values(name) for name in stored if name.startswith("backbone.")}
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        bias = next((name for name in node.input if name.startswith("backbone.") and name.endswith(".bias")), None)
        product = next((makers[name] for name in node.input if name in makers), None)
        if node.op_type == "Add" and bias and product is not None and product.op_type == "MatMul":
            tensors[bias.removeprefix("backbone.").removesuffix("bias") + "weight"] = values(product.input[1]).T
    folded = {tuple(t.dims): name for name, t in stored.items() if name.startswith("onnx::") and len(t.dims) == 3}
    table = [values(folded[1, rows, 384]) for rows in (1, 37 * 37)]
    tensors["embeddings.position_embeddings"] = torch.cat(table, dim=1)
    return tensors
