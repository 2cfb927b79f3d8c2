"""Registry of engines, and the choice of one from the settings.

A built-in engine is one row of `ENGINES`, which also states its capabilities. Any other engine is named by
its dotted name, `package.module:Engine`; what such a class must offer is stated in
`raylight.engines.protocol`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.components import import_dotted_name
from raylight.config import EngineConfig
from raylight.engines.protocol import Engine, EngineSettings
from raylight.errors import ConfigError
from raylight.http.errors import RequestError, error_response

EngineFactory = Callable[..., Engine | Awaitable[Engine]]
"""An engine class or function, called as `factory(settings, **config.args)`; its result may be awaitable."""


@dataclass(frozen=True)
class EngineTraits:
    """Factory and capabilities of an engine. An engine by dotted name has the defaults.

    Attributes:
        factory: dotted name of the class or function that constructs the engine in the replica's process.
        args: names that `EngineConfig.args` may hold.
        check_args: dotted name of a function that checks `EngineConfig.args`, in place of `args`.
        serve_options: dotted name of a function that returns Ray Serve's options of the engine's deployment
            from the `EngineConfig` and the model's folder. None: a replica is one actor with the resources
            of the `EngineConfig`.
        limits_requests: the engine itself answers requests beyond `EngineConfig.max_waiting` with status 503.
        loads_model: it loads a model into this machine's memory, on a CPU or a GPU for each worker.
        process_bytes: host memory of its process without a model.
        memory_arg: argument for the share of a GPU's memory that it reserves when it starts, with a key-value
            cache of a fixed size. None: its cache grows with the sequences, up to `max_concurrent`.
        sleep_arg: argument with which it can free a device's memory while learners compute. None: it cannot.
        weight_names: names of the weights that it receives: of the checkpoint's files, or of the modules.
        vllm_transfer: it receives weights by vLLM's backends, also from GPU to GPU.
        vllm_parsers: vLLM's parsers read a model's tool calls and reasoning, as vLLM's arguments choose.
        vllm_lora: it starts with the layers and the highest rank of adapters, in vLLM's arguments.
        image_package: package without which it loads no model that takes images.
        logprobs_arg: argument for the most log-probs of a token that it returns. None: it has no limit.
        scores_by_sampling: it scores a row of tokens by sampling one more. False: by one pass over the row.
        routes_arg: argument that records the experts of each token. None: it cannot.
        routeless_args: arguments with which it records no experts, or wrong ones.
        routes_every_layer: a token's record has room for the layers without experts.
    """

    factory: str
    args: frozenset[str] = frozenset()
    check_args: str | None = None
    serve_options: str | None = None
    limits_requests: bool = False
    loads_model: bool = False
    process_bytes: int = 620 * 2**20
    memory_arg: str | None = None
    sleep_arg: str | None = None
    weight_names: Literal["checkpoint", "module"] = "module"
    vllm_transfer: bool = False
    vllm_parsers: bool = False
    vllm_lora: bool = False
    image_package: str | None = None
    logprobs_arg: str | None = None
    scores_by_sampling: bool = False
    routes_arg: str | None = None
    routeless_args: tuple[str, ...] = ()
    routes_every_layer: bool = False


ENGINES: dict[str, EngineTraits] = {
    "transformers": EngineTraits(
        "raylight.engines.transformers.engine:build_engine",
        frozenset({"tool_parser", "reasoning", "max_new_tokens"}),
        limits_requests=True,
        loads_model=True,
        routes_arg="record_routes",
    ),
    "vllm": EngineTraits(
        "raylight.engines.vllm.start:start_engine",
        check_args="raylight.engines.vllm.args:check_args",
        serve_options="raylight.engines.vllm.placement:serve_options",
        limits_requests=True,
        loads_model=True,
        process_bytes=1500 * 2**20,
        memory_arg="gpu_memory_utilization",
        sleep_arg="enable_sleep_mode",
        weight_names="checkpoint",
        vllm_transfer=True,
        vllm_parsers=True,
        vllm_lora=True,
        image_package="torchvision",
        logprobs_arg="max_logprobs",
        scores_by_sampling=True,
        routes_arg="enable_return_routed_experts",
        routeless_args=(  # keys and values come back from elsewhere, or each update makes another kernel
            *("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
            *("kv_transfer_config", "kv_offloading_size", "quantization"),
        ),
        routes_every_layer=True,
    ),
    "upstream": EngineTraits("raylight.engines.upstream:build_engine"),
}
METHODS = [name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if name[0] != "_"]


def engine_traits(kind: str) -> EngineTraits:
    """Return the traits of a built-in engine, or of one by dotted name, which is not imported."""
    return ENGINES.get(kind) or EngineTraits(kind)


def model_engines() -> list[str]:
    """Return the names of the engines that load a model."""
    return [name for name, traits in ENGINES.items() if traits.loads_model]


def choose_engine(config: EngineConfig) -> str:
    """Resolve `config.kind` to the name of an engine that is installed.

    Raises:
        ConfigError: the engine does not exist, it is not installed, or it does not accept an entry of
            `config.args`.
    """
    kind = config.kind
    if kind == "auto":
        automatic = "vllm" if config.num_gpus and has_vllm() else "transformers"
        kind = automatic if config.url is None else "upstream"
    if kind not in ENGINES:
        _check_args(kind, config.args, _accepted_args(kind, load_factory(kind)))
        return kind
    if kind == "vllm" and not has_vllm():
        raise ConfigError(
            "vLLM is not installed: pip install 'raylight[vllm]' on a machine with a GPU, and on a CPU as "
            "docs/serving.md describes; or use the transformers engine"
        )
    if check := ENGINES[kind].check_args:
        import_dotted_name(check, "EngineConfig.kind", is_ours=True)(config.args)
    else:
        _check_args(kind, config.args, ENGINES[kind].args)
    return kind


def load_factory(kind: str) -> EngineFactory:
    """Import the class or function that constructs an engine.

    Raises:
        ConfigError: `kind` is neither a built-in engine nor the dotted name of an engine class.
    """
    if kind in ENGINES:
        return import_dotted_name(ENGINES[kind].factory, "EngineConfig.kind", is_ours=True)
    if ":" not in kind and "." not in kind:
        known = ["auto", *ENGINES]
        nearest = ", ".join(difflib.get_close_matches(kind, known, n=3, cutoff=0.5) or known)
        raise ConfigError(
            f"EngineConfig.kind: there is no engine {kind!r}; there are: {nearest}, or the dotted name of a "
            "class, 'package.module:Engine'"
        )
    factory = import_dotted_name(kind, "EngineConfig.kind")
    if not callable(factory):
        raise ConfigError(f"EngineConfig.kind: {kind} is not callable; see raylight.engines.protocol.Engine")
    if isinstance(factory, type):
        _check_methods(kind, factory)
    return factory


async def build_engine(settings: EngineSettings) -> Engine:
    """Construct the engine that `settings.config.kind` names, with the limit of its requests.

    Raises:
        ConfigError: a function returned an object that is not an engine.
    """
    kind = settings.config.kind
    engine = load_factory(kind)(settings, **settings.config.args)
    if isinstance(engine, Awaitable):
        engine = await engine
    _check_methods(kind, engine)
    if engine_traits(kind).limits_requests:
        return engine
    limited: Any = LimitedEngine(engine, settings.config)
    return limited


def _check_methods(kind: str, engine: object) -> None:
    """Raise a ConfigError if an engine, or its class, lacks a method of the protocol."""
    missing = [name for name in METHODS if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(
            f"EngineConfig.kind: {kind} lacks {', '.join(missing)}; see raylight.engines.protocol.Engine"
        )


def has_vllm() -> bool:
    """True if vLLM is installed."""
    package = importlib.util.find_spec("vllm")
    # a folder of the user's may have this name. `find_spec("vllm.v1")` imports vLLM and torch.
    return package is not None and any(
        Path(folder, "v1").is_dir() for folder in package.submodule_search_locations or ()
    )


def _accepted_args(kind: str, factory: EngineFactory) -> frozenset[str] | None:
    """Return the parameters of a factory after its settings; None if it accepts any keyword.

    Raises:
        ConfigError: it has no parameter for the settings.
    """
    parameters = list(inspect.signature(factory).parameters.values())
    if not parameters:
        raise ConfigError(
            f"EngineConfig.kind: {kind} takes no arguments; its first one must be the EngineSettings"
        )
    parameters = parameters[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _check_args(kind: str, args: Mapping[str, object], accepted: frozenset[str] | None) -> None:
    unknown = [name for name in args if accepted is not None and name not in accepted]
    if unknown:
        known = ", ".join(sorted(accepted or ())) or "none"
        raise ConfigError(
            f"EngineConfig.args: the {kind} engine has no argument {unknown[0]!r}; its arguments: {known}"
        )


class LimitedEngine:
    """An engine whose application answers requests beyond a limit with status 503.

    Ray Serve cannot enforce the limit: it also counts requests whose bodies still arrive. Everything but the
    application is the inner engine's.

    Args:
        engine: the engine inside.
        config: its limit is `max_concurrent` + `max_waiting` requests.
    """

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._limit, self._max_waiting = config.max_concurrent + config.max_waiting, config.max_waiting
        self._requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def app(self) -> ASGIApp:
        inner = await self._engine.app()

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") != "POST":  # lists of models, which cost nothing
                await inner(scope, receive, send)
                return
            if self._requests >= self._limit:
                text = f"{self._max_waiting} requests are waiting already; try again later"
                await error_response(RequestError(text, 503, "overloaded_error"))(scope, receive, send)
                return
            self._requests += 1
            try:
                await inner(scope, receive, send)
            finally:
                self._requests -= 1

        return limited
