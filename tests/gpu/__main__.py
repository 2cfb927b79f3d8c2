"""Runner of the tests of a GPU, and of the table of their figures: python tests/gpu [ARGUMENTS]."""

import sys
from pathlib import Path

import pytest

sys.exit(pytest.main(["-n", "0", "-m", "gpu", str(Path(__file__).parent), *sys.argv[1:]]))
