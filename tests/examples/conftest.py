"""Examples whose tests need packages that are not installed."""

import importlib.util

# they import the simulator, which needs the extra `frameworks`; .ci/run installs it for the slow tests
collect_ignore_glob = [] if importlib.util.find_spec("thermo") else ["test_process_*.py"]
