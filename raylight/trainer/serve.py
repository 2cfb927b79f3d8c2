"""`raylight serve`: a model on its own, without a run around it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import ray

from raylight.config import EngineConfig
from raylight.engines.registry import choose_engine
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.ingress import LOOPBACK, serve_http_options
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.trainer.blocking import run_blocking
from raylight.trainer.cluster import ray_session
from raylight.trainer.inputs import resolve_model
from raylight.weight_sync.coordinator import start_coordinator


def serve_model(
    model: str,
    config: EngineConfig,
    *,
    name: str | None = None,
    api_key: str | None = None,
    address: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM, and leave nothing behind.

    Args:
        model: a folder, a name in the local Hugging Face cache, or the upstream's name.
        name: under which clients ask for it; the upstream's name, or the last part of `model`, by default.
        api_key: what clients must send. None: nothing on loopback, and a fresh key, which is told, on any other interface.

    Raises:
        ConfigError: the engine is not installed, or the settings do not fit.
        EngineStartError: the replicas did not come up.
    """
    kind = choose_engine(config)
    if kind == "upstream":
        path, name = "", name or model
        config = config.model_copy(update={"upstream_model": config.upstream_model or model})
    else:
        path, name = resolve_model(model), name or model.rstrip("/").rpartition("/")[2]
    if api_key is None and config.host not in (None, *LOOPBACK):
        api_key = f"rl-{secrets.token_hex(20)}"
        say(f"the API key is {api_key}")
    host = config.host or "127.0.0.1"
    config = config.model_copy(update={"kind": kind, "host": host})
    with ray_session(address, log_to_driver=False) as connection:
        run_blocking(_serve(path, name, config, api_key, seed, connection.local, say))


async def _serve(
    path: str,
    name: str,
    config: EngineConfig,
    secret: str | None,
    seed: int,
    cluster_ends: bool,
    say: Callable[[str], None],
) -> None:
    app_name = f"serve-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as stack:
        coordinator = start_coordinator(app_name)
        stack.callback(ray.kill, coordinator)
        spec = ReplicaSettings(
            app_name=app_name,
            route=None if serve_http_options() else "/",
            model_path=path,
            model=name,
            config=config,
            secret=secret,
            seed=seed,
            store=None,
            coordinator=coordinator,
        )
        deployment = Deployment(spec, cluster_ends)
        stack.push_async_callback(deployment.stop)
        say(f"starting the {config.kind} engine")
        url = await deployment.start()
        say(f"{name} answers at {url}/v1 (also {url}/health and {url}/metrics); Ctrl-C ends it")
        await asyncio.Event().wait()
