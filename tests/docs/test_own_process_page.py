"""The agents of docs/clients/own_process.md, each a separate program, are trained."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import snippet, write_files
from framework_agents import CLIENTS, Training, train
from ray_cluster import Cluster

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions

PAGE = CLIENTS / "own_process.md"
TASKS, _ = additions(0)
TOOL = """#!{python}
import json, os, sys, urllib.request

_, flag, model, _, question = sys.argv
assert flag == "--model"
asked = {{"model": model, "messages": [{{"role": "user", "content": question}}], "max_tokens": 8}}
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
"""A command-line tool that asks the model one question."""


def agent_of(block: str, folder: Path) -> Any:
    write_files(PAGE, folder)
    tool = folder / "my-agent"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o700)
    shown = snippet(PAGE, block)
    code = shown.code
    for path, ours in {
        "/home/me/agent": folder,
        "/envs/mine/bin/python": sys.executable,
        "exec my-agent": f"exec {tool}",
    }.items():
        code = code.replace(path, str(ours))
    return replace(shown, code=code).run()["agent"]


def check(training: Training) -> None:
    assert training.failures == []
    assert [row["train/failed"] for row in training.metrics] == [0, 0]
    assert all(row["train/trained"] > 0 for row in training.metrics)
    assert 0 < sum(item.reward for item in training.rollouts) < len(training.rollouts)
    assert {len(item.generations) for item in training.rollouts} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("block", ["python", "node", "tool"])
def test_a_program_is_trained(cluster: Cluster, tmp_path: Path, block: str) -> None:
    if block == "node" and shutil.which("node") is None:
        pytest.skip("there is no node")
    check(train(agent_of(block, tmp_path), TASKS, STARTER_MODEL, tmp_path / "run"))
