"""Runs on a cluster of two nodes:

    python two_node_run.py replace '{"folder": ..., "steps": 10, "lost_after": 3, "engine": {...}}'
    python two_node_run.py grow '{"folder": ...}'
    python two_node_run.py drain '{"folder": ..., "steps": 12, "drained_after": 2}'
    python two_node_run.py move '{"folder": ..., "steps": 8, "drained_after": 2}'
    python two_node_run.py hold '{"folder": ..., "steps": 8, "drained_after": 2, "deadline_s": 12}'
    python two_node_run.py packages '{}'

The last line that is printed is an object with what the test checks.
"""

import asyncio
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray._private.state as ray_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray_cluster import eventually
from two_nodes import TwoNodes

import raylight as rl
from raylight.engines.registry import choose_engine, has_vllm
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.serving.deploy import ingress
from raylight.trainer.cluster_fit.engine_nodes import ask_nodes, engine_on_nodes

PREEMPTION = 2
"""Ray's DrainNodeReason of a spot node."""
SIZE = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
HEAD, OTHER = SIZE | {"resources": {"learner_node": 2}}, SIZE | {"resources": {"engine_node": 2}}


ROLES = {"learner-": "learner", "runner-": "runner", "SERVE_REPLICA::": "engine"}
"""Beginning of an actor's name -> its role."""


class Watcher:
    """Metric logger that records where actors are, and replaces the second node after a step."""

    def __init__(self, nodes: TwoNodes, step: int) -> None:
        self._nodes, self._step = nodes, step
        self.placements: dict[int, dict[str, list[str]]] = {}
        self.drained = ""
        """Id of the node that drains."""

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # from the GCS: the state API needs the dashboard, whose port another cluster may have
        alive = [actor for actor in ray_state.actors().values() if actor["State"] == "ALIVE"]
        found = self.placements[step] = {role: [] for role in ROLES.values()}
        for actor in alive:
            for start, role in ROLES.items():
                if actor["Name"].startswith(start):
                    on_head = actor["Address"]["NodeID"] == self._nodes.head_id
                    elsewhere = "drained" if actor["Address"]["NodeID"] == self.drained else "other"
                    found[role].append("head" if on_head else elsewhere)
        if step == self._step:
            self._nodes.remove_node()
            threading.Thread(target=self._nodes.add_node).start()  # the run goes on meanwhile

    def finish(self) -> None:
        pass


