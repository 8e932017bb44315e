"""Weights that others trained, opened with the numbers their owners get, and written out again.

`source.py` is what was read, `files.py`, `hub.py` and `modules.py` read it, `unwrap.py` takes wrappers and prefixes
off, `layouts/` holds one file per family, `opening.py` joins them. May import what `regard.vit` may; timm and
transformers are never needed to open a file.
"""
