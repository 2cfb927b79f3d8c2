"""The blocks of the page about sandboxes, and its table of backends."""

import os
import re
from pathlib import Path

import pytest
from docs_snippets import DOCS, snippet

from raylight.sandboxes.registry import BACKENDS
from raylight.sandboxes.sandbox import SandboxLimits

PAGE = DOCS / "sandboxes.md"
LXC = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
"""lxc-attach that runs programs on this machine."""


def test_the_sandboxes_of_the_page_are_valid() -> None:
    names = snippet(PAGE, "choose").run()
    spec = snippet(PAGE, "node").run(names)["spec"]
    assert spec.options["inner"] == "podman:python:3.12"
    spec.create()


def test_the_table_has_every_backend() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9]+)[`:].*\|$", PAGE.read_text().split("## User namespaces")[0], re.MULTILINE
    )
    assert {*BACKENDS} == {*rows}


async def test_a_backend_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "lxc-attach"
    tool.write_text(LXC)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = snippet(PAGE, "own").run()["LxcSandbox"]("box", SandboxLimits())
    await sandbox.start()
    await sandbox.write(f"{tmp_path}/given", b"1")
    assert await sandbox.read(f"{tmp_path}/given") == b"1"
    ended = await sandbox.exec(["sh", "-c", "echo $A; pwd; exit 3"], env={"A": "b c"}, cwd=str(tmp_path))
    assert (ended.status, ended.stdout) == (3, f"b c\n{tmp_path}\n")
    await sandbox.stop()
