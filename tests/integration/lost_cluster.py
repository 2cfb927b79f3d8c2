"""Driver that waits for an actor until its cluster is lost: python lost_cluster.py ADDRESS"""

import asyncio
import sys

import ray

from raylight.errors import ClusterLostError
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import until_lost
from raylight.trainer.ray_session.connection import ray_session


class Waiting:
    """Actor whose method never returns."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def work() -> None:
    actor = ray.remote(Waiting).options(num_cpus=0).remote()
    await actor.__ray_ready__.remote()
    print("started", flush=True)
    await actor.wait.remote()


try:
    with ray_session(sys.argv[1], False):
        run_blocking(until_lost(work(), "Run it again."))
except ClusterLostError as error:
    sys.exit(f"error: {error}")
