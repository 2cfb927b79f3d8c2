"""Runs on a cluster of two nodes:

    python two_node_run.py replace '{"folder": ..., "steps": 10, "lost_after": 3, "engine": {...}}'
    python two_node_run.py grow '{"folder": ...}'
    python two_node_run.py drain '{"folder": ..., "steps": 12, "drained_after": 2}'
    python two_node_run.py packages '{}'

The last line that is printed is an object with what the test checks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import ray
import ray._private.state as ray_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from two_nodes import TwoNodes

import raylight as rl
from raylight.engines.registry import choose_engine, has_vllm
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.serving.deploy import ingress
from raylight.trainer.engine_nodes import ask_nodes, engine_on_nodes

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
                    found[role].append("head" if on_head else "other")
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
    """Metric logger that drains the second node after a step, as the notice of a spot node does."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._step:
            (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != self._nodes.head_id)
            client = GcsClient(address=ray.get_runtime_context().gcs_address)
            assert client.drain_node(other, PREEMPTION, "spot", int((time.time() + 60) * 1000))[0]
        else:
            super().log(step, metrics)


def drain(folder: str, steps: int, drained_after: int) -> dict[str, Any]:
    """Train with learners on the head, engines and runners on both nodes, and drain the second one."""
    nodes = TwoNodes({}, SIZE | {"num_cpus": 3, "resources": {"learner_node": 2}}, SIZE)
    watcher = Drainer(nodes, drained_after)
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
    run = {"replace": replace, "grow": grow, "drain": drain, "packages": packages}[sys.argv[1]]
    print(json.dumps(run(**json.loads(sys.argv[2]))))
