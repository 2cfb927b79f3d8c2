"""A small image for podman, made without a registry."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator

import pytest

from raylight.sandboxes.container import PodmanSandbox
from raylight.sandboxes.sandbox import SandboxLimits

IMAGE = f"localhost/raylight-test:{os.getpid()}"
PROGRAMS = (
    *(
        "sh",
        "cat",
        "tail",
        "head",
        "base64",
        "mkdir",
        "chmod",
        "dirname",
        "sleep",
        "grep",
        "kill",
        "ps",
        "wget",
    ),
    *("test", "ls", "id", "tar", "env", "mv", "rm", "touch", "wc"),
)
CONFIG = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
"""Settings with which podman also runs in a container or a small virtual machine."""


def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="session")
def podman_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Make an image of busybox; skip if podman cannot run it."""
    if shutil.which("podman") is None or shutil.which("busybox") is None:
        pytest.skip("needs podman and busybox-static")
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(folder / "root.tar", "w") as archive:
        archive.add(os.path.realpath(str(shutil.which("busybox"))), "bin/busybox")
        for name in PROGRAMS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    (folder / "containers.conf").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        podman("import", "--change", "WORKDIR=/app", str(folder / "root.tar"), IMAGE)
        network = PodmanSandbox(IMAGE, SandboxLimits())._default_network()
        trial = podman("run", "--rm", f"--network={network}", IMAGE, "sh", "-c", "true")
        if trial.returncode != 0:
            pytest.skip(f"podman does not run here: {trial.stderr.strip()[-200:]}")
        yield IMAGE
        podman("rmi", "--force", IMAGE)
