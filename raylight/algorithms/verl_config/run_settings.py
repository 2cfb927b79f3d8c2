"""Settings of a run, combined from a resolved configuration and the Trainer's arguments."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, TypeVar

from raylight.algorithms.policy import RunSettings
from raylight.algorithms.verl_config.converters import ROLLOUT
from raylight.algorithms.verl_config.resolution import Resolution
from raylight.base_config import Config
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig
from raylight.engines.registry import has_vllm
from raylight.errors import ConfigError
from raylight.types import JsonObject

LEARNER_GPU_SHARE, ENGINE_GPU_SHARE = 0.6, 0.4
"""GPU fractions of a learner and of an engine's worker, which share a GPU as in verl. Every GPU has a
learner, so that no two workers fit on one."""
GPU_ONLY_ARGS = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_sleep_mode")
"""Arguments of vLLM that have no meaning on a CPU."""
RUN_LOGGERS = ("console", "jsonl", "plot")
"""Loggers that every run of a configuration has."""
TRACKERS = frozenset({"wandb", "mlflow", "tensorboard", "trackio", "swanlab", "clearml"})
"""Trackers of verl that raylight has too: names of their Python packages and of raylight's extras."""
C = TypeVar("C", bound=Config)


def combine_settings(resolution: Resolution, trainer: RunSettings, strict: bool) -> RunSettings:
    """Return the settings of a run.

    Args:
        trainer: the Trainer's settings, which override verl's defaults.
        strict: True if a missing vLLM is an error; otherwise the transformers engine replaces it.

    Raises:
        ConfigError: the configuration and the Trainer contradict each other, or vLLM is not installed.
    """
    engine, notes = _engine_settings(resolution, strict)
    loggers, logger_notes = _loggers(resolution, strict)
    if loggers is not None and trainer.loggers is not None:
        _check_not_set(resolution, "run.loggers", loggers, trainer.loggers, "loggers")
    learner = resolution.section("learner") | {"num_gpus": LEARNER_GPU_SHARE}
    gpu_note = (
        f"learners and engines share GPUs, as in verl: {LEARNER_GPU_SHARE} of a GPU per learner, "
        f"{ENGINE_GPU_SHARE} per engine worker"
    )
    common = replace(
        trainer,
        checkpoint=_merge_section(
            resolution, "checkpoint", CheckpointConfig, resolution.section("checkpoint"), trainer.checkpoint
        ),
        seed=_merge_value("seed", resolution, "run.seed", trainer.seed),
        output_dir=_merge_value("output_dir", resolution, "run.folder", trainer.output_dir),
        outputs=resolution.get("run.parent") or trainer.outputs,
        loggers=loggers if trainer.loggers is None else trainer.loggers,
        notes=(*trainer.notes, *notes, *logger_notes),
    )
    cpu_engine, cpu_learner, cpu_note = _cpu_settings(engine, learner)
    on_cpus = replace(
        common,
        engine=_merge_section(resolution, "engine", EngineConfig, cpu_engine, trainer.engine),
        learner=_merge_section(resolution, "learner", LearnerConfig, cpu_learner, trainer.learner),
        notes=(*common.notes, cpu_note),
    )
    if resolution.get("run.device") == "cpu":
        return on_cpus
    return replace(
        common,
        engine=_merge_section(resolution, "engine", EngineConfig, engine, trainer.engine),
        learner=_merge_section(resolution, "learner", LearnerConfig, learner, trainer.learner),
        notes=(*common.notes, gpu_note),
        cpu_fallback=None if resolution.get("run.device") == "cuda" else on_cpus,
    )


