"""Import path of the examples: the repository's root, as when they are run."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

# they import the simulator, which needs the extra `frameworks`; .ci/run installs it for the slow tests
collect_ignore_glob = [] if importlib.util.find_spec("thermo") else ["test_process_*.py"]
