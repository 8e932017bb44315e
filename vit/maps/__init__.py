"""Where every head looks, and whether to believe it: attention rows, maps made of them, diagnosis, knock-outs.

`trace.py` shows each layer at work, `queries.py` says whose rows are asked for, `rows.py` recomputes and checks them;
everything else is built on these. May import what `regard.vit` may; no N x N matrix is ever held.
"""

from regard.vit.maps.heads import Fused, fuse, head_scores
from regard.vit.maps.importance import HeadImportance, HeadReport, head_importance, head_report
from regard.vit.maps.knockout import head_means, knock_out, knock_out_registers
from regard.vit.maps.legrad import legrad
from regard.vit.maps.mass import keep_mass
from regard.vit.maps.measures import corloc, jaccard, mass_in_mask, pointing_game
from regard.vit.maps.norms import PAPER, ROBUST, outlier_report, token_norms
from regard.vit.maps.perturbation import deletion, insertion
from regard.vit.maps.queries import Pixel
from regard.vit.maps.registers import register_report
from regard.vit.maps.relevance import relevance
from regard.vit.maps.rollout import rollout
from regard.vit.maps.rows import AttentionRows, attention_rows, checked_rows, patch_rows
from regard.vit.maps.sinks import sink_report
from regard.vit.maps.test_time import find_register_units, with_test_time_registers
from regard.vit.maps.weighted import value_weighted

__all__ = [
    "PAPER",
    "ROBUST",
    "AttentionRows",
    "Fused",
    "HeadImportance",
    "HeadReport",
    "Pixel",
    "attention_rows",
    "checked_rows",
    "corloc",
    "deletion",
    "find_register_units",
    "fuse",
    "head_importance",
    "head_means",
    "head_report",
    "head_scores",
    "insertion",
    "jaccard",
    "keep_mass",
    "knock_out",
    "knock_out_registers",
    "legrad",
    "mass_in_mask",
    "outlier_report",
    "patch_rows",
    "pointing_game",
    "register_report",
    "relevance",
    "rollout",
    "sink_report",
    "token_norms",
    "value_weighted",
    "with_test_time_registers",
]
