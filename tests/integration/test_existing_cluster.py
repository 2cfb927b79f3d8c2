"""Runs on an existing cluster join it, have named actors, and leave it unchanged."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_cluster import Cluster, eventually, free_port
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.ui.workers import read_actors
from raylight.weights.actor import COORDINATOR_NAME

ROOT = Path(__file__).parent.parent.parent
TRAIN, VAL = additions(0)


def trainer(folder: Path, steps: int = 2, **settings: Any) -> rl.Trainer:
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        n_steps=steps,
        tasks_per_step=4,
        lr=2e-4,
        val_before_train=False,
        val_every=0,
        max_steps_without_signal=10_000,
    )
    return rl.Trainer(algorithm=algorithm, n_runners=2, output_dir=folder, progress=False, **settings)


@pytest.mark.slow
def test_a_job_submitted_to_the_cluster_succeeds(cluster: Cluster, tmp_path: Path) -> None:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(cluster.dashboard)
    jobs: list[str] = []

    def submitted() -> bool:
        """Submit the job; False until the node's agent, which runs jobs, has started."""
        try:
            jobs.append(
                client.submit_job(
                    entrypoint=f"{sys.executable} examples/quickstart.py --steps 3 --output-dir {tmp_path}",
                    runtime_env={"working_dir": str(ROOT), "excludes": [".git", "outputs", "tests"]},
                )
            )
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
        return bool(jobs)

    eventually(submitted, 60, "submitting the job")
    (job,) = jobs

    async def follow() -> str:
        return "".join([line async for line in client.tail_job_logs(job)])

    logs = asyncio.run(asyncio.wait_for(follow(), 180))
    eventually(lambda: client.get_job_status(job).is_terminal(), 20, "the end of the job")
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, logs
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    cluster.assert_clean()


@pytest.mark.slow
def test_actors_have_names_during_a_run_and_are_gone_afterwards(cluster: Cluster, tmp_path: Path) -> None:
    import ray
    from ray.util.state import list_actors, list_placement_groups

    seen: dict[str, Any] = {}

    def inspect_cluster() -> None:
        actors = [a for a in list_actors(filters=[("state", "=", "ALIVE")], limit=1000) if a.name]
        seen["names"] = {a.name for a in actors}
        seen["namespaces"] = {a.ray_namespace for a in actors if a.name.startswith("learner")}
        run = yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]
        seen["shown"] = {actor["name"] for actor in read_actors(run["dashboard"], run["name"])}
        seen["groups"] = [g.name for g in list_placement_groups(filters=[("state", "=", "CREATED")])]

    with ray.init(address=cluster.address, log_to_driver=False):
        running = trainer(tmp_path, steps=1000, learner={"n": 2})
        main = threading.get_ident()

        def inspect_and_interrupt() -> None:
            _wait_for_steps(tmp_path, 2)
            inspect_cluster()
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=inspect_and_interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            running.fit(adder, TRAIN)
        assert {"store", COORDINATOR_NAME, "learner-0", "learner-1", "runner-0", "runner-1"} <= seen["names"]
        assert seen["names"] - seen["shown"] <= {name for name in seen["names"] if name.startswith("SERVE_")}
        assert {"store", "learner-0"} <= seen["shown"]
        (namespace,) = seen["namespaces"]
        assert any(f"{namespace}#engine#" in name for name in seen["names"])
        assert namespace.startswith("raylight-")
        assert seen["groups"] == [f"{namespace}-learners"]
        assert ray.is_initialized(), "the Trainer must not end a connection that it did not make"
    cluster.assert_clean()


def _wait_for_steps(folder: Path, steps: int) -> None:
    metrics = folder / "metrics.jsonl"
    eventually(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= steps, 90, f"step {steps}"
    )


@pytest.mark.slow
def test_other_serve_applications_stay(cluster: Cluster, tmp_path: Path) -> None:
    import httpx
    import ray
    from ray import serve

    from raylight.serving.deploy.ingress_host import choose_ports

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Theirs:
        def __call__(self) -> str:
            return "theirs"

    with ray.init(address=cluster.address, log_to_driver=False):
        try:
            port, others = choose_ports("127.0.0.1", free_port())
            serve.start(http_options={"port": port}, controller_options={"runtime_env": {"env_vars": others}})
            serve.run(Theirs.bind(), name="theirs", route_prefix="/theirs")
            summary = trainer(tmp_path).fit(adder, TRAIN)
            assert summary["steps"] == 2
            assert set(serve.status().applications) == {"theirs"}
            assert httpx.get(f"http://127.0.0.1:{port}/theirs").text == "theirs"
        finally:
            serve.shutdown()
    cluster.assert_clean()


