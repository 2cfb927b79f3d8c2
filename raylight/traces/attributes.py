"""Reading of span attributes: flattened values, values stored as text, ids of calls, names of agents.

The conventions come from OpenTelemetry's `gen_ai`, OpenLLMetry, AgentOps, Weave, LangChain, AutoGen,
agent-framework, the OpenAI Agents SDK, and agent-lightning's LLM proxy.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from raylight.semconv import AGENT_NAME, CALL_ID, RESPONSE_ID
from raylight.types import JsonObject, Span

RAW_FIELD = re.compile(r"llm\.(?!request\.|response\.|usage\.)\w+\.(\w+)")
"""`llm.<provider>.<field>`: a field of the raw request or response, as agent-lightning's LLM proxy (LiteLLM)
records it."""
WEAVE_INPUT = "agentlightning.operation.input"
WEAVE_OUTPUT = "agentlightning.operation.output"
"""Prefixes under which agent-lightning's Weave tracer records requests and responses."""

EXECUTOR = "executor.id"
"""Attribute with the id of an executor in a workflow of agent-framework."""

CHAIN = "langchain.chain.type"
"""Attribute with the name of a chain of LangChain, or of a node of LangGraph."""
AGENT_KEYS: tuple[tuple[str, tuple[str, str] | None], ...] = (
    (AGENT_NAME, None),  # OpenTelemetry
    ("agent.name", None),  # OpenAI Agents SDK
    ("operation.name", ("agentops.span.kind", "agent")),  # AgentOps' decorator
    ("recipient_agent_type", None),  # AutoGen
    (CHAIN, None),  # LangChain, LangGraph
    (EXECUTOR, None),
    (f"{WEAVE_INPUT}.name", ("type", "agent")),  # Weave
)
"""Attributes that name an agent, in order of precedence, each with the attribute and value that it requires,
if any."""


def agent_of(span: Span) -> str | None:
    """Return the name of a span's agent; None if the span names none."""
    attributes = span.attributes
    for key, condition in AGENT_KEYS:
        name = attributes.get(key)
        if (
            isinstance(name, str)
            and name
            and (condition is None or attributes.get(condition[0]) == condition[1])
        ):
            return name
    # Weave's spans of LangChain
    name = attributes.get("lc_name") if span.name.startswith("langchain.Chain.") else None
    return name if isinstance(name, str) and name else None


def response_id_of(attributes: Mapping[str, object]) -> str | None:
    """Return the id of a model's response, in any of the conventions."""
    for candidate in (
        attributes.get(RESPONSE_ID),
        attributes.get(f"{WEAVE_OUTPUT}.id"),
        raw_field(attributes, "id"),
    ):
        if isinstance(candidate, str) and candidate:
            return candidate
    return None


def call_key_of(attributes: Mapping[str, object]) -> str | None:
    """Return the key that all spans of one call share; None if the span has none.

    It is the response id. For a response with several choices raylight captures one call per choice: the
    first one's id is part of the response id, and the others are identified by their own ids.
    """
    response, call = response_id_of(attributes), attributes.get(CALL_ID)
    return call if isinstance(call, str) and (response is None or call not in response) else response


def raw_field(attributes: Mapping[str, object], field: str) -> object:
    """Return a field of the raw request or response of any provider, parsed; None if it is missing."""
    for key, value in attributes.items():
        match = RAW_FIELD.fullmatch(key)
        if match and match[1] == field:
            return parse_literal(value)
    return None


def parse_literal(value: object) -> object:
    """Parse a list or dict in JSON or in Python's notation (LiteLLM's); return other values unchanged."""
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not in this notation
            result = value
    return result


def unflatten(attributes: Mapping[str, object], prefix: str) -> Any:
    """Rebuild the dict flattened under `prefix.`, or the list if all keys are numbers; None if missing."""
    nested: JsonObject = {}
    for key, value in attributes.items():
        if not key.startswith(f"{prefix}."):
            continue
        *path, last = key[len(prefix) + 1 :].split(".")
        inner = nested
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}  # if a key has both a value and fields, the fields count
            inner = inner[part]
        if not isinstance(inner.get(last), dict):
            inner[last] = value
    return _with_lists(nested) if nested else None


def _with_lists(node: object) -> object:
    if not isinstance(node, dict):
        return list(node) if isinstance(node, tuple) else node
    if all(key.isdecimal() for key in node):
        return [_with_lists(node[key]) for key in sorted(node, key=int)]
    return {key: _with_lists(value) for key, value in node.items()}


def unflatten_list(attributes: Mapping[str, object], prefix: str) -> list[Any]:
    """Return the entries under `prefix.N.`, in order, without those under other keys."""
    value = unflatten(attributes, prefix)
    if isinstance(value, dict):
        value = [value[key] for key in sorted((key for key in value if key.isdecimal()), key=int)]
    return value or []
