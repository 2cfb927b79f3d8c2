"""LangChain callback handler, which records chains, LangGraph's nodes, tools and model calls as spans.

Only `Tracer.get_langchain_handler` imports this module, because it imports langchain-core.

The engine records the calls themselves. These spans show which node made a call: both sides of a call carry
the id of the response. LangChain drops the id of a streamed chat completion; such a call belongs to the span
that encloses it in time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks.base import BaseCallbackHandler

from raylight.semconv import REQUEST_MODEL, RESPONSE_ID
from raylight.traces.attributes import CHAIN
from raylight.traces.context import AttemptTrace, ParentSpan, current_parent, current_trace
from raylight.types import Attributes, Span, TraceStatus

CHAIN_SPAN = "langchain.chain"
MODEL_SPAN = "langchain.model"
TOOL_SPAN = "langchain.tool"
"""Names of the spans. They differ from the name of a captured call, so that no call counts twice."""
PLUMBING = "Runnable"
"""Name prefix of the chains that LangChain itself adds; they are not agents."""
OWN_IDS = ("lc_run-", "run-")
"""Prefixes of ids that LangChain makes for messages without one, such as streamed ones."""


@dataclass
class OpenRun:
    """A run of LangChain that has started and not ended."""

    trace: AttemptTrace
    name: str
    attributes: Attributes
    parent: ParentSpan | None
    ids: ParentSpan
    start: float = field(default_factory=time.time)


class LangChainHandler(BaseCallbackHandler):
    """Callback handler that adds spans to the trace of the attempt.

    It serves any number of rollouts at once, and does nothing outside a rollout.
    """

    run_inline = True
    """Run on the caller's event loop, in the context of the attempt; no method blocks."""

    def __init__(self) -> None:
        self._trace = current_trace()
        """Trace of the attempt that made the handler, for threads without its context."""
        self._open: dict[UUID, OpenRun] = {}

    # chains and nodes

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,
        inputs: object,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        name = kwargs.get("name") or (serialized or {}).get("name")
        node = (metadata or {}).get("langgraph_node")
        attributes: Attributes = {}
        if node is not None:
            attributes[CHAIN] = node
        elif name and not name.startswith(PLUMBING) and kwargs.get("run_type") is None:
            attributes[CHAIN] = name
        self._start(CHAIN_SPAN, attributes, run_id, parent_run_id)

    def on_chain_end(self, outputs: object, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, error=error)

    # tools

    def on_tool_start(
        self,
        serialized: Mapping[str, object] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: object,
    ) -> None:
        name = kwargs.get("name") or (serialized or {}).get("name") or ""
        attributes = {"gen_ai.tool.name": name, "gen_ai.tool.call.arguments": str(input_str)}
        self._start(TOOL_SPAN, attributes, run_id, parent_run_id)

    def on_tool_end(self, output: object, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, {"gen_ai.tool.call.result": str(getattr(output, "content", output))})

    on_tool_error = on_chain_error

    # models

    def on_llm_start(
        self,
        serialized: Mapping[str, object] | None,
        prompts: object,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        model = (metadata or {}).get("ls_model_name")
        self._start(MODEL_SPAN, {REQUEST_MODEL: model} if model else {}, run_id, parent_run_id)

    on_chat_model_start = on_llm_start  # type: ignore[assignment]  # both ignore the prompts

    def on_llm_end(self, response: object, *, run_id: UUID, **kwargs: object) -> None:
        response_id = _response_id(response)
        self._end(run_id, {RESPONSE_ID: response_id} if response_id else {})

    on_llm_error = on_chain_error

    def _start(self, name: str, attributes: Attributes, run_id: UUID, parent_run_id: UUID | None) -> None:
        trace = current_trace() or self._trace
        if trace is None:
            return
        outer = self._open.get(parent_run_id) if parent_run_id else None
        parent = outer.ids if outer else current_parent()
        ids = ParentSpan(parent.trace_id if parent else trace.trace_id)
        self._open[run_id] = OpenRun(trace, name, attributes, parent, ids)

    def _end(
        self, run_id: UUID, attributes: Attributes | None = None, error: BaseException | None = None
    ) -> None:
        run = self._open.pop(run_id, None)
        if run is None:
            return
        status = TraceStatus(status_code="OK")
        if error is not None:
            status = TraceStatus(status_code="ERROR", description=type(error).__name__)
        run.trace.add(
            Span.from_attributes(
                name=run.name,
                attributes=run.attributes | (attributes or {}),
                status=status,
                start_time=run.start,
                end_time=time.time(),
                trace_id=run.ids.trace_id,
                span_id=run.ids.span_id,
                parent_id=run.parent.span_id if run.parent else None,
            )
        )


def _response_id(response: Any) -> str | None:
    """Return the provider's id of a response; None if LangChain does not give it."""
    for generations in response.generations:
        for generation in generations:
            message = getattr(generation, "message", None)
            for candidate in (
                (getattr(message, "response_metadata", None) or {}).get("id"),
                getattr(message, "id", None),
            ):
                if isinstance(candidate, str) and candidate and not candidate.startswith(OWN_IDS):
                    return candidate
    return None
