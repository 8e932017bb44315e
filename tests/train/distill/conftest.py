import sys
from pathlib import Path

# Last, so that `import conftest` still finds the one of the folder above.
sys.path.append(str(Path(__file__).parent))
