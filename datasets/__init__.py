"""Files -> samples: one way to open an image, question sets and sets of pictures in one common shape. No model code.

`open_image` opens any picture as upright RGB. `load_questions` reads easy-VQA or a plain table (`load_table`)
into a `QuestionSet` of `QuestionedImage`s and `Question`s, split by image. `vocabulary`, `coverage` and
`require_coverage` say which answers there are and how many of them a closed list reaches.

`load_pictures` reads folders, tables, tar shards and the files of known sets into a `PictureSet`, with labels or
without. `raws` hands a batch of its pictures to a view (`augment`).
"""

from regard.datasets.easy_vqa import load_easy_vqa
from regard.datasets.images import open_image
from regard.datasets.load import load_questions
from regard.datasets.pictures import (
    PictureSet,
    load_pictures,
    require_classes,
    splits_of,
)
from regard.datasets.questions import (
    Coverage,
    Question,
    QuestionedImage,
    QuestionSet,
    coverage,
    require_coverage,
    vocabulary,
)
from regard.datasets.table import load_table

__all__ = [
    "Coverage",
    "PictureSet",
    "Question",
    "QuestionSet",
    "QuestionedImage",
    "coverage",
    "load_easy_vqa",
    "load_pictures",
    "load_questions",
    "load_table",
    "open_image",
    "require_classes",
    "require_coverage",
    "splits_of",
    "vocabulary",
]
