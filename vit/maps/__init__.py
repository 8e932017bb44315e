"""Where every head looks, and whether to believe it: attention rows, maps made of them, diagnosis, knock-outs.

`trace.py` shows each layer at work, `queries.py` says whose rows are asked for, `rows.py` recomputes and checks them;
everything else is built on these. May import what `regard.vit` may; a test keeps every N x N matrix out.
"""

from regard.vit.maps.queries import Pixel
from regard.vit.maps.rows import AttentionRows, attention_rows, checked_rows, patch_rows

__all__ = ["AttentionRows", "Pixel", "attention_rows", "checked_rows", "patch_rows"]
