"""Check that harnesses leave neither processes nor files behind."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_helpers import REPAIR
from scripted_repairer import RepairServer

from raylight.sandboxes.folders import PREFIX


@pytest.fixture(scope="module", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make sandboxes in a folder of the module, and assert that none is left and none is used afterwards."""
    tmp_path_factory.getbasetemp()  # pytest's own folder is elsewhere
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o755)  # the user of bubblewrap reaches it
        patch.setattr(tempfile, "tempdir", name)
        yield
        assert [path.name for path in folder.glob(f"{PREFIX}*")] == []
        assert processes_in(folder) == []


@pytest.fixture(scope="module")
def server() -> Iterator[RepairServer]:
    server = RepairServer(REPAIR)
    yield server
    server.close()


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
