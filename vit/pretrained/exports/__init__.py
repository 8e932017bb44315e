"""Weights written out again as another library opens them by itself: one file per library.

`target.py` is what a target can express, `graph.py` writes the computation itself (ONNX, torch.export).
"""

from regard.vit.pretrained.exports.export import LAYOUTS, export

__all__ = ["LAYOUTS", "export"]
