"""Where labelled pictures come from: folders, lists, the usual files of known sets, tar shards.

`regard.datasets.pictures.load_pictures` finds the right one. May import `vit`.
"""
