"""Maps -> pictures: what `regard look` and `regard ask` draw, and how a long row of pictures is worked through.

`colours.py` turns numbers into RGB over a picture, `panels.py` says what stands in a panel, `sheet.py` lays panels out
with their scale and colour bar, `sources.py` opens folders, animations and videos, `series.py` works through them,
`arrays.py` writes maps as `.npz`. Everything is RGB and drawn by Pillow; matplotlib lends its colour maps and a font.
"""
