"""raylight: train existing AI agents with reinforcement learning on Ray, without changing the agent.

Public names are loaded on first use, so that importing the package is quick and loads neither torch nor Ray.
`_EXPORTS` lists the names of `raylight` itself, `_PACKAGE_EXPORTS` the names of its public packages, such as
`raylight.rewards`. After a change, run `python scripts/generate_stubs.py`, which writes the stubs that type
checkers and editors read.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

__version__ = "0.3.0"

_EXPORTS = {
    "agent.decorators": ("llm_rollout", "prompt_rollout", "rollout"),
    "agent.emit": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "emit_state",
        "get_message_value",
        "get_object_value",
        "reward",
    ),
    "agent.hooks": ("Hook", "LoggingHook"),
    "agent.litagent": ("LitAgent",),
    "agent.operations": ("operation",),
    "agent.prompts": ("PromptTemplate",),
    "agent.resources": ("LLM", "NamedResources", "ProxyLLM"),
    "algorithms.apo.algorithm": ("APO",),
    "algorithms.base": ("Algorithm", "FastAlgorithm"),
    "algorithms.baseline": ("Baseline",),
    "algorithms.decorator": ("algo",),
    "algorithms.gepa": ("GEPA",),
    "algorithms.minigrpo": ("MiniGRPO",),
    "algorithms.policy": ("GRPO",),
    "algorithms.policy_gradient": ("OPD", "PPO"),
    "algorithms.supervised": ("DPO", "SFT", "RewardModel"),
    "algorithms.verl": ("VERL",),
    "config": ("EngineConfig", "LearnerConfig", "RunnerConfig", "StoreConfig"),
    "errors": ("RaylightError",),
    "experience.settings.registry": ("advantage_estimator", "policy_loss"),
    "experience.trajectories.transcript": ("transcript",),
    "harnesses.command": ("CommandAgent",),
    "log": ("setup_logging", "setup_module_logging"),
    "runner.local_runner": ("LitAgentRunner",),
    "store.client": ("StoreClient",),
    "store.service": ("StoreService",),
    "tasks.datasets": ("DevTaskLoader",),
    "traces.messages": ("TraceToMessages",),
    "traces.reward_spans": ("find_final_reward", "find_reward_spans", "get_reward_value"),
    "traces.tracer": ("DummyTracer", "OtelTracer"),
    "traces.triplets": ("LlmProxyTraceToTriplet", "TraceToTriplet", "TracerTraceToTriplet"),
    "trainer.output.run_records": ("print_traces", "read_rollouts"),
    "trainer.trainer": ("Trainer",),
    "types": (
        "Attempt",
        "AttemptedRollout",
        "Dataset",
        "EnqueueRolloutRequest",
        "PaginatedResult",
        "Rollout",
        "RolloutConfig",
        "Span",
        "Triplet",
    ),
}
"""Names that `raylight` itself offers, by the module that defines them."""
_PACKAGE_EXPORTS = {
    "agent": {"agent.prompts": ("ResourceUnion",)},
    "algorithms": {
        "algorithms.policy": ("PolicyAlgorithm",),
        "algorithms.policy_gradient": (
            "CISPO",
            "DAPO",
            "DPPO",
            "DRO",
            "GDPO",
            "GMPO",
            "GPG",
            "GSPO",
            "OPO",
            "OTB",
            "GiGPO",
            "RLOO",
            "SAPO",
            "ClipCov",
            "DrGRPO",
            "KLCov",
            "ReMax",
            "ReinforcePlusPlus",
            "ReinforcePlusPlusBaseline",
        ),
        "algorithms.teacher": ("TeacherConfig",),
        "experience.opponents": ("SelfPlay",),
        "experience.settings.policy_settings": ("ModelConfig",),
    },
    "environments": {
        "environments.class_agent": ("environment",),
        "environments.gymnasium": ("gymnasium_agent",),
        "environments.mcp": ("mcp_tools",),
        "environments.openenv": ("openenv_agent",),
        "environments.reasoning_gym": ("ReasoningGym", "reasoning_gym_agent"),
        "environments.text_game": ("seeds",),
        "environments.textarena": ("textarena_agent",),
        "environments.verifiers": ("verifiers_agent",),
    },
    "harnesses": {
        "harnesses.program": ("CommandResult",),
        "harnesses.reward_command": ("RewardCommand",),
    },
    "rewards": {
        "rewards.criteria": ("Criterion", "rubric"),
        "rewards.group": ("GroupRollout",),
        "rewards.process_reward": ("RolloutTurn", "each_turn"),
        "rewards.ranking": ("ruler",),
        "rewards.scoring_model": ("RewardModelConfig", "RewardModelInput", "ScoringModel", "reward_model"),
        "rewards.terms": (
            "RelativeLength",
            "RewardSum",
            "agent_reward",
            "each_rollout",
            "length_penalty",
            "matches",
        ),
    },
    "sandboxes": {
        "sandboxes.registry": ("SandboxSpec",),
        "sandboxes.sandbox": ("ExecResult", "Sandbox", "SandboxLimits", "SandboxProgram"),
    },
    "tasks": {
        "harbor.tasks": ("HarborTasks",),
        "tasks.curriculum": ("Curriculum",),
        "tasks.mixture": ("Mixture",),
        "tasks.stages": ("Stages",),
        "tasks.stream": ("Stream",),
    },
    "traces": {
        "traces.trace_adapter": ("TraceAdapter",),
        "traces.agent_framework": ("AgentFrameworkTracer",),
        "traces.reward_spans": ("get_rewards_from_span", "is_reward_span"),
        "traces.tracer": ("Tracer", "get_active_tracer"),
        "traces.triplets": ("TraceToTripletBase",),
    },
    "types": {
        "types": (
            "Event",
            "Link",
            "OtelResource",
            "ResourcesUpdate",
            "RolloutMode",
            "RolloutState",
            "RolloutStatus",
            "SpanContext",
            "SpanCoreFields",
            "TraceStatus",
            "Worker",
        ),
    },
}
"""Names that only the public packages offer, by package and defining module.

A package also offers the names of `raylight` that it defines. Version 0.2 had all names in `raylight`, where
they are still found, with a warning, until 1.0.
"""
_SUBMODULES = {name: name for name in (*_PACKAGE_EXPORTS, "quickstart")} | {
    "advantages": "experience.settings.advantages",
    "losses": "experience.settings.losses",
}
"""Public modules and packages, by name."""


def _modules_of(package: str) -> dict[str, str]:
    """Return the public names of a package, such as "rewards", by name with their modules."""
    inner = {n: m for n, m in _MODULE_OF.items() if f"{m}.".startswith(f"{__name__}.{package}.")}
    return inner | _by_name(_PACKAGE_EXPORTS[package])


def _by_name(exports: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: f"{__name__}.{module}" for module, names in exports.items() for name in names}


_MODULE_OF = _by_name(_EXPORTS)
_PACKAGE_OF = {
    name: package
    for package, exports in _PACKAGE_EXPORTS.items()
    for names in exports.values()
    for name in names
    if name not in _MODULE_OF
}

__all__ = sorted(_MODULE_OF)


def _lazy_names(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a public package, for its `__init__.py`."""
    modules = _modules_of(package.removeprefix(f"{__name__}."))

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return sorted(modules), load, lambda: sorted(modules)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{_SUBMODULES[name]}")
    if (package := _PACKAGE_OF.get(name)) is not None:
        warnings.warn(
            f"{__name__}.{name} is now {__name__}.{package}.{name}; the old name works until 1.0",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(f"{__name__}.{package}"), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
