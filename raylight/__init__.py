"""raylight: train existing AI agents with reinforcement learning on Ray, without changing the agent.

Public names are loaded on first use, so that importing the package is quick and loads neither torch nor Ray.
`_EXPORTS` is the one list of them. After changing it, run `python scripts/generate_stubs.py`, which writes
the stubs that type checkers and editors read.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_EXPORTS = {
    "agent.decorators": ("llm_rollout", "prompt_rollout", "rollout"),
    "agent.emit": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "get_message_value",
        "get_object_value",
        "reward",
    ),
    "agent.hooks": ("Hook", "LoggingHook"),
    "agent.litagent": ("LitAgent",),
    "agent.operations": ("operation",),
    "agent.prompts": ("PromptTemplate", "ResourceUnion"),
    "agent.resources": ("LLM", "NamedResources", "ProxyLLM"),
    "algorithms.apo.algorithm": ("APO",),
    "algorithms.base": ("Algorithm", "FastAlgorithm"),
    "algorithms.baseline": ("Baseline",),
    "algorithms.decorator": ("algo",),
    "algorithms.gepa.algorithm": ("GEPA",),
    "algorithms.minigrpo": ("MiniGRPO",),
    "algorithms.policy_gradient": (
        "CISPO",
        "DAPO",
        "DPPO",
        "DRO",
        "GDPO",
        "GMPO",
        "GPG",
        "GSPO",
        "OPD",
        "OPO",
        "OTB",
        "PPO",
        "RLOO",
        "SAPO",
        "ClipCov",
        "DrGRPO",
        "KLCov",
        "ReMax",
        "ReinforcePlusPlus",
        "ReinforcePlusPlusBaseline",
    ),
    "algorithms.policy": ("GRPO", "PolicyAlgorithm"),
    "algorithms.supervised": ("DPO", "SFT"),
    "algorithms.teacher": ("TeacherConfig",),
    "algorithms.verl": ("VERL",),
    "config": ("EngineConfig", "LearnerConfig", "RunnerConfig", "StoreConfig"),
    "environments.environment": ("environment",),
    "environments.gymnasium_agent": ("gymnasium_agent",),
    "environments.mcp": ("mcp_tools",),
    "environments.openenv": ("openenv_agent",),
    "environments.reasoning_gym": ("ReasoningGym",),
    "environments.reasoning_gym_agent": ("reasoning_gym_agent",),
    "environments.text_game": ("seeds",),
    "environments.textarena_agent": ("textarena_agent",),
    "environments.verifiers": ("verifiers_agent",),
    "errors": ("RaylightError",),
    "experience.registry": ("advantage_estimator", "policy_loss"),
    "experience.transcript": ("transcript",),
    "log": ("setup_logging", "setup_module_logging"),
    "rewards.group": ("GroupRollout",),
    "rewards.reward_model": ("RewardModelInput", "RewardModel", "RewardModelConfig", "reward_model"),
    "rewards.rubric": ("Criterion", "rubric"),
    "rewards.ruler": ("ruler",),
    "rewards.terms": (
        "RelativeLength",
        "RewardSum",
        "agent_reward",
        "each_rollout",
        "length_penalty",
        "matches",
    ),
    "runner.local_runner": ("LitAgentRunner",),
    "harbor.tasks": ("HarborTasks",),
    "harnesses.command": ("CommandAgent",),
    "harnesses.program": ("CommandResult",),
    "harnesses.rewards": ("RewardCommand",),
    "sandboxes.registry": ("SandboxSpec",),
    "sandboxes.sandbox": ("ExecResult", "Sandbox", "SandboxLimits"),
    "store.client": ("StoreClient",),
    "store.service": ("StoreService",),
    "tasks.dev_loader": ("DevTaskLoader",),
    "tasks.curriculum": ("Curriculum",),
    "tasks.mixture": ("Mixture",),
    "tasks.stages": ("Stages",),
    "tasks.stream": ("Stream",),
    "traces.adapters": ("TraceAdapter",),
    "traces.agent_framework": ("AgentFrameworkTracer",),
    "traces.messages": ("TraceToMessages",),
    "traces.rewards": (
        "find_final_reward",
        "find_reward_spans",
        "get_reward_value",
        "get_rewards_from_span",
        "is_reward_span",
    ),
    "traces.tracer": ("DummyTracer", "OtelTracer", "Tracer", "get_active_tracer"),
    "traces.triplets": (
        "LlmProxyTraceToTriplet",
        "TraceToTriplet",
        "TraceToTripletBase",
        "TracerTraceToTriplet",
    ),
    "trainer.run_records": ("print_traces", "read_rollouts"),
    "trainer.trainer": ("Trainer",),
    "types": (
        "Attempt",
        "AttemptedRollout",
        "Dataset",
        "EnqueueRolloutRequest",
        "Event",
        "Link",
        "OtelResource",
        "PaginatedResult",
        "ResourcesUpdate",
        "Rollout",
        "RolloutConfig",
        "RolloutMode",
        "RolloutState",
        "RolloutStatus",
        "Span",
        "SpanContext",
        "SpanCoreFields",
        "TraceStatus",
        "Triplet",
        "Worker",
    ),
}
"""Public names by the module that defines them."""
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}

_SUBMODULES = ("quickstart",)
"""Public modules."""

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
