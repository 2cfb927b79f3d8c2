"""Deployment and removal of the serving application of a run or of `raylight serve`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException

from raylight._utils.aio import in_daemon_thread
from raylight._utils.no_proxy import LOOPBACK
from raylight._utils.ray_resources import format_amounts
from raylight.components import import_dotted_name
from raylight.config import EngineConfig, LearnerConfig
from raylight.engines.registry import engine_traits
from raylight.engines.vllm.args import most_workers
from raylight.errors import ConfigError, EngineStartError, PortInUseError
from raylight.http.request import MAX_ARRIVING
from raylight.serving.deploy import ingress
from raylight.serving.deploy.haproxy_launcher import RESERVED_FILES
from raylight.serving.deploy.ingress import alive_nodes
from raylight.serving.deploy.ingress_host import ANY_HOST, Host, ingress_host
from raylight.serving.deploy.replica import EngineReplica, ReplicaSettings
from raylight.types import JsonObject
from raylight.weights.client import CoordinatorClient, call_until_answered
from raylight.weights.starts import StageTimes, StartProgress
from raylight.weights.transports import check_more_workers

logger = logging.getLogger(__name__)

HEALTH_CHECK_PERIOD_S = 5.0
HEALTH_CHECK_TIMEOUT_S = 15.0
"""Serve replaces a replica after three health checks in a row without a response: a frozen one within 50 s,
long before the default deadline of a weight sync. A busy machine delays a response by seconds only."""

KILL_TIMEOUT_S = 30.0
"""Time that Serve may take to kill a replica whose requests have outlasted `drain_timeout_s`."""
MIN_SHUTDOWN_S = 2.0
"""Time in which a replica without requests flushes its records and leaves the coordinator."""


def build_application(settings: ReplicaSettings, env: dict[str, str]) -> serve.Application:
    """Build the application that Serve is to run.

    Args:
        env: the flags with which raylight started Serve; the replicas need them too.
    """
    config = settings.config
    check_node_size(config, [node["Resources"] for node in alive_nodes()])
    serve_options = engine_traits(config.kind).serve_options
    if serve_options is not None:
        make = import_dotted_name(serve_options, "EngineConfig.kind", is_ours=True)
        options = make(config, settings.model_path)
    else:
        options = one_actor(config)
    environment = options["ray_actor_options"].setdefault("runtime_env", {}).setdefault("env_vars", {})
    environment |= env
    return serve.deployment(name="engine", **options, **common_options(settings))(EngineReplica).bind(
        settings
    )


def one_actor(config: EngineConfig) -> dict[str, object]:
    """Return Serve's options of an engine that lives in one actor per replica."""
    actor = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "resources": config.resources}
    options: dict[str, object] = {"ray_actor_options": actor}
    if config.num_gpus:
        options["placement_group_bundles"] = [
            {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
        ]
    return options


def check_node_size(config: EngineConfig, nodes: list[dict[str, float]]) -> None:
    """Raise if the parts of a tensor-parallel engine cannot be on one node.

    Nothing is known about a cluster without GPUs, whose nodes the autoscaler has yet to start.

    Args:
        nodes: resources of the nodes.

    Raises:
        EngineStartError: every node with GPUs has too few for an engine.
    """
    parts, stages = (config.args.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
    largest = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    needed = parts * config.num_gpus
    if parts > 1 and stages == 1 and 0 < largest < needed:
        raise EngineStartError(
            f"tensor_parallel_size={parts} needs {needed:g} GPUs on one node, and the largest node has "
            f"{largest:g}. Lower it to {int(largest / config.num_gpus)} and divide the layers between nodes, "
            "by engine={'args': {'pipeline_parallel_size': ...}}; or add a node with more GPUs before the run"
        )


def common_options(settings: ReplicaSettings) -> JsonObject:
    """Deployment options that do not depend on the engine."""
    config = settings.config
    options: dict[str, object] = {
        # bodies that arrive are counted too: without room for them, half-sent ones would lock out everybody
        "max_ongoing_requests": config.max_concurrent + config.max_waiting + MAX_ARRIVING,
        "graceful_shutdown_timeout_s": max(config.drain_timeout_s, MIN_SHUTDOWN_S),
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    }
    if not config.autoscales:
        return options | {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.target_ongoing_requests or config.max_concurrent,
    }
    return options | {"autoscaling_config": scaling}


QUICK_START_S = 5.0
"""Seconds from which on a start shows what it does."""
ABANDON_TIMEOUT_S, ABANDON_INTERVAL_S = 30.0, 0.5
"""Longest wait for the end of a start that was given up, and interval of the attempts to end it."""


class Deployment:
    """The serving application of one run.

    Args:
        settings: constructor argument of each replica.
        cluster_ends: True if the whole cluster ends with the run, so that nothing need be deleted one by one.
        rollouts: most rollouts that call the model at a time.
        replicas: client of the coordinator; None if the number of replicas never changes.
        show: shows how far the start has come.
        learner: settings of the learners that send weights to the replicas; None if none do.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        cluster_ends: bool,
        rollouts: int = 0,
        replicas: CoordinatorClient | None = None,
        show: Callable[[str], None] = logger.info,
        learner: LearnerConfig | None = None,
    ) -> None:
        self._settings, self._learner = settings, learner
        self._show = show
        self._cluster_ends = cluster_ends
        self._rollouts = rollouts
        self._replicas = replicas
        self._stopped = False
        self._deploy_lock = threading.Lock()
        """Held while Serve receives the application, so that a concurrent `stop` waits and then removes all
        that was started."""

    async def start(self) -> str:
        """Deploy, wait until the engines respond, and return the base URL without `/v1`.

        Raises:
            PortInUseError: the requested port is taken.
            EngineStartError: the replicas made no progress for `start_timeout_s`.
        """
        url = await in_daemon_thread(self._deploy)
        await self._wait_for_replicas()
        limit = self._settings.config.start_timeout_s
        await asyncio.to_thread(ingress.wait_for_route, f"{url}/health", limit)
        return url

    async def _wait_for_replicas(self) -> None:
        """Wait until all replicas are up, and show what they do.

        Raises:
            EngineStartError: none has made progress for `start_timeout_s`.
        """
        config, clock = self._settings.config, asyncio.get_running_loop().time
        progress = StartProgress(0, 0, {})
        began = clock()
        end, times = began + config.start_timeout_s, StageTimes(began)
        while progress.ready < config.replicas:
            if (left := end - clock()) <= 0:
                doing = f" ({progress})" if progress.stages else ""
                no_progress = f"made no progress for {config.start_timeout_s:g} s{doing}"
                raise EngineStartError(await asyncio.to_thread(self._start_timeout_message, no_progress))
            known = progress.progressed
            progress = await call_until_answered(
                self._settings.coordinator, "wait_for_start", config.replicas, known, left, within=left
            )
            if progress.progressed != known:
                end = clock() + config.start_timeout_s
            changed, seconds = times.enter(str(progress), clock()), clock() - began
            if changed and progress.stages and seconds >= QUICK_START_S:
                self._show(f"the engine: {progress} ({seconds:.0f} s)")
        if clock() - began >= QUICK_START_S:
            self._show(f"the engine is up after {times.describe(clock())}")

    @property
    def size(self) -> int:
        """Number of live replicas."""
        count = None if self._replicas is None else self._replicas.live_replicas
        return self._settings.config.replicas if count is None else count

    async def resize(self, n: int) -> None:
        """Change the number of replicas, and wait until it is reached. No other replica restarts.

        If the new replicas do not start, the former number is restored. Of two calls at the same time the
        later one decides.

        Raises:
            ConfigError: `n` is out of range, Serve scales the replicas by load, or the transport of weights
                does not reach so many.
            EngineStartError: a new replica failed to start, or the cluster has no room for it.
        """
        before = self._settings.config
        if before.autoscales:
            raise ConfigError(
                f"Ray Serve scales this run's replicas by load, from engine.replicas={before.replicas} to "
                f"engine.max_replicas={before.max_replicas}; leave max_replicas out to set their number"
            )
        values = before.model_dump(exclude_unset=True) | {"replicas": n}
        config = type(before)(**values | ({"max_replicas": n} if before.max_replicas is not None else {}))
        if self._learner is not None:
            check_more_workers(before, self._learner, most_workers(before), most_workers(config))
        self._settings = dataclasses.replace(self._settings, config=config)
        try:
            await self._reach(n, config.start_timeout_s + config.drain_timeout_s)
        except (TimeoutError, EngineStartError) as error:
            if self._settings.config is not config:
                return  # a later call decides
            late = isinstance(error, TimeoutError)
            not_up = f"were not up within {config.start_timeout_s:g} s"
            message = await asyncio.to_thread(self._start_timeout_message, not_up) if late else f"{error}."
            self._settings = dataclasses.replace(self._settings, config=before)
            with contextlib.suppress(TimeoutError, EngineStartError):
                await self._reach(before.replicas, config.drain_timeout_s)
            raise EngineStartError(f"{message} The run goes on with {before.replicas} replica(s)") from None

    async def _reach(self, n: int, within: float) -> None:
        """Set the number of replicas, and wait until it is reached.

        Raises:
            TimeoutError: it was not reached within so many seconds.
            EngineStartError: a new replica failed to start.
        """
        coordinator = self._settings.coordinator
        await call_until_answered(coordinator, "forget_start_failure", within=within)
        await asyncio.to_thread(self._set_replicas, n)
        async with asyncio.timeout(within):
            state = await call_until_answered(coordinator, "wait_for_replicas", n, within=within)
        if self._replicas is not None:  # which receives it from the coordinator later
            self._replicas.update(state)

    def _set_replicas(self, n: int) -> None:
        """Set the deployment's target, as Serve's REST API for external scalers does."""
        name = self._settings.app_name
        (deployment,) = serve.status().applications[name].deployments
        ray.get(ingress.controller().update_deployment_replicas.remote(DeploymentID(deployment, name), n))

    async def stop(self) -> None:
        """Delete the application.

        Shut Serve down too if a run started it and no other application uses it.
        """
        if self._cluster_ends:
            self._stopped = True
            await in_daemon_thread(self._abandon_deploying)
        else:
            await in_daemon_thread(self._stop)

    def _abandon_deploying(self) -> None:
        """Wait until no thread starts Serve any more. Ray ends the whole process if one of its threads uses
        Ray after the connection was closed."""
        end = time.monotonic() + ABANDON_TIMEOUT_S
        while not self._deploy_lock.acquire(timeout=ABANDON_INTERVAL_S):
            if not ray.is_initialized():
                return
            if time.monotonic() > end:
                logger.warning("the start of Ray Serve did not end within %g s", ABANDON_TIMEOUT_S)
                return
            with contextlib.suppress(ValueError, RayError):  # the controller has not started yet
                ray.kill(ingress.controller())  # the start fails then, and so does a further attempt
        self._deploy_lock.release()

    def _stop(self) -> None:
        with self._deploy_lock:
            self._stopped = True
            if ingress.serve_http_options() is None:
                return
        try:
            if self._settings.app_name in serve.status().applications:
                self._delete_application()
            if not ingress.is_unused():
                return
        except (ValueError, RayError, RayServeException):
            if ingress.serve_http_options() is not None:
                raise
            return  # once the application was deleted, another driver found Serve unused and shut it down
        try:
            with self._machine() as machine:
                ingress.stop_serve(machine)
        except EngineStartError as error:
            logger.warning("Ray Serve stays on the cluster: %s", error)

    def _delete_application(self) -> None:
        """Delete the application, with time for its requests.

        A replica that blocks its event loop while it starts, to load a model for example, hears no order to
        end, and Serve would wait `drain_timeout_s` for it. It is killed.
        """
        name = self._settings.app_name
        end = time.monotonic() + self._settings.config.drain_timeout_s + KILL_TIMEOUT_S
        starting = ingress.starting_replicas(name)
        serve.delete(name, _blocking=False)
        for replica in starting:
            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(ray.get_actor(replica, namespace=SERVE_NAMESPACE))
        while True:
            try:
                serve.delete(name)
                return
            except TimeoutError as error:  # after 60 s
                if time.monotonic() > end:
                    logger.warning("Ray Serve still deletes the application of this run: %s", error)
                    return

    def _machine(self) -> AbstractContextManager[Host]:
        """Return access to the ingress's machine, for as long as no other driver starts or stops Serve."""
        head = ingress.head_node()["NodeID"]
        return ingress_host(head, self._cluster_ends, self._settings.config.start_timeout_s)

    def _deploy(self) -> str:
        """Start Serve if needed and give it the application; returns the base URL that agents call.

        Raises:
            PortInUseError: the requested port is taken, or the running Serve uses another one.
            EngineStartError: Serve's address does not fit the run, or the run was stopped meanwhile.
        """
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with self._deploy_lock, self._machine() as machine:
            if self._stopped:
                raise EngineStartError("the run was stopped before its engine started")
            config = self._settings.config
            self._check_connections(machine)
            address = ingress.serve_http_options()
            if address is None:
                address = ingress.start_serve(
                    config.host, config.port, machine, config.start_timeout_s, self._run_application
                )
            else:
                if serve.status().applications:  # one of them may have the route
                    self._settings = dataclasses.replace(self._settings, route=None)
                self._run_application(*address)
        host, port = address
        if host == ANY_HOST:
            host = ingress.head_node()["NodeManagerAddress"]
        return f"http://{host}:{port}{self._settings.prefix.rstrip('/')}"

    def _run_application(self, host: str, port: int) -> None:
        """Give the running Serve the application, and return before its replicas are up.

        Raises:
            PortInUseError, EngineStartError: Serve's address does not fit the run.
        """
        self._check_address(host, port)
        settings = self._settings
        target = serve.RunTarget(
            build_application(settings, ingress.started_flags()),
            settings.app_name,
            settings.prefix,
            ingress.QUIET,
            external_scaler_enabled=not settings.config.autoscales,
        )
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def _check_address(self, host: str, port: int) -> None:
        """Raise if Serve's address does not fit the run.

        Raises:
            PortInUseError: Serve uses another port than the requested one.
            EngineStartError: the model would be open to anyone, or out of the agents' reach.
        """
        config = self._settings.config
        if self._settings.secret is None and host not in LOOPBACK:
            raise EngineStartError(
                f"Ray Serve already listens on {host}, where anyone could use the model; set an API key"
            )
        if config.port not in (None, port):
            raise PortInUseError(
                f"Ray Serve already runs on port {port} of this cluster, so port {config.port} cannot be "
                "used; leave the port out, or shut the running Serve down first (`serve shutdown`)"
            )
        if host in LOOPBACK and ingress.is_joinable():
            remedy = "set engine={'host': '0.0.0.0'}, or shut the running Serve down first (`serve shutdown`)"
            if len(ingress.alive_nodes()) > 1:
                raise EngineStartError(
                    f"Ray Serve listens on {host} only, which agents on other nodes cannot reach; {remedy}"
                )
            if config.host is None:
                logger.warning(
                    "Ray Serve listens on %s only: nodes that join the cluster later cannot reach the model; "
                    "for such a cluster %s",
                    host,
                    remedy,
                )

    def _check_connections(self, machine: Host) -> None:
        """Warn if HAProxy accepts fewer connections than rollouts run at a time, each of which keeps one.

        If one other node runs all rollouts, it gets half of the connections.
        """
        limit = machine.connection_limit() if self._rollouts else None
        if limit is not None and len(ingress.alive_nodes()) == 2:
            limit //= 2
        if limit is not None and limit < self._rollouts:
            logger.warning(
                "up to %d rollouts run at a time (runner.n x runner.max_concurrent), and HAProxy accepts %d "
                "connections from their nodes; the others wait. Run `ulimit -n %d` before the run, or before "
                "`ray start --head`, or lower runner.max_concurrent",
                self._rollouts,
                limit,
                4 * self._rollouts + RESERVED_FILES,
            )

    def _start_timeout_message(self, failure: str) -> str:
        config = self._settings.config
        app = serve.status().applications.get(self._settings.app_name)
        messages = "; ".join(d.message for d in app.deployments.values() if d.message) if app else ""
        total, free = map(format_amounts, (ray.cluster_resources(), ray.available_resources()))
        wanted = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
        return (
            f"{config.replicas} engine replica(s) of {format_amounts(wanted)} {failure} "
            f"(engine.start_timeout_s); the cluster has {total}, of which {free} are free. If that is "
            "enough, the machine is busy or the model large: raise engine={'start_timeout_s': ...}. "
            f"{messages}"
        ).strip()