@pytest.mark.slow
def test_a_killed_runner_is_replaced_and_nothing_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    @rl.rollout
    async def deadly_once(task: dict, llm: rl.LLM, rollout: rl.Rollout) -> float:
        import os

        from raylight.quickstart.agent import adder

        try:
            os.close(os.open(task["marker"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return await adder(task, llm)
        os.kill(os.getpid(), 9)

    tasks = [{**task, "marker": str(tmp_path / "died")} for task in TRAIN[:16]]
    summary = trainer(tmp_path / "run").fit(deadly_once, tasks)
    assert (tmp_path / "died").exists()
    assert summary["steps"] == 2
    assert summary["rollouts"] == 64
    assert summary["rollouts_lost"] == summary["rollouts_failed"] == 0
    rows = metric_rows(tmp_path / "run")
    assert [row["train/trained"] for row in rows] == [32, 32]
    cluster.assert_clean()


@pytest.mark.slow
def test_a_killed_store_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    def kill_twice() -> None:
        from ray.util.state import list_actors

        killed: set[int] = set()
        for step in (1, 3):
            _wait_for_steps(tmp_path, step)
            pids: list[int] = []

            def again(pids: list[int] = pids) -> bool:
                pids[:] = [
                    a.pid
                    for a in list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
                    if a.name == "store"
                ]
                return bool(set(pids) - killed)

            eventually(again, 30, "the store's return")
            os.kill(pids[0], signal.SIGKILL)
            killed.add(pids[0])

    with ray.init(address=cluster.address, log_to_driver=False):
        killer = threading.Thread(target=kill_twice)
        killer.start()
        summary = trainer(tmp_path, steps=6).fit(adder, TRAIN)
        killer.join()
    assert (summary["steps"], summary["rollouts"]) == (6, 192)
    assert summary["rollouts_lost"] == summary["rollouts_failed"] == 0
    rows = metric_rows(tmp_path)
    assert [row["train/trained"] for row in rows] == [32] * 6
    assert [row["trace/calls"] for row in rows] == [32] * 6
    cluster.assert_clean()


@pytest.mark.slow
def test_runners_that_keep_dying_end_the_run(cluster: Cluster, tmp_path: Path) -> None:
    @rl.rollout
    def deadly(task: dict, llm: rl.LLM) -> float:
        import os

        os.kill(os.getpid(), 9)
        return 0.0

    with pytest.raises(rl.RaylightError, match=r"runners died|RunnerLost"):
        trainer(tmp_path).fit(deadly, TRAIN)
    cluster.assert_clean()


@pytest.mark.slow
def test_a_dead_learner_ends_the_run_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    def kill_learner() -> None:
        _wait_for_steps(tmp_path, 2)
        from ray.util.state import list_actors

        (pid,) = [
            a.pid for a in list_actors(filters=[("state", "=", "ALIVE")], limit=1000) if a.name == "learner-0"
        ]
        os.kill(pid, signal.SIGKILL)

    with ray.init(address=cluster.address, log_to_driver=False):
        killer = threading.Thread(target=kill_learner)
        killer.start()
        with pytest.raises(rl.RaylightError, match=r"max_restarts=0 .*learner 0 died"):
            trainer(tmp_path, steps=1000, learner={"max_restarts": 0}).fit(adder, TRAIN)
        killer.join()
    cluster.assert_clean()


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """A killed driver cannot clean up: actors die with the job, and the replica removes its application."""
    command = [sys.executable, "examples/quickstart.py", "--steps", "1000", "--output-dir", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=ROOT, env=cluster.env(), stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for_steps(tmp_path, 2)
        finally:
            driver.kill()
            driver.wait()
    # Serve itself stays, as it does for every application whose driver has ended
    cluster.assert_clean(allowed=("SERVE_CONTROLLER", "SERVE_PROXY", "HAProxy", "haproxy"))
    cluster.stop_serve()
