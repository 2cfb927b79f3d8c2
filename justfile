# Usual tasks; `just` lists them.

_list:
    @just --list

# install raylight with everything that tests and lint need, into the active environment
setup:
    pip install -c constraints.txt -e ".[frameworks,lint]"

# the README's test line: all tests except slow ones
test *args:
    pytest {{args}}

# the tests that need no Ray cluster
unit *args:
    pytest tests/unit {{args}}

# slow tests; `just slow --slow-part $(git rev-parse HEAD)` runs the twentieth that CI runs for this commit
slow *args:
    pytest -m slow {{args}}

# what only a GPU shows, with a table of figures: precision, speed, memory
gpu *args:
    python tests/gpu {{args}}

# lint, the formatter's check and types
lint:
    ruff check .
    ruff format --check .
    mypy

# the generated files: docs/api, the architecture's picture, the board of Grafana
docs:
    python docs/generate_api.py
    python docs/architecture_picture.py
    python scripts/generate_board.py

# the figures of docs/performance.md, into the folder figures
bench:
    python tests/benchmarks/figures.py --out figures

# tests with the lowest versions that pyproject.toml allows, in a fresh virtual environment
lowest:
    scripts/test_lowest_versions.sh

# what CI runs: a fresh virtual environment and all checks, about half an hour
ci:
    .ci/run

# regenerate constraints.txt with today's versions, for both Pythons (`pip install uv`)
constraints:
    (grep '^#' constraints.txt; uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header pyproject.toml --extra frameworks --extra lint) > constraints.new
    mv constraints.new constraints.txt
