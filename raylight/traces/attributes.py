"""Reading span attributes: flattened lists and dicts, values written as text, and what identifies a call and an agent.

The conventions are those of OpenTelemetry's `gen_ai`, OpenLLMetry, AgentOps, Weave, LangChain, AutoGen, agent-framework, the OpenAI
Agents SDK, and agent-lightning's LLM proxy.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from raylight.semconv import AGENT_NAME, CALL_ID, RESPONSE_ID
from raylight.types import Span

RAW_FIELD = re.compile(r"llm\.(?!request\.|response\.|usage\.)\w+\.(\w+)")
"""`llm.<provider>.<field>`: a field of the raw request or response, as agent-lightning's LLM proxy (LiteLLM) records it."""
WEAVE_INPUT = "agentlightning.operation.input"
WEAVE_OUTPUT = "agentlightning.operation.output"
"""Under these agent-lightning's Weave tracer records requests and responses."""

EXECUTOR = "executor.id"
"""The id of an executor of agent-framework's workflows."""

AGENT_KEYS: tuple[tuple[str, tuple[str, str] | None], ...] = (
    (AGENT_NAME, None),  # OpenTelemetry
    ("agent.name", None),  # OpenAI Agents SDK
    ("operation.name", ("agentops.span.kind", "agent")),  # AgentOps' decorator
    ("recipient_agent_type", None),  # AutoGen
    ("langchain.chain.type", None),  # LangGraph
    (EXECUTOR, None),
    (f"{WEAVE_INPUT}.name", ("type", "agent")),  # Weave
)
"""Attributes that name an agent, the first one that is there decides; some do only where another attribute has a certain value."""


def agent_of(span: Span) -> str | None:
    """The agent that a span is of, or None if it names none."""
    attributes = span.attributes
    for key, condition in AGENT_KEYS:
        name = attributes.get(key)
        if (
            isinstance(name, str)
            and name
            and (condition is None or attributes.get(condition[0]) == condition[1])
        ):
            return name
    name = (
        attributes.get("lc_name") if span.name.startswith("langchain.Chain.") else None
    )  # Weave's spans of LangChain
    return name if isinstance(name, str) and name else None


def response_id_of(attributes: Mapping[str, Any]) -> str | None:
    """The id that a response of a model has, whoever recorded it."""
    for candidate in (
        attributes.get(RESPONSE_ID),
        attributes.get(f"{WEAVE_OUTPUT}.id"),
        raw_field(attributes, "id"),
    ):
        if isinstance(candidate, str) and candidate:
            return candidate
    return None


def call_key_of(attributes: Mapping[str, Any]) -> str | None:
    """What spans that tell of the same call have in common; None if the span does not say.

    It is the response id. Of a response with several choices raylight captures one call each: the first one's id is part of the
    response id, the others are known by their own ids.
    """
    response, call = response_id_of(attributes), attributes.get(CALL_ID)
    return call if isinstance(call, str) and (response is None or call not in response) else response


def raw_field(attributes: Mapping[str, Any], field: str) -> Any:
    """A field of the raw request or response of any provider, parsed; None if it is not there."""
    for key, value in attributes.items():
        match = RAW_FIELD.fullmatch(key)
        if match and match[1] == field:
            return parsed(value)
    return None


def parsed(value: Any) -> Any:
    """What a text stands for, if it is a list or dict in JSON, or in Python's notation (LiteLLM's); else the value itself."""
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not in this notation
            found = value
    return found


def unflatten(attributes: Mapping[str, Any], prefix: str) -> Any:
    """What was flattened under `prefix.`: a dict, or a list where all keys are numbers; None if there is nothing."""
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(f"{prefix}."):
            continue
        *path, last = key[len(prefix) + 1 :].split(".")
        inner = nested
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}  # a value that has fields as well gives way to them
            inner = inner[part]
        if not isinstance(inner.get(last), dict):
            inner[last] = value
    return _with_lists(nested) if nested else None


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return list(node) if isinstance(node, tuple) else node
    if all(key.isdecimal() for key in node):
        return [_with_lists(node[key]) for key in sorted(node, key=int)]
    return {key: _with_lists(value) for key, value in node.items()}


def indexed(attributes: Mapping[str, Any], prefix: str) -> list[Any]:
    """The entries under `prefix.N.`, in order; what is under the prefix without a number is left out."""
    found = unflatten(attributes, prefix)
    if isinstance(found, dict):
        found = [found[key] for key in sorted((key for key in found if key.isdecimal()), key=int)]
    return found or []
