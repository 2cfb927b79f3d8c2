"""What users write with: agents, the resources they are given, emitters and hooks."""

from raylight.agent.attributes import make_link_attributes, make_tag_attributes
from raylight.agent.decorators import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from raylight.agent.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    get_message_value,
    get_object_value,
)
from raylight.agent.hooks import Hook, HookSet, LoggingHook
from raylight.agent.litagent import LitAgent, RolloutResult
from raylight.agent.operations import operation
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, NamedResources, ProxyLLM, Resource

__all__ = [
    "LLM",
    "FunctionalLitAgent",
    "Hook",
    "HookSet",
    "LitAgent",
    "LoggingHook",
    "NamedResources",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "RolloutResult",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "get_message_value",
    "get_object_value",
    "llm_rollout",
    "make_link_attributes",
    "make_tag_attributes",
    "operation",
    "prompt_rollout",
    "rollout",
]