def _engine_settings(resolution: Resolution, strict: bool) -> tuple[JsonObject, list[str]]:
    """Return the engine's settings on a GPU, and notes for the user."""
    engine = resolution.section("engine") | {"num_gpus": ENGINE_GPU_SHARE}
    if engine.get("kind") != "vllm":
        return engine, []
    if engine.get("sleep_while_learning"):
        engine["args"] = {"enable_sleep_mode": True} | engine.get("args", {})
    if has_vllm():
        return engine, []
    if strict:
        raise ConfigError(
            f"{ROLLOUT}.name is vllm, which is not installed: pip install 'raylight[vllm]' on a machine with "
            "a GPU, or follow docs/serving.md on a CPU; or set it to hf, raylight's transformers engine"
        )
    engine = {name: value for name, value in engine.items() if name != "args"} | {
        "kind": "auto",
        "sleep_while_learning": False,
    }
    return engine, [
        f"vLLM is not installed: the transformers engine serves the model, and other keys of {ROLLOUT} for "
        "vLLM are ignored"
    ]


def _cpu_settings(engine: JsonObject, learner: JsonObject) -> tuple[JsonObject, JsonObject, str]:
    """Return the engine's and the learner's settings for a cluster without GPUs, and a note for the user."""
    args = {name: value for name, value in engine.get("args", {}).items() if name not in GPU_ONLY_ARGS}
    cpu = {"num_gpus": 0, "replicas": 1, "sleep_while_learning": False}
    note = (
        f"no GPU: trainer.n_gpus_per_node x trainer.nnodes = {learner['n']} learner ranks run on CPUs, with "
        f"one engine; ignored: {', '.join(GPU_ONLY_ARGS)}, ulysses"
    )
    return engine | cpu | {"args": args}, learner | {"num_gpus": 0, "ulysses": 1}, note


def _merge_section(resolution: Resolution, section: str, cls: type[C], values: JsonObject, trainer: C) -> C:
    """Return a section's settings: the Trainer's, and the configuration's where the Trainer has none.

    Raises:
        ConfigError: the user set a setting in both, to different values.
    """
    merged = {name: getattr(trainer, name) for name in trainer.model_fields_set}
    validated = cls(**values)
    for name in values:
        value = getattr(validated, name)
        if name == "args":
            merged["args"] = _merge_args(resolution, value, merged.get("args", {}))
        elif name not in merged:
            merged[name] = value
        elif merged[name] != value:
            _check_not_set(resolution, f"{section}.{name}", value, merged[name])
    return cls(**merged)


def _merge_args(resolution: Resolution, args: JsonObject, trainer_args: JsonObject) -> JsonObject:
    for name in args.keys() & trainer_args.keys():
        if args[name] != trainer_args[name]:
            _check_not_set(resolution, f"engine.args.{name}", args[name], trainer_args[name])
    return args | trainer_args


def _merge_value(argument: str, resolution: Resolution, target: str, trainer_value: object) -> Any:
    """Return the Trainer's value of a setting, or else the configuration's."""
    value = resolution.get(target)
    if value is not None and trainer_value is not None and str(value) != str(trainer_value):
        _check_not_set(resolution, target, value, trainer_value, argument)
    return trainer_value if trainer_value is not None else value


def _check_not_set(
    resolution: Resolution, target: str, value: object, trainer_value: object, argument: str = ""
) -> None:
    """Raise ConfigError if the value that the Trainer overrides is the user's and not verl's default."""
    setting = resolution.settings.get(target)
    if setting is not None and setting.from_user:
        raise ConfigError(
            f"the Trainer has {argument or target}={trainer_value!r}, and the configuration has "
            f"{setting.key}={value!r}; remove one"
        )


def _loggers(resolution: Resolution, strict: bool) -> tuple[list[object] | None, list[str]]:
    """Return the loggers of a run, or None if the configuration has no tracker, and notes for the user."""
    trackers = resolution.get("run.loggers") or []
    used, problems = [], []
    for tracker in trackers:
        name = tracker["type"]
        if name not in TRACKERS:
            problems.append(f"{name} is not supported")
        elif importlib.util.find_spec(name) is not None:
            used.append(tracker)
        elif strict:
            raise ConfigError(
                f"trainer.logger: {name} is not installed; pip install 'raylight[{name}]', or leave it out"
            )
        else:
            problems.append(f"{name} is not installed (pip install 'raylight[{name}]')")
    notes = [
        f"trainer.logger: {problem} and receives no metrics; they are in metrics.jsonl of the run directory"
        for problem in problems
    ]
    return [*RUN_LOGGERS, *used] if used else None, notes
