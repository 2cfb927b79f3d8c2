"""Import path of the examples: the repository's root, as when they are run."""

import importlib.util
import sys
from pathlib import Path

import pytest
from real_models import real_model_folder

sys.path.insert(0, str(Path(__file__).parents[2]))

# they import the simulator, which needs the extra `frameworks`; .ci/run installs it for the slow tests
collect_ignore_glob = [] if importlib.util.find_spec("thermo") else ["test_process_*.py"]


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    return real_model_folder("smollm2")
