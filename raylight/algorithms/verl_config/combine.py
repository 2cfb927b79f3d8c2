"""A resolved configuration and what the Trainer was given beside it, as one set of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from raylight.algorithms.policy import RunSettings
from raylight.algorithms.verl_config.convert import ROLLOUT
from raylight.algorithms.verl_config.resolve import Resolution
from raylight.config import CheckpointConfig, Config, EngineConfig, LearnerConfig
from raylight.errors import ConfigError
from raylight.serving.deploy.choose import has_vllm

LEARNER_SHARE, ENGINE_SHARE = 0.6, 0.4
"""What a learner and an engine's worker ask of the GPU that they share, as verl's do: two of a kind never meet on one."""
ONLY_ON_GPUS = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_sleep_mode")
"""Arguments of vLLM that mean nothing on a CPU."""
C = TypeVar("C", bound=Config)


def combine(resolution: Resolution, given: RunSettings, strict: bool) -> RunSettings:
    """Settings of a run.

    Args:
        given: the Trainer's own; these count where the configuration has only verl's default.
        strict: whether it is an error that the engine is not installed; otherwise another takes its place.

    Raises:
        ConfigError: the configuration and the Trainer say different things, or vLLM is not installed.
    """
    engine, notes = _engine(resolution, strict)
    learner = resolution.section("learner") | {"num_gpus": LEARNER_SHARE}
    gpu_note = "learners and engines share GPUs, as in verl (a learner asks for 0.6 of one, an engine's worker for 0.4)"
    common = replace(
        given,
        checkpoint=_over(
            resolution, "checkpoint", CheckpointConfig, resolution.section("checkpoint"), given.checkpoint
        ),
        seed=_one("seed", resolution, "run.seed", given.seed),
        output_dir=_one("output_dir", resolution, "run.folder", given.output_dir),
        outputs=resolution.get("run.parent") or given.outputs,
        notes=(*given.notes, *notes, *_logger_notes(resolution)),
    )
    cpu_engine, cpu_learner, cpu_note = _on_cpus(engine, learner)
    on_cpus = replace(
        common,
        engine=_over(resolution, "engine", EngineConfig, cpu_engine, given.engine),
        learner=_over(resolution, "learner", LearnerConfig, cpu_learner, given.learner),
        notes=(*common.notes, cpu_note),
    )
    if resolution.get("run.device") == "cpu":
        return on_cpus
    return replace(
        common,
        engine=_over(resolution, "engine", EngineConfig, engine, given.engine),
        learner=_over(resolution, "learner", LearnerConfig, learner, given.learner),
        notes=(*common.notes, gpu_note),
        cpu_fallback=None if resolution.get("run.device") == "cuda" else on_cpus,
    )


def _engine(resolution: Resolution, strict: bool) -> tuple[dict[str, Any], list[str]]:
    """The engine's settings on a GPU, and what to say of them."""
    engine = resolution.section("engine") | {"num_gpus": ENGINE_SHARE}
    if engine.get("kind") != "vllm":
        return engine, []
    if engine.get("sleep_while_learning"):
        engine["args"] = {"enable_sleep_mode": True} | engine.get("args", {})
    if has_vllm():
        return engine, []
    if strict:
        raise ConfigError(
            f"{ROLLOUT}.name is vllm, which is not installed: pip install 'raylight[vllm]' on a machine with a GPU, and on a CPU "
            "as docs/serving.md tells; or say hf there, which is raylight's transformers engine"
        )
    engine = {name: value for name, value in engine.items() if name != "args"} | {
        "kind": "auto",
        "sleep_while_learning": False,
    }
    return engine, [
        f"vLLM is not installed, so that the transformers engine serves and the rest of {ROLLOUT} is left out"
    ]


def _on_cpus(engine: dict[str, Any], learner: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The same settings for a cluster without GPUs."""
    args = {name: value for name, value in engine.get("args", {}).items() if name not in ONLY_ON_GPUS}
    cpu = {"num_gpus": 0, "replicas": 1, "sleep_while_learning": False}
    note = (
        f"no GPU: trainer.n_gpus_per_node x trainer.nnodes = {learner['n']} learner ranks compute on CPUs, with one engine; "
        f"left out: {', '.join(ONLY_ON_GPUS)}, ulysses"
    )
    return engine | cpu | {"args": args}, learner | {"num_gpus": 0, "ulysses": 1}, note


def _over(resolution: Resolution, section: str, cls: type[C], ours: dict[str, Any], given: C) -> C:
    """The configuration's settings over the Trainer's, where both are free to say something."""
    settings = {name: getattr(given, name) for name in given.model_fields_set}
    own = cls(**ours)
    for name in ours:
        value = getattr(own, name)
        if name == "args":
            settings["args"] = _args(resolution, value, settings.get("args", {}))
        elif name not in settings:
            settings[name] = value
        elif settings[name] != value:
            _must_be_free(resolution, f"{section}.{name}", value, settings[name])
    return cls(**settings)


def _args(resolution: Resolution, ours: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for name in ours.keys() & given.keys():
        if ours[name] != given[name]:
            _must_be_free(resolution, f"engine.args.{name}", ours[name], given[name])
    return ours | given


def _one(argument: str, resolution: Resolution, target: str, given: Any) -> Any:
    """The Trainer's value of a setting, or else the configuration's."""
    ours = resolution.get(target)
    if ours is not None and given is not None and str(ours) != str(given):
        _must_be_free(resolution, target, ours, given, argument)
    return given if given is not None else ours


def _must_be_free(resolution: Resolution, target: str, ours: Any, given: Any, argument: str = "") -> None:
    """
    Raises:
        ConfigError: the configuration itself says it, and not only verl's default.
    """
    found = resolution.found.get(target)
    if found is not None and found.given:
        raise ConfigError(
            f"the Trainer says {argument or target}={given!r}, and {found.key} in the configuration {ours!r}; give it once"
        )


def _logger_notes(resolution: Resolution) -> list[str]:
    names = resolution.get("run.loggers")
    return (
        [
            f"trainer.logger: {', '.join(names)} gets nothing; metrics are in metrics.jsonl of the run directory"
        ]
        if names
        else []
    )
