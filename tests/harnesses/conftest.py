"""Check that harnesses leave neither processes nor files behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make sandboxes in a folder of the module, and assert that it is empty and unused afterwards."""
    folder = tmp_path_factory.mktemp("sandboxes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert [path.name for path in folder.iterdir()] == []
    assert processes_in(folder) == []


def processes_in(folder: Path) -> list[str]:
    """Return the commands of the processes whose environment names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if os.fsencode(folder) in environment:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
