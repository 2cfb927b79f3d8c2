"""Runs behind an HTTP proxy: what is for the gateway never reaches it, everything else does."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from counting_proxy import OUTSIDE, counting_proxy
from proxied_clients import CLIENTS, proxied_agent
from ray_cluster import BIN, Cluster

import raylight as rl


def test_clients_of_agents_use_the_proxy_for_other_hosts_only(
    shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"client": client, "folder": str(tmp_path)} for client in CLIENTS]
    outside = rl.LLM(endpoint=f"http://{OUTSIDE}/v1", model="m")
    models = {"outside": outside, "llm": outside.model_copy(update={"traced": True})}
    with counting_proxy() as proxy:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        with shared_cluster.connected(**proxy.variables):
            summary = rl.Trainer(
                algorithm=rl.Baseline(),
                n_runners=1,
                initial_resources=models,
                output_dir=tmp_path / "run",
                progress=False,
            ).fit(proxied_agent, tasks)
    assert summary["by_status"] == {"succeeded": len(CLIENTS)}, summary
    seen = Counter(proxy.seen)
    assert seen[urlsplit((tmp_path / "endpoint").read_text()).netloc] == 0
    assert seen[f"{OUTSIDE}:80"] == 2 * len(CLIENTS), "from the agent, and from the gateway"


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_run_with_a_cluster_of_its_own_needs_no_proxy(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "run" $HOME é 模型'
    command = [str(BIN / "raylight"), "quickstart", "--steps", "1", "--address", "local"]
    with counting_proxy() as proxy:
        environment = os.environ | proxy.variables | {"RAY_USAGE_STATS_ENABLED": "0"}
        subprocess.run([*command, "--output-dir", str(folder)], env=environment, check=True, timeout=300)
    hosts = {target.rpartition(":")[0] for target in proxy.seen}
    assert not [host for host in hosts if host.startswith("127.") or host in ("localhost", "::1")]
    for shown in (["trace", "--list"], ["export-traces", "--format", "messages", "-o", str(folder / "out")]):
        subprocess.run([str(BIN / "raylight"), *shown, str(folder)], check=True, timeout=120)
