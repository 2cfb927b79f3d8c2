"""The taskset and the agent of docs/verifiers.md, with the package verifiers itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import DOCS, snippet, write_files
from framework_agents import Environments, requirements
from learning import learn
from ray_cluster import Cluster

from raylight.quickstart import STARTER_MODEL

PAGE = DOCS / "verifiers.md"


@pytest.fixture(scope="module")
def names(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Agent and tasks of the page."""
    folder = tmp_path_factory.mktemp("verifiers")
    write_files(PAGE, folder)
    shown = snippet(PAGE, "agent")
    python = environments.python(requirements(PAGE))
    code = shown.code.replace("/envs/verifiers/bin/python", str(python))
    return replace(shown, code=code.replace("/home/me/tasksets", str(folder))).run()


@pytest.mark.slow("installs verifiers; a learning run")
@pytest.mark.timeout(480)
def test_the_agent_of_the_page_learns(cluster: Cluster, names: dict[str, Any], tmp_path: Path) -> None:
    learning = learn(
        names["agent"],
        STARTER_MODEL,
        tmp_path / "run",
        steps=10,
        tasks=(names["tasks"], names["val_tasks"]),
        tasks_per_step=8,
    )
    assert learning.failures == []
    assert learning.least_gain > 0
