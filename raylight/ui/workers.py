"""The runners, replicas and learners of a run: what each does now."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, defaultdict
from urllib.parse import urlsplit

import psutil

from raylight._utils.no_proxy import LOOPBACK, bypass_proxies
from raylight.store.reading import StoreReader
from raylight.types import JsonObject
from raylight.ui.run_folder import RunFolder

DASHBOARD_TIMEOUT_S = 2
MAX_ACTORS = 10_000
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
DASHBOARD_PROGRAM = os.path.join("ray", "dashboard", "dashboard.py")


class DashboardError(Exception):
    """Reason why the actors are not known."""


async def show_workers(store: StoreReader, folder: RunFolder) -> JsonObject:
    """Return the runners in the store, and the actors of the run, if its cluster still runs."""
    is_running = folder.status() == "running"
    runners = [
        {
            "id": worker.worker_id,
            "status": worker.status if is_running else "ended",
            "rollout": worker.current_rollout_id if is_running else None,
            "last_heartbeat": worker.last_heartbeat_time,
            "last_busy": worker.last_busy_time,
            "stats": worker.heartbeat_stats if is_running else None,
        }
        for worker in await store.query_workers()
    ]
    run = folder.section("run")
    dashboard = run.get("dashboard")
    shown: JsonObject = {"ray_dashboard": dashboard, "runners": runners, "actors": None, "note": None}
    if not is_running:
        return shown | {"ray_dashboard": None, "note": "the run has ended; its actors are gone"}
    if not dashboard:
        return shown | {"note": "the run has not recorded the address of Ray's dashboard"}
    try:
        await asyncio.to_thread(check_own, dashboard)
        actors = await asyncio.to_thread(read_actors, dashboard, str(run.get("name") or ""))
    except DashboardError as error:
        return shown | {"note": f"Ray's dashboard at {dashboard} cannot be read: {error}"}
    return shown | {"actors": actors}


def check_own(dashboard: object) -> None:
    """Check that a dashboard belongs to a cluster of this user, which may receive Ray's token.

    The address is from `config.yaml`, which may be a stranger's. It must equal RAY_API_SERVER_ADDRESS or
    RAY_ADDRESS, or belong to a dashboard on this machine that runs as this user.

    Raises:
        DashboardError: it is another one.
    """
    try:
        scheme, host, port = wanted = _origin(str(dashboard))
    except ValueError as error:
        raise DashboardError(f"it is not an address: {error}") from None
    for given in filter(None, map(os.environ.get, ADDRESS_VARIABLES)):
        with contextlib.suppress(ValueError):
            if _origin(given) == wanted:
                return
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    is_here = host in LOOPBACK or host in own
    if scheme != "http" or not is_here or port not in _dashboard_ports():
        raise DashboardError(
            "it is not known as the dashboard of a cluster of yours, which may receive Ray's token; set "
            f"{ADDRESS_VARIABLES[0]} to this address if it is"
        )


def _origin(address: str) -> tuple[str, str, int | None]:
    """Return the scheme, host and port of an address.

    Raises:
        ValueError: it has no scheme, as Ray's "auto" and HOST:PORT, or no host. They would all be equal.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it does not begin with http:// or https:// and a host")
    return parts.scheme, parts.hostname, parts.port


def _dashboard_ports() -> set[int]:
    """Return the ports on which dashboards of this user listen on this machine."""
    ports: set[int] = set()
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, command = process.info["uids"], process.info["cmdline"] or []
        if uids is not None and uids.real == os.getuid() and DASHBOARD_PROGRAM in " ".join(command):
            with contextlib.suppress(psutil.Error):
                listening = process.net_connections("tcp")
                ports |= {one.laddr.port for one in listening if one.status == psutil.CONN_LISTEN}
    return ports


def read_actors(dashboard: str, namespace: str) -> list[JsonObject]:
    """Return the actors of a run, each with the numbers of its methods that run now.

    Raises:
        DashboardError: the dashboard did not answer, or refused to.
    """
    # loads Ray, which only this page needs
    from ray.exceptions import AuthenticationError
    from ray.util.state import list_actors, list_tasks
    from ray.util.state.exception import RayStateApiException, ServerUnavailable

    bypass_proxies([urlsplit(dashboard).hostname])  # Ray's clients have no setting for it
    try:
        listed = list_actors(address=dashboard, limit=MAX_ACTORS, timeout=DASHBOARD_TIMEOUT_S, detail=True)
        calls = list_tasks(
            address=dashboard,
            filters=[("state", "=", "RUNNING"), ("type", "=", "ACTOR_TASK")],
            limit=MAX_ACTORS,
            timeout=DASHBOARD_TIMEOUT_S,
            raise_on_missing_output=False,
        )
    except AuthenticationError:
        raise DashboardError(
            "the cluster has a token; start `raylight ui` with RAY_AUTH_MODE=token in its environment"
        ) from None
    except ServerUnavailable:
        raise DashboardError("it does not answer") from None
    except (RayStateApiException, OSError, RuntimeError, ValueError) as error:
        raise DashboardError(str(error)) from error
    tasks: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
    for call in calls:
        tasks[call.actor_id][call.name.rpartition(".")[2]] += 1
    return [
        {
            "id": actor.actor_id,
            "name": actor.name,
            "class": actor.class_name,
            "state": actor.state,
            "node": actor.node_id,
            "pid": actor.pid,
            "tasks": dict(tasks[actor.actor_id].most_common()),
            "link": f"{dashboard}/#/actors/{actor.actor_id}",
        }
        for actor in listed
        if actor.ray_namespace == namespace or (namespace and namespace in (actor.name or ""))
    ]
