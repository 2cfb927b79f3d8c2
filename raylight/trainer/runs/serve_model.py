"""`raylight serve`: a served model without a run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from raylight._utils.no_proxy import LOOPBACK
from raylight.config import EngineConfig
from raylight.engines.model_report import report_model
from raylight.engines.registry import engine_traits
from raylight.trainer.cluster_fit.cluster_settings import fit_fixed
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.components.served_model import ServedModel, ServingContext
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import component_stack, until_lost, watch_loss
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.spec.inputs import fixed_model
from raylight.trainer.spec.settings import ServingSettings


def serve_model(
    model: str,
    config: EngineConfig,
    *,
    name: str | None = None,
    api_key: str | None = None,
    address: str | None = None,
    seed: int = 0,
    show: Callable[[str], None] = print,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM, then stop everything that was started.

    Args:
        model: folder, name in the local Hugging Face cache, or the upstream's name.
        name: model name that clients send; by default the upstream's name, or the last part of `model`.
        api_key: key that clients must send. None: no key on loopback, and a new key, which is shown, on other
            interfaces.
        show: receives messages for the user.

    Raises:
        ConfigError: the engine is not installed, or its settings are wrong.
        EngineStartError: the replicas did not start.
    """
    serving = fixed_model(model, config)
    default_name = model if not serving.model_path else model.rstrip("/").rpartition("/")[2]
    if api_key is None and config.host not in (None, *LOOPBACK):
        api_key = f"rl-{secrets.token_hex(20)}"
        show(f"the API key is {api_key}")
    engine = serving.engine.model_copy(update={"host": config.host or "127.0.0.1"})
    # the route / if no other application has it
    with ray_session(address, False, config.start_timeout_s) as connection:
        connection.announce(show, show)
        serving = replace(serving, engine=engine, name=name or default_name, route="/")
        serving, notes = fit_fixed(serving, config, ClusterFacts())
        for note in notes:
            show(note)
        context = ServingContext(f"serve-{secrets.token_hex(4)}", api_key, show, connection.owns_cluster)
        work = _serve(serving, context, seed)
        run_blocking(until_lost(work, "Start the command again"), watch_loss("Start the command again"))


def describe_model(path: str, config: EngineConfig) -> list[str]:
    """Return lines on the model as the engine reads it, and on what is missing; none of other engines."""
    if not engine_traits(config.kind).loads_model:
        return []
    report = report_model(path, config.kind, config.args)
    limit = min(config.max_model_len, report.context_length or config.max_model_len)
    rows = report.rows() | {"context length": f"{limit} tokens"}
    line = "; ".join(f"{name}: {value}" for name, value in rows.items())
    return [line, *(f"note: {problem}; {remedy}" for problem, remedy in report.remedies().items())]


async def _serve(model: ServingSettings, context: ServingContext, seed: int) -> None:
    show = context.show_stage
    async with component_stack() as stack:
        served = ServedModel(context, model)
        await served.open(stack)
        served.prepare(seed)
        show(f"starting the {model.engine.kind} engine")
        # imports transformers meanwhile
        described = asyncio.to_thread(describe_model, model.model_path, model.engine)
        url, lines = await asyncio.gather(served.start(), described)
        for line in lines:
            show(line)
        show(f"{model.name} is served at {url}/v1 (also {url}/health); press Ctrl-C to stop")
        await asyncio.Event().wait()
