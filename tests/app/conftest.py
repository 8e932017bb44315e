"""What the tests of the verbs share."""

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A picture of 40 x 60 pixels of noise."""
    path = tmp_path / "photo.png"
    Image.effect_noise((60, 40), 80).convert("RGB").save(path)
    return path
