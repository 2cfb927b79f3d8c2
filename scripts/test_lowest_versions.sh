#!/usr/bin/env bash
# Tests with the lowest versions that pyproject.toml allows, in a fresh virtual environment: unit tests, the quickstart, prompt
# optimisation and serving on Ray. Tests of MCP are left out, since it needs newer versions of what raylight needs.
set -euo pipefail
cd "$(dirname "$0")/.."
env_dir=$(mktemp -d)
trap 'rm -rf "$env_dir"' EXIT
trap 'exit 130' HUP INT TERM
python3 -m venv "$env_dir/venv"
export PATH="$env_dir/venv/bin:$PATH" VIRTUAL_ENV="$env_dir/venv" PIP_DISABLE_PIP_VERSION_CHECK=1
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
unset PYTHONPATH

pip install --quiet uv
# torch's version is exact, so that a build of it for the CPU is kept
pip install --quiet "$(grep -oP '^  "\Ktorch==[^"]+' pyproject.toml)"
uv pip install --quiet --resolution lowest-direct -e ".[unit]"
uv pip list

mapfile -t ignored < <(grep -rlE "^ *(from|import) mcp\b" tests/unit --include='test_*.py' | sed 's/^/--ignore=/')
pytest -n 2 tests/unit "${ignored[@]}"
raylight quickstart --output-dir "$env_dir/quickstart"
pytest -n 0 tests/integration/test_apo_on_ray.py tests/integration/test_serve.py
