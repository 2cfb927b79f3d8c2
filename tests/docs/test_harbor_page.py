"""The task of the page about Harbor's format is read, prepared and judged."""

from pathlib import Path

import pytest
from docs_snippets import DOCS, snippet, write_files

from raylight.harbor.attempt import HarborAttempt
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.sandbox import SandboxLimits

PAGE = DOCS / "harbor.md"


@pytest.mark.parametrize(("edit", "reward"), [("s/-/+/", 1.0), ("s/a/a/", 0.0)])
async def test_the_task_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str, reward: float
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("environment", "tests"):
        (tmp_path / "tasks" / "fix-sum" / folder).mkdir(parents=True)
    write_files(PAGE, tmp_path)
    names = snippet(PAGE, "tasks").run()
    assert names["agent"].display_name == "CommandAgent mini-swe-agent"
    (task,) = names["tasks"].tasks
    attempt, sandbox = HarborAttempt(task), ProcessSandbox(None, SandboxLimits())
    try:
        await sandbox.start()
        workdir = await attempt.prepare(sandbox)
        assert f"{workdir}/total.py" in attempt.prompt(sandbox)
        assert (await sandbox.exec(["sed", "-i", edit, "total.py"], cwd=workdir)).status == 0
        assert await attempt.judge(sandbox) == reward
    finally:
        await sandbox.stop()
