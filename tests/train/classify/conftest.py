import sys
from pathlib import Path

import picture_run as script
import pytest

# Last, so that `import conftest` still finds the one of the folder above.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script.draw(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A recipe in which every field is the default."""
    path = tmp_path / "plain.yaml"
    path.write_text("{}")
    return path
