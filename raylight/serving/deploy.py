"""Ray Serve around the engine replicas: start it, deploy the run's application, and leave the cluster as it was found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from typing import Any

SERVE_FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S": "1",
}
"""HAProxy hands requests straight to the replica: eight times the requests per second of Serve's Python proxy. The flags must be in
the environment before Serve is imported, and in that of its controller and replicas. A run's replicas have nothing to drain."""
for _flag, _value in SERVE_FLAGS.items():
    os.environ.setdefault(_flag, _value)

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from raylight.config import EngineConfig  # noqa: E402
from raylight.errors import EngineStartError, PortInUseError  # noqa: E402
from raylight.serving.replica import EngineReplica, ReplicaSpec  # noqa: E402

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")


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
        self._starting = threading.Lock()
        """Held while Serve is brought up, so that a stop in between waits and then finds what was started."""
        self.url = ""

    async def start(self) -> str:
        """Deploy and wait until the engines answer; returns the base URL without `/v1`.

        Raises:
            PortInUseError: the port that was asked for is taken.
            EngineStartError: the replicas did not come up within `start_timeout_s`.
        """
        config = self._spec.config
        host, port = await asyncio.to_thread(self._start_serve, config)
        route = f"/{self._spec.app_name}"
        deploying = asyncio.get_running_loop().create_future()
        # a thread of our own, because serve.run cannot be cancelled: past the deadline it must not keep the driver from ending
        threading.Thread(target=self._run_app, args=(route, deploying), name="serve-run", daemon=True).start()
        try:
            await asyncio.wait_for(deploying, config.start_timeout_s)
        except TimeoutError:
            raise EngineStartError(self._why_not_up()) from None
        except RuntimeError as error:
            raise EngineStartError(f"the engine replicas failed to start: {_last_line(error)}") from error
        self.url = f"http://{host}:{port}{route}"
        return self.url

    async def stop(self) -> None:
        """Delete the application, and Serve too if this run started it and nothing else uses it."""
        if not self._cluster_ends:
            await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._starting:
            if serve_http_options() is None:
                return
        status = serve.status()
        if self._spec.app_name in status.applications:
            serve.delete(self._spec.app_name)
        if self._started_serve and not set(status.applications) - {self._spec.app_name}:
            serve.shutdown()

    def _start_serve(self, config: EngineConfig) -> tuple[str, int]:
        """Make sure that Serve runs; returns the host and port that agents call.

        Raises:
            PortInUseError: another port was asked for than the running Serve's, or the one asked for is taken.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with self._starting:
            running = serve_http_options()
            if running is not None:
                host, port = running
                if config.port not in (None, port):
                    raise PortInUseError(f"Ray Serve already runs on port {port} of this cluster; port {config.port} cannot be had")
            else:
                host = config.host or ("127.0.0.1" if len(nodes) == 1 else "0.0.0.0")
                port = choose_port(host, config.port)
                serve.start(
                    http_options={"host": host, "port": port},
                    logging_config=QUIET,
                    controller_options={"runtime_env": {"env_vars": SERVE_FLAGS}},
                )
                self._started_serve = True
        return (ray.util.get_node_ip_address() if host == "0.0.0.0" else host), port

    def _run_app(self, route: str, done: asyncio.Future[None]) -> None:
        error: Exception | None = None
        try:
            app = self._application()
            serve.run(app, name=self._spec.app_name, route_prefix=route, logging_config=QUIET)
        except Exception as raised:  # handed to the waiting coroutine
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended meanwhile
            done.get_loop().call_soon_threadsafe(_settle, done, error)

    def _application(self) -> serve.Application:
        config = self._spec.config
        options: dict[str, Any] = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
        if self._started_serve:
            options["runtime_env"] = {"env_vars": SERVE_FLAGS}
        deployment = serve.deployment(
            name="engine",
            num_replicas=config.replicas,
            max_ongoing_requests=config.max_concurrent + config.max_waiting,
            ray_actor_options=options,
            graceful_shutdown_timeout_s=2,
            graceful_shutdown_wait_loop_s=0.1,
        )(EngineReplica)
        if config.num_gpus:
            deployment = deployment.options(placement_group_bundles=[{"CPU": config.num_cpus, "GPU": config.num_gpus}])
        return deployment.bind(self._spec)

    def _why_not_up(self) -> str:
        config = self._spec.config
        app = serve.status().applications.get(self._spec.app_name)
        said = "; ".join(d.message for d in app.deployments.values() if d.message) if app else ""
        return (
            f"{config.replicas} engine replica(s) of {config.num_cpus:g} CPU and {config.num_gpus:g} GPU were not up within "
            f"{config.start_timeout_s:g} s; the cluster has {_offer(ray.cluster_resources())}, of which free "
            f"{_offer(ray.available_resources())}. {said}"
        ).strip()


def serve_http_options() -> tuple[str, int] | None:
    """Host and port of the Serve that already runs on this cluster; None if none does."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def choose_port(host: str, wanted: int | None) -> int:
    """The wanted port if it is free; with no wish, 8000 or else any free one.

    Raises:
        PortInUseError: the wanted port is taken.
    """
    for port in (wanted or DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if wanted:
                    raise PortInUseError(
                        f"port {wanted} on {host} is taken ({os.strerror(error.errno or 0)}); choose another one, "
                        "or none to let raylight find a free one"
                    ) from None
    raise PortInUseError(f"no port is free on {host}")


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if not future.done():
        future.set_exception(error) if error else future.set_result(None)


def _offer(resources: dict[str, Any]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
