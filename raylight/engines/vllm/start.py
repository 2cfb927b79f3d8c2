"""Start of vLLM in a replica's process, by the engine class of `ray.serve.llm`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from raylight.log import kept_root_logger

with kept_root_logger():  # the import prints the messages of all libraries as JSON
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
    from ray.serve.llm import LLMConfig

from raylight.engines.protocol import EngineSettings
from raylight.engines.start_stages import note_stage
from raylight.engines.vllm.args import model_style, vllm_args
from raylight.engines.vllm.cache_connectors import check_connectors
from raylight.engines.vllm.engine import VllmEngine
from raylight.engines.vllm.placement import Placement, environment, place
from raylight.types import JsonObject
from raylight.weights.transports import vllm_backend


class CapturingVLLMEngine(VLLMEngine):
    """Ray's vLLM engine; its client is wrapped for capture before the client's event loop runs."""

    captured: VllmEngine

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> object:
        parallel = config.parallel_config
        if config.device_config.device_type != "cpu" and parallel.distributed_executor_backend == "mp":
            # Ray asks for a process per worker where it places none. vLLM on a CPU needs it.
            parallel.distributed_executor_backend = "uni"
        client = super()._start_async_llm_engine(args, config, placement_group)
        self.captured = VllmEngine(client, self.build_asgi_app, self.llm_config.model_id)
        return client


async def start_engine(settings: EngineSettings, **args: Any) -> VllmEngine:
    """Start vLLM, and return it once its weights are loaded.

    Args:
        args: the user's arguments of vLLM.

    Raises:
        ConfigError: an argument does not fit.
    """
    config, path = settings.config, settings.model_path
    if config.weight_transfer != "auto":  # there are learners
        check_connectors(args.get("kv_transfer_config"))
    built = vllm_args(
        path,
        args,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_concurrent=config.max_concurrent,
        max_waiting=config.max_waiting,
        seed=settings.seed,
        gpus=config.num_gpus,
        max_adapters=config.max_adapters,
        backend=vllm_backend(config.weight_transfer),
    )
    llm = llm_config(path, settings.model, built, place(config), environment(config, path))
    vllm = CapturingVLLMEngine(llm)
    note_stage("starting vLLM's core")
    await vllm.start()
    engine = vllm.captured
    if template := model_style(path, args.get("chat_template")).template:
        # conversations must be continued with the template that vLLM renders with
        engine.tokenizer = copy.copy(engine.tokenizer)
        engine.tokenizer.chat_template = template
    return engine


def llm_config(
    path: str, model: str, args: Mapping[str, object], placement: Placement, env: Mapping[str, str]
) -> LLMConfig:
    """Return the settings with which Ray starts vLLM in a placement.

    Args:
        args: result of `vllm_args`.
        env: environment of the workers.
    """
    runs_here = placement.actor_gpus > 0 or not any("GPU" in bundle for bundle in placement.bundles)
    settings: JsonObject = {
        "model_loading_config": {"model_id": model, "model_source": path},
        # Ray's kind "cpu" means: no Ray executor, and no task that looks at a GPU before the engine starts
        "accelerator_config": {"kind": "cpu"} if runs_here else None,
        "placement_group_config": {
            "bundles": [
                {name: amount for name, amount in bundle.items() if name != "GPU" or not runs_here}
                for bundle in placement.bundles
            ],
            "strategy": placement.strategy,
        },
        "engine_kwargs": dict(args),
        "runtime_env": {"env_vars": dict(env)},
    }
    return LLMConfig(**settings)
