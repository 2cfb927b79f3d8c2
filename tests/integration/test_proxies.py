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
from raylight._utils.no_proxy import is_loopback


@pytest.mark.slow
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
def test_a_run_with_a_cluster_of_its_own_sends_nothing_for_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "run" $HOME é 模型 %20 #1 ?q=1 [a]*'
    files = folder / "rollouts 模.jsonl", folder / "model's"
    commands = [
        ["quickstart", "--steps", "1", "--address", "local", "--output-dir", str(folder)],
        ["trace", str(folder)],
        ["export-traces", str(folder), "--format", "jsonl", "--output", str(files[0])],
        ["export", str(folder / "state"), str(files[1])],
    ]
    with counting_proxy() as proxy:
        for command in commands:
            environment = os.environ | proxy.variables
            subprocess.run([str(BIN / "raylight"), *command], env=environment, check=True, timeout=300)
    hosts = {target.rpartition(":")[0] for target in proxy.seen}
    assert not {host for host in hosts if is_loopback(f"http://{host}")}, hosts
    assert len(files[0].read_text().splitlines()) == 128
    assert (files[1] / "model.safetensors").exists()
