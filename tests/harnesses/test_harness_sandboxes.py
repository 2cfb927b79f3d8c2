"""Real harnesses in sandboxes: each in bubblewrap, and one in a container of podman."""

import shutil
from pathlib import Path

import pytest
from harness_helpers import TASK, agent_of, installation, needs
from podman_image import podman_image
from scripted_repairer import RepairServer

import raylight as rl
from raylight.harnesses.presets import PRESETS
from raylight.traces.reward_spans import find_final_reward

__all__ = ["podman_image"]
pytestmark = pytest.mark.slow
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ssl", "/etc/passwd")
"""Paths of this machine that a container without programs reads."""


def path_of(folder: str) -> dict[str, str]:
    """Return the variable with which programs of a folder are found in a sandbox."""
    return {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_harness_repairs_a_module_in_bubblewrap(server: RepairServer, preset: str) -> None:
    needs(preset)
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    folder, readable = installation(preset)
    sandbox = rl.sandboxes.SandboxSpec("bubblewrap", options={"readable": readable})
    own, _ = server.roll_out(TASK, agent_of(preset, sandbox=sandbox, env=path_of(folder)))
    assert find_final_reward(own) == 1.0
    assert len(server.requests) == 2


def test_a_harness_repairs_a_module_in_a_container(server: RepairServer, podman_image: str) -> None:
    needs("codex")
    folder, readable = installation("codex")
    shown = [path for path in (*SYSTEM, *readable) if Path(path).exists()]
    volumes = [f"--volume={path}:{path}:ro" for path in shown]
    sandbox = rl.sandboxes.SandboxSpec("podman", podman_image, options={"arguments": volumes})
    own, _ = server.roll_out(TASK, agent_of("codex", sandbox=sandbox, env=path_of(folder)))
    assert find_final_reward(own) == 1.0
    assert len(server.requests) == 2
