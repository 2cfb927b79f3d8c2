"""A Ray cluster of two nodes on this machine, whose second node can be removed and replaced."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_cluster import restored_cluster_file

PROGRAM = Path(__file__).with_name("two_node_run.py")
SIZE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


class TwoNodes:
    """A cluster in a separate process, because Ray starts nodes from a main thread only.

    Args:
        environment: environment variables of all its processes.
        head: arguments of `ray.cluster_utils.Cluster.add_node` for the head, such as resources.
        other: the same for the second node.
        joins_later: start without the second node, until `add_node`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        head: Mapping[str, Any] | None = None,
        other: Mapping[str, Any] | None = None,
        joins_later: bool = False,
    ) -> None:
        arguments = [SIZE | dict(head or {}), SIZE | dict(other or {}), joins_later]
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.head_id = self._read("address"), self._read("head")

    def add_node(self) -> str:
        """Start a second node; return its ID."""
        self._write("add")
        return self._read("added")

    def remove_node(self) -> None:
        """Kill all processes of the second node."""
        self._write("remove")

    def stop(self) -> None:
        """End the cluster."""
        self._process.communicate()

    def _write(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def _read(self, name: str) -> str:
        assert self._process.stdout
        return next(line.split()[1] for line in self._process.stdout if line.startswith(f"{name} "))


def run_on_two_nodes(mode: str, timeout_s: float = 280.0, **task: Any) -> dict[str, Any]:
    """Run `two_node_run.py` in a separate process, and return the object that it prints."""
    with restored_cluster_file():
        done = subprocess.run(
            [sys.executable, str(PROGRAM), mode, json.dumps(task)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_survived_a_loss(found: dict[str, Any], steps: int) -> None:
    """Assert that a run of the mode "replace" learned, lost nothing, and had its roles on their nodes."""
    summary, placements = found["summary"], found["placements"]
    assert summary["steps"] == steps
    assert summary["rollouts_failed"] == summary["rollouts_lost"] == 0
    assert summary["counts"]["rollouts_succeeded"] == summary["rollouts"]
    assert summary["counts"]["runners_lost"] >= 1
    assert summary["reward_before"] <= 0.7
    assert summary["reward_after"] - summary["reward_before"] >= 0.15
    for step in ("1", str(steps)):
        assert placements[step]["learner"] == ["head", "head"]
        assert set(placements[step]["engine"]) == {"other"}
        assert len(placements[step]["runner"]) == 4
    assert set(placements["1"]["runner"]) == {"head", "other"}


def main(head: dict[str, Any], other: dict[str, Any], joins_later: bool) -> None:
    """Start the cluster, print its address, and obey the lines of the standard input until it is closed."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = None if joins_later else cluster.add_node(**other)
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    print("head", cluster.head_node.node_id, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(node, allow_graceful=False)
        elif line == "add\n":
            node = cluster.add_node(**other)
            print("added", node.node_id, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
