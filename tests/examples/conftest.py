"""Examples whose tests need packages that are not installed."""

import importlib.util
from pathlib import Path

import pytest
from real_models import real_model_folder

# they import the simulator, which needs the extra `frameworks`; .ci/run installs it for the slow tests
collect_ignore_glob = [] if importlib.util.find_spec("thermo") else ["test_process_*.py"]


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    return real_model_folder("smollm2")
