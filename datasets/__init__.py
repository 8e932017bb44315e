"""Files -> samples: one way to open an image, and question sets in one common shape. No model code.

`open_image` opens any picture as upright RGB. `load_questions` reads easy-VQA or a plain table (`load_table`)
into a `QuestionSet` of `QuestionedImage`s and `Question`s, split by image. `vocabulary`, `coverage` and
`require_coverage` say which answers there are and how many of them a closed list reaches.
"""

from regard.datasets.easy_vqa import load_easy_vqa
from regard.datasets.images import open_image
from regard.datasets.load import load_questions
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
    "Question",
    "QuestionSet",
    "QuestionedImage",
    "coverage",
    "load_easy_vqa",
    "load_questions",
    "load_table",
    "open_image",
    "require_coverage",
    "vocabulary",
]