def replace(folder: str, steps: int, lost_after: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Train with learners on the head, engines on the second node and runners on both, and replace the second
    node after a step."""
    nodes = TwoNodes({}, HEAD, OTHER)
    watcher = Watcher(nodes, lost_after)
    train, val = additions(0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=STARTER_MODEL, n_steps=steps, lr=2e-4, kl_coef=1e-3, val_every=steps),
        address=nodes.address,
        output_dir=folder,
        learner={"n": 2, "resources": {"learner_node": 1}},
        engine={"start_timeout_s": 200, "resources": {"engine_node": 1}} | engine,
        runner={"n": 4},
        loggers=[watcher],
        progress=False,
        seed=0,
    )
    try:
        summary = trainer.fit(adder, train, val_dataset=val)
    finally:
        nodes.stop()
    return {"summary": summary, "placements": watcher.placements}


def grow(folder: str) -> dict[str, Any]:
    """Evaluate with runners that need a node which joins after Serve has started on the head."""
    nodes = TwoNodes({}, SIZE, SIZE | {"resources": {"agent_node": 2}}, joins_later=True)
    served: list[str] = []
    wait_for_route = ingress.wait_for_route

    def add_node_then_wait(url: str, timeout_s: float) -> None:
        served.append(url)
        assert len(ingress.alive_nodes()) == 1
        nodes.add_node()
        wait_for_route(url, timeout_s)

    ingress.wait_for_route = add_node_then_wait
    trainer = rl.Trainer(
        address=nodes.address,
        output_dir=folder,
        engine={"kind": "transformers", "start_timeout_s": 200},
        runner={"n": 1, "placement_timeout_s": 200, "resources": {"agent_node": 1}},
        progress=False,
        seed=0,
    )
    try:
        summary = trainer.evaluate(adder, additions(0)[1][:4], model=STARTER_MODEL)
    finally:
        nodes.stop()
    return {"summary": summary, "url": served[0], "head": nodes.address}


class Drainer(Watcher):
    """Metric logger that drains the second node after a step, as the notice of a spot node does.

    Args:
        deadline_s: seconds until the node ends; 0: it has no deadline.
        before: called first, in a thread.
    """

    def __init__(
        self, nodes: TwoNodes, step: int, deadline_s: float, before: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(nodes, step)
        self._deadline_s, self._before = deadline_s, before

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._step:
            threading.Thread(target=self._drain).start()
        else:
            super().log(step, metrics)

    def _drain(self) -> None:
        (self.drained,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != self._nodes.head_id)
        self._before()
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        deadline_ms = int((time.time() + self._deadline_s) * 1000) if self._deadline_s else 0
        assert client.drain_node(self.drained, PREEMPTION, "spot", deadline_ms)[0]


def drain(folder: str, steps: int, drained_after: int) -> dict[str, Any]:
    """Train with learners on the head, engines and runners on both nodes, and drain the second one."""
    nodes = TwoNodes({}, SIZE | {"num_cpus": 3, "resources": {"learner_node": 2}}, SIZE)
    watcher = Drainer(nodes, drained_after, 60.0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=STARTER_MODEL, n_steps=steps, lr=2e-4, val_every=0),
        address=nodes.address,
        output_dir=folder,
        learner={"resources": {"learner_node": 1}},
        engine={"kind": "transformers", "replicas": 2, "start_timeout_s": 200},
        runner={"n": 4},
        loggers=[watcher],
        progress=False,
        seed=0,
    )
    try:
        summary = trainer.fit(adder, additions(0)[0])
    finally:
        nodes.stop()
    return {"summary": summary, "placements": watcher.placements}


def move(folder: str, steps: int, drained_after: int) -> dict[str, Any]:
    """Train with a learner on the second node, which drains when a third one has joined."""
    nodes = TwoNodes({}, SIZE | {"resources": {"engine_node": 1}}, SIZE | {"resources": {"learner_node": 1}})
    watcher = Drainer(nodes, drained_after, 90.0, nodes.add_node)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=STARTER_MODEL, n_steps=steps, lr=2e-4, val_every=0),
        address=nodes.address,
        output_dir=folder,
        learner={"resources": {"learner_node": 1}},
        engine={"kind": "transformers", "start_timeout_s": 200, "resources": {"engine_node": 1}},
        checkpoint={"every": 0},
        loggers=[watcher],
        progress=False,
        seed=0,
    )
    try:
        summary = trainer.fit(adder, additions(0)[0])
    finally:
        nodes.stop()
    return {"summary": summary, "placements": watcher.placements}


@rl.rollout
async def holder(task: dict, llm: rl.LLM) -> float:
    """The quickstart's agent, which never ends on a node that is to drain."""
    if _is_held(Path(task["folder"])):
        await asyncio.Event().wait()
    return await adder(task, llm)


def _is_held(folder: Path) -> bool:
    """Return True on a node whose file exists, and write a file of the rollout."""
    held = (folder / ray.get_runtime_context().get_node_id()).exists()
    if held:
        (folder / f"held-{uuid.uuid4()}").touch()
    return held


def hold(folder: str, steps: int, drained_after: int, deadline_s: float) -> dict[str, Any]:
    """Train with runners on both nodes, and drain the second one while its rollouts do not end."""
    nodes = TwoNodes({}, SIZE | {"resources": {"head": 9}, "num_cpus": 3}, SIZE)

    def wait_for_held() -> None:
        Path(folder, watcher.drained).touch()
        eventually(lambda: len(list(Path(folder).glob("held-*"))) >= 8, 60.0, "rollouts on the second node")

    watcher = Drainer(nodes, drained_after, deadline_s, wait_for_held)
    Path(folder).mkdir(exist_ok=True)
    once = rl.RolloutConfig(max_attempts=1, infrastructure_retries=0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(
            model=STARTER_MODEL, n_steps=steps, max_staleness=1, val_every=0, rollout=once, failure_reward=0.0
        ),
        address=nodes.address,
        output_dir=f"{folder}/run",
        learner={"resources": {"head": 1}},
        engine={"kind": "transformers", "start_timeout_s": 200, "resources": {"head": 1}},
        runner={"n": 4, "drain_timeout_s": 5.0 if not deadline_s else 600.0},
        loggers=[watcher],
        progress=False,
        seed=0,
    )
    try:
        summary = trainer.fit(holder, [task | {"folder": folder} for task in additions(0)[0]])
    finally:
        nodes.stop()
    held = len(list(Path(folder).glob("held-*")))
    return {"summary": summary, "placements": watcher.placements, "held": held}


def packages() -> dict[str, Any]:
    """Choose the engine `auto` for a driver on a head without GPUs."""
    nodes = TwoNodes({}, SIZE, SIZE | {"num_gpus": 2, "resources": {"gpu_node": 2}})
    config = rl.EngineConfig(num_gpus=1, resources={"gpu_node": 1})
    try:
        with ray.init(nodes.address, log_to_driver=False):
            chosen = config.model_copy(update={"kind": choose_engine(config)})
            engine = engine_on_nodes(config, chosen)
            others = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Resources"].get("GPU")}
            return {"kind": engine.kind, "answers": ask_nodes(others, has_vllm), "driver": has_vllm()}
    finally:
        nodes.stop()


if __name__ == "__main__":
    modes = {"replace": replace, "grow": grow, "drain": drain, "move": move, "hold": hold}
    run = (modes | {"packages": packages})[sys.argv[1]]
    print(json.dumps(run(**json.loads(sys.argv[2]))))
