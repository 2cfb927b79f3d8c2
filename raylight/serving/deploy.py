"""Ray Serve around the engine replicas: start it, deploy the run's application, and leave the cluster as it was found."""

from __future__ import annotations

import asyncio
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
PROXY_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_HAPROXY_STATS_PORT": 8404}
"""HAProxy listens on these too, and does not start when another Serve on the machine has them."""
for _flag, _value in SERVE_FLAGS.items():
    os.environ.setdefault(_flag, _value)

import ray  # noqa: E402
import urllib3  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError, RayTaskError  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from raylight.errors import EngineStartError, PortInUseError  # noqa: E402
from raylight.serving.replica import EngineReplica, ReplicaSpec  # noqa: E402

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
ANY_HOST = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
            await asyncio.wait_for(self._spec.weights.wait_for_subscribers.remote(config.replicas), config.start_timeout_s)
        except TimeoutError:
            raise EngineStartError(await asyncio.to_thread(self._why_not_up)) from None
        except RayTaskError as error:
            raise error.cause from None
        await asyncio.to_thread(_wait_for_route, f"{url}/health")
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
            if serve_http_options() is None:
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
        route = f"/{self._spec.app_name}"
        with self._deploying:
            if self._stopped:
                raise EngineStartError("the run was stopped before its engine started")
            host, port = serve_http_options() or self._start_serve()
            wanted = self._spec.config.port
            if wanted not in (None, port):
                raise PortInUseError(f"Ray Serve already runs on port {port} of this cluster; port {wanted} cannot be had")
            if host in LOOPBACK and len(alive_nodes()) > 1:
                raise EngineStartError(
                    f"Ray Serve listens on {host} only, and agents on other nodes could not reach it; set engine={{'host': "
                    "'0.0.0.0'}, or shut the running Serve down first (`serve shutdown`)"
                )
            target = serve.RunTarget(self._application(), self._spec.app_name, route, QUIET)
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        return f"http://{head_address() if host == ANY_HOST else host}:{port}{route}"

    def _start_serve(self) -> tuple[str, int]:
        """Start Serve with its fast ingress; returns the host and port on which it listens."""
        config = self._spec.config
        host = config.host or (ANY_HOST if len(alive_nodes()) > 1 else "127.0.0.1")
        port = choose_port(host, config.port)
        env = SERVE_FLAGS | {flag: str(choose_port(ANY_HOST, None, usual)) for flag, usual in PROXY_PORTS.items()}
        try:
            serve.start(
                http_options={"host": host, "port": port},
                logging_config=QUIET,
                controller_options={"runtime_env": {"env_vars": env}},
            )
        except RayError as error:
            raise EngineStartError(f"Ray Serve did not start: {error}") from None
        self._started_serve = True
        return host, port

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


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def head_address() -> str:
    """The head node's address: Serve's ingress runs there whatever nodes the replicas are on."""
    heads = [node for node in alive_nodes() if "node:__internal_head__" in node["Resources"]]
    return heads[0]["NodeManagerAddress"] if heads else ray.util.get_node_ip_address()


def serve_http_options() -> tuple[str, int] | None:
    """Host and port of the Serve that already runs on this cluster; None if none does."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def choose_port(host: str, wanted: int | None, usual: int = DEFAULT_PORT) -> int:
    """The wanted port if it is free; with no wish, the usual one or else any free one.

    Raises:
        PortInUseError: the wanted port is taken.
    """
    for port in (wanted or usual, 0):
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


def _wait_for_route(url: str) -> None:
    """Ask until the ingress has taken up the new route; Serve has no event for that.

    Raises:
        EngineStartError: it does not answer, some 30 s after the replicas were up.
    """
    retries = urllib3.Retry(total=60, backoff_factor=0.05, backoff_max=0.5, status_forcelist=(404, 500, 502, 503, 504))
    try:
        urllib3.PoolManager().request("GET", url, retries=retries, timeout=5)
    except urllib3.exceptions.HTTPError as error:
        raise EngineStartError(f"the replicas are up, but {url} does not answer: {error}") from None


def _offer(resources: dict[str, Any]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"
