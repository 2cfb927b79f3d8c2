"""The serving application of a run or of `raylight serve`: deployed, waited for, and taken down with nothing left."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError

from raylight.errors import EngineStartError, PortInUseError
from raylight.serving.deploy import ingress
from raylight.serving.deploy.applications import application
from raylight.serving.deploy.replica import ReplicaSpec


class Deployment:
    """The serving application of one run.

    Args:
        spec: what each replica is told.
        cluster_ends: the whole cluster ends with the run, so that there is nothing to take down piece by piece.
    """

    def __init__(self, spec: ReplicaSpec, cluster_ends: bool) -> None:
        self._spec = spec
        self._cluster_ends = cluster_ends
        self._started_serve = False
        self._stopped = False
        self._deploying = threading.Lock()
        """Held while the application is handed to Serve, so that a stop in between waits and then finds all that was started."""

    async def start(self) -> str:
        """Deploy and wait until the engines answer; returns the base URL without `/v1`.

        Raises:
            PortInUseError: the port that was asked for is taken.
            EngineStartError: the replicas did not come up within `start_timeout_s`.
        """
        config = self._spec.config
        url = await asyncio.to_thread(self._deploy)
        try:
            await asyncio.wait_for(
                self._spec.board.wait_for_subscribers.remote(config.replicas), config.start_timeout_s
            )
        except TimeoutError:
            raise EngineStartError(await asyncio.to_thread(self._why_not_up)) from None
        except RayTaskError as error:
            raise error.cause from None
        await asyncio.to_thread(ingress.wait_for_route, f"{url}/health")
        return url

    async def stop(self) -> None:
        """Delete the application, and Serve too if this run started it and nothing else uses it."""
        if self._cluster_ends:
            self._stopped = True
        else:
            await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._deploying:
            self._stopped = True
            if ingress.serve_http_options() is None:
                return
        status = serve.status()
        if self._spec.app_name in status.applications:
            serve.delete(self._spec.app_name)
        if self._started_serve and not set(status.applications) - {self._spec.app_name}:
            serve.shutdown()

    def _deploy(self) -> str:
        """Make sure that Serve runs and hand it the application; returns the base URL that agents call.

        Raises:
            PortInUseError: another port was asked for than the running Serve's, or the one asked for is taken.
        """
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        route = self._spec.prefix
        with self._deploying:
            if self._stopped:
                raise EngineStartError("the run was stopped before its engine started")
            config, running = self._spec.config, ingress.serve_http_options()
            host, port = running or ingress.start_serve(config.host, config.port)
            self._started_serve = running is None
            if self._spec.secret is None and host not in ingress.LOOPBACK:
                raise EngineStartError(
                    f"Ray Serve already listens on {host}, where everybody would be let in; give an API key"
                )
            wanted = config.port
            if wanted not in (None, port):
                raise PortInUseError(
                    f"Ray Serve already runs on port {port} of this cluster; port {wanted} cannot be had"
                )
            if host in ingress.LOOPBACK and len(ingress.alive_nodes()) > 1:
                raise EngineStartError(
                    f"Ray Serve listens on {host} only, and agents on other nodes could not reach it; set engine={{'host': "
                    "'0.0.0.0'}, or shut the running Serve down first (`serve shutdown`)"
                )
            target = serve.RunTarget(
                application(self._spec, self._started_serve), self._spec.app_name, route, ingress.QUIET
            )
            serve.run_many(
                [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )
        return (
            f"http://{ingress.head_address() if host == ingress.ANY_HOST else host}:{port}{route.rstrip('/')}"
        )

    def _why_not_up(self) -> str:
        config = self._spec.config
        app = serve.status().applications.get(self._spec.app_name)
        said = "; ".join(d.message for d in app.deployments.values() if d.message) if app else ""
        return (
            f"{config.replicas} engine replica(s) of {config.num_cpus:g} CPU and {config.num_gpus:g} GPU were not up within "
            f"{config.start_timeout_s:g} s; the cluster has {_offer(ray.cluster_resources())}, of which free "
            f"{_offer(ray.available_resources())}. {said}"
        ).strip()


def _offer(resources: dict[str, Any]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"
