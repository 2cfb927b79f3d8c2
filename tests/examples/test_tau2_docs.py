"""The Python blocks of docs/multi_agent.md run unchanged, as one script, on real Ray."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from tau2_helpers import ScriptedServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "multi_agent.md").read_text()


def customer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the question of the instructions in the format that the starter model knows."""
    a, b = re.findall(r"\d+", messages[-1]["content"])
    return {"content": f"{a}+{b}="}


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) >= 3
    (tmp_path / "page.py").write_text("\n".join(snippets))
    with ScriptedServer(customer=customer) as server:
        environment = {"CUSTOMER_URL": server.url, "PYTHONPATH": str(ROOT)}
        done = run_python("page.py", cwd=tmp_path, timeout_s=280, **environment)
    rows = [json.loads(line) for line in (tmp_path / "outputs/clerk/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2
    for row in steps:
        assert row["train/trained"] == row["train/other_agents"] == 16  # the clerk's calls, and the checker's
    read = [line.split() for line in done.stdout.splitlines() if line.startswith("call:")]
    agents = [line[1] for line in read]
    assert agents == ["customer", "clerk", "checker"] * (len(agents) // 3)
    assert all(
        (agent, tokens != "0") in {("customer", False), ("clerk", True), ("checker", True)}
        for _, agent, tokens in read
    )


def test_the_page_names_what_there_is() -> None:
    for option in set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {
        "--lora-adapter",
        "--learn",
    }:  # of other commands
        assert option in (ROOT / "examples" / "tau2_agent" / "train.py").read_text(), option
    for path in re.findall(r"\]\(([^)#]+\.md)", PAGE):
        assert (ROOT / "docs" / path).is_file(), path
