"""The algorithm in one process and its runners in others, on one cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import BIN, Cluster, eventually

import raylight as rl
from raylight.errors import ConfigError, PlacementError, RunnerLostError

AGENT = """
import os
from pathlib import Path

import raylight as rl


@rl.rollout
async def doubler(task: dict, llm: rl.LLM) -> float:
    import asyncio
    Path(task["folder"], f"{task['n']}-{os.getpid()}").touch()
    while task.get("until") and not Path(task["until"]).exists():
        await asyncio.sleep(0.1)
    return 2.0 * task["n"]


@rl.rollout
def fixed(task: dict) -> float:
    return 1.0


if __name__ == "__main__":
    tasks = [{"n": n, "folder": os.environ["TASK_FOLDER"]} for n in range(8)]
    llm = {"llm": rl.LLM(endpoint="http://unused", model="m")}
    trainer = rl.Trainer(algorithm=rl.Baseline(), n_runners=2, initial_resources=llm,
                         output_dir=os.environ["TASK_FOLDER"] + "/run")
    print(trainer.fit(doubler, tasks))
"""
LLM = {"llm": rl.LLM(endpoint="http://unused", model="m")}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "seen").mkdir()
    return tmp_path


class SumRewards(rl.Algorithm):
    total = 0.0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        requests = [rl.EnqueueRolloutRequest(input=task, mode="train") for task in train_dataset]
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        await store.wait_until_decided(rollout_ids=ids, timeout=120)
        self.total = sum(item.reward or 0.0 for item in await store.collect(ids))


def import_agent(workspace: Path) -> Any:
    sys.path.insert(0, str(workspace))
    try:
        from my_agent import doubler  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(workspace))
        sys.modules.pop("my_agent", None)
    return doubler


def start_runner(cluster: Cluster, workspace: Path, run: str, *more: str) -> subprocess.Popen[str]:
    command = [str(BIN / "raylight"), "runner", "my_agent:doubler", "--run", run, *more]
    env = cluster.env() | {"PYTHONPATH": str(workspace)}
    return subprocess.Popen(
        command, cwd=workspace, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def trainer(cluster: Cluster, workspace: Path, run: str, algorithm: Any, **settings: Any) -> rl.Trainer:
    return rl.Trainer(
        algorithm=algorithm,
        role="algorithm",
        run_name=run,
        address=cluster.address,
        output_dir=workspace / "run",
        progress=False,
        **{"initial_resources": LLM} | settings,
    )


def tasks(workspace: Path, n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"n": i, "folder": str(workspace / "seen"), **more} for i in range(n)]


def pids(workspace: Path) -> set[str]:
    return {file.name.split("-")[1] for file in (workspace / "seen").iterdir()}


@pytest.mark.slow
def test_external_runners_run_all_rollouts_and_end_with_the_run(cluster: Cluster, workspace: Path) -> None:
    runners = start_runner(
        cluster, workspace, "external-1", "--n-runners", "2"
    )  # they may start before the run
    helper = start_runner(cluster, workspace, "external-1", "--max-rollouts", "1")
    gate, algorithm, n = workspace / "gate", SumRewards(), 100  # more than one runner can hold

    def open_gate() -> None:
        eventually(lambda: len(pids(workspace)) >= 2, 90, "the work of a second runner")
        gate.touch()

    opening = threading.Thread(target=open_gate)
    opening.start()
    summary = trainer(cluster, workspace, "external-1", algorithm).fit(
        import_agent(workspace), tasks(workspace, n, until=str(gate))
    )
    opening.join()
    assert algorithm.total == 2.0 * sum(range(n))
    assert summary["by_status"] == {"succeeded": n}
    shown, _ = runners.communicate(timeout=60)
    assert runners.returncode == 0, shown
    assert "run external-1 ended" in shown
    shown, _ = helper.communicate(timeout=60)
    assert helper.returncode == 0, shown
    assert "ended" in shown or "have executed max_rollouts" in shown
    cluster.assert_clean()


@pytest.mark.slow
def test_one_script_takes_its_role_from_the_environment(cluster: Cluster, workspace: Path) -> None:
    def start(role: str) -> subprocess.Popen[str]:
        named = {"RAYLIGHT_ROLE": role, "RAYLIGHT_RUN": "external-2", "TASK_FOLDER": str(workspace / "seen")}
        return subprocess.Popen(
            [sys.executable, "my_agent.py"],
            cwd=workspace,
            env=cluster.env() | named,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    both = {role: start(role) for role in ("algorithm", "runner")}
    shown = {role: process.communicate(timeout=120)[0] for role, process in both.items()}
    assert [process.returncode for process in both.values()] == [0, 0], shown
    assert "8 rollouts" in shown["algorithm"].replace("  ", " ") or "'rollouts': 8" in shown["algorithm"]
    assert "{'run': 'external-2', 'runners_lost': 0, 'runners_replaced': 0}" in shown["runner"]
    cluster.assert_clean()


@pytest.mark.slow
def test_killed_runners_are_replaced_by_runners_that_join(cluster: Cluster, workspace: Path) -> None:
    gate = workspace / "gate"
    first = start_runner(cluster, workspace, "external-3")
    second: list[subprocess.Popen[str]] = []

    def swap() -> None:
        eventually(lambda: bool(pids(workspace)), 90, "the first rollout")
        first.send_signal(signal.SIGKILL)  # its actors die with it, and nothing releases them
        first.wait()
        gate.touch()
        second.append(start_runner(cluster, workspace, "external-3"))

    swapping = threading.Thread(target=swap)
    swapping.start()
    algorithm = SumRewards()
    trainer(cluster, workspace, "external-3", algorithm, store={"lease_s": 3.0}).fit(
        import_agent(workspace), tasks(workspace, 3, until=str(gate))
    )
    swapping.join()
    assert algorithm.total == 6.0
    assert len(pids(workspace)) == 2
    shown, _ = second[0].communicate(timeout=60)
    assert second[0].returncode == 0, shown
    cluster.assert_clean()


@pytest.mark.slow
def test_a_policy_is_trained_with_external_runners(cluster: Cluster, tmp_path: Path) -> None:
    """The keys of attempts derive from the run's secret; the engine rejects any other key."""
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder

    command = [str(BIN / "raylight"), "runner", "raylight.quickstart.agent:adder", "--run", "external-4"]
    runners = subprocess.Popen(
        command, env=cluster.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    algorithm = rl.GRPO(
        model=STARTER_MODEL, n_steps=1, tasks_per_step=2, lr=1e-4, val_before_train=False, val_every=0
    )
    summary = trainer(cluster, tmp_path, "external-4", algorithm, initial_resources=None).fit(
        adder, additions(0)[0]
    )
    assert summary["rollouts"] == 16
    assert summary["rollouts_failed"] == 0
    shown, _ = runners.communicate(timeout=60)
    assert runners.returncode == 0, shown
    cluster.assert_clean()


@pytest.mark.slow
def test_impossible_combinations_raise_errors(
    cluster: Cluster, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raylight.config import StoreConfig
    from raylight.store.actor import start_store

    agent = import_agent(workspace)
    with pytest.raises(PlacementError, match="raylight runner AGENT --run external-5"):
        trainer(cluster, workspace, "external-5", SumRewards(), runner={"start_timeout_s": 1.0}).fit(
            agent, tasks(workspace, 1)
        )
    late = subprocess.run(
        [str(BIN / "raylight"), "runner", "my_agent:doubler", "--run", "nowhere", "--wait", "1"],
        cwd=workspace,
        env=cluster.env(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert late.returncode == 1
    assert "ConfigError: no run 'nowhere' that runners can join" in late.stderr
    import ray

    with ray.init(address=cluster.address, log_to_driver=False):
        actor = start_store("external-6", str(workspace / "other.db"), StoreConfig())
        with pytest.raises(ConfigError, match="another run_name"):
            trainer(cluster, workspace, "external-6", SumRewards()).fit(agent, tasks(workspace, 1))
        ray.kill(actor)
    cluster.assert_clean()


@pytest.mark.slow
def test_a_run_without_runners_ends_with_an_error(cluster: Cluster, workspace: Path) -> None:
    runners = start_runner(cluster, workspace, "external-7")

    def leave() -> None:
        eventually(lambda: bool(pids(workspace)), 90, "the first rollout")
        runners.send_signal(signal.SIGINT)

    leaving = threading.Thread(target=leave)
    leaving.start()
    slow = {"start_timeout_s": 20.0, "stuck_after_s": 2.0}
    with pytest.raises(RunnerLostError, match="had no runner"):
        trainer(cluster, workspace, "external-7", SumRewards(), runner=slow).fit(
            import_agent(workspace), tasks(workspace, 2, until=str(workspace / "never"))
        )
    leaving.join()
    runners.communicate(timeout=60)
    cluster.assert_clean()
