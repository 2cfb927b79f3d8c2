"""Import path of the examples: the repository's root, as when they are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
