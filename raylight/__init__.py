"""raylight: train existing AI agents with reinforcement learning on Ray, without changing the agent.

Names are loaded where they are first used, so that importing the package is quick and brings neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylight.agent.attributes import make_link_attributes, make_tag_attributes
    from raylight.agent.decorators import llm_rollout, prompt_rollout, rollout
    from raylight.agent.emit import (
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        get_message_value,
        get_object_value,
    )
    from raylight.agent.hooks import Hook, LoggingHook
    from raylight.agent.litagent import LitAgent
    from raylight.agent.operations import operation
    from raylight.agent.prompts import PromptTemplate
    from raylight.agent.resources import LLM, NamedResources, ProxyLLM
    from raylight.algorithms.apo.algorithm import APO
    from raylight.algorithms.base import Algorithm, FastAlgorithm
    from raylight.algorithms.baseline import Baseline
    from raylight.algorithms.decorator import algo
    from raylight.algorithms.minigrpo.algorithm import MiniGRPO
    from raylight.algorithms.policy import GRPO, PolicyAlgorithm
    from raylight.algorithms.policy_gradient import (
        CISPO,
        DAPO,
        GMPO,
        GPG,
        GSPO,
        OPO,
        PPO,
        RLOO,
        SAPO,
        ClipCov,
        DrGRPO,
        KLCov,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
    )
    from raylight.algorithms.verl import VERL
    from raylight.config import EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
    from raylight.errors import RaylightError
    from raylight.experience.registry import advantage_estimator, policy_loss
    from raylight.log import setup_logging
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreService
    from raylight.traces.adapters import TraceAdapter
    from raylight.traces.agent_framework import AgentFrameworkTracer
    from raylight.traces.messages import TraceToMessages
    from raylight.traces.rewards import (
        find_final_reward,
        find_reward_spans,
        get_reward_value,
        get_rewards_from_span,
        is_reward_span,
    )
    from raylight.traces.tracer import DummyTracer, OtelTracer, Tracer
    from raylight.traces.transcript import transcript
    from raylight.traces.triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToTriplet
    from raylight.trainer.traces import print_traces, read_rollouts
    from raylight.trainer.trainer import Trainer
    from raylight.types import (
        Attempt,
        EnqueueRolloutRequest,
        ResourcesUpdate,
        Rollout,
        RolloutConfig,
        Span,
        SpanCoreFields,
        Triplet,
        Worker,
    )

_ROOMS = {
    "agent.attributes": ("make_link_attributes", "make_tag_attributes"),
    "agent.decorators": ("llm_rollout", "prompt_rollout", "rollout"),
    "agent.emit": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "get_message_value",
        "get_object_value",
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
    "algorithms.minigrpo.algorithm": ("MiniGRPO",),
    "algorithms.policy_gradient": (
        "CISPO",
        "DAPO",
        "GMPO",
        "GPG",
        "GSPO",
        "OPO",
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
    "algorithms.verl": ("VERL",),
    "config": ("EngineConfig", "LearnerConfig", "RunnerConfig", "StoreConfig"),
    "errors": ("RaylightError",),
    "experience.registry": ("advantage_estimator", "policy_loss"),
    "log": ("setup_logging",),
    "store.client": ("StoreClient",),
    "store.service": ("StoreService",),
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
    "traces.tracer": ("DummyTracer", "OtelTracer", "Tracer"),
    "traces.triplets": ("LlmProxyTraceToTriplet", "TraceToTriplet", "TracerTraceToTriplet"),
    "traces.transcript": ("transcript",),
    "trainer.traces": ("print_traces", "read_rollouts"),
    "trainer.trainer": ("Trainer",),
    "types": (
        "Attempt",
        "EnqueueRolloutRequest",
        "ResourcesUpdate",
        "Rollout",
        "RolloutConfig",
        "Span",
        "SpanCoreFields",
        "Triplet",
        "Worker",
    ),
}
_HOMES = {name: f"raylight.{room}" for room, names in _ROOMS.items() for name in names}

__version__ = "0.2.0"
__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "LLM",
    "OPO",
    "PPO",
    "RLOO",
    "SAPO",
    "VERL",
    "AgentFrameworkTracer",
    "Algorithm",
    "Attempt",
    "Baseline",
    "ClipCov",
    "DrGRPO",
    "DummyTracer",
    "EngineConfig",
    "EnqueueRolloutRequest",
    "FastAlgorithm",
    "Hook",
    "KLCov",
    "LearnerConfig",
    "LitAgent",
    "LlmProxyTraceToTriplet",
    "LoggingHook",
    "MiniGRPO",
    "NamedResources",
    "OtelTracer",
    "PolicyAlgorithm",
    "PromptTemplate",
    "ProxyLLM",
    "RaylightError",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RunnerConfig",
    "Span",
    "SpanCoreFields",
    "StoreClient",
    "StoreConfig",
    "StoreService",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTriplet",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "Worker",
    "advantage_estimator",
    "algo",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "make_link_attributes",
    "make_tag_attributes",
    "operation",
    "policy_loss",
    "print_traces",
    "prompt_rollout",
    "read_rollouts",
    "rollout",
    "setup_logging",
    "transcript",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raylight' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
