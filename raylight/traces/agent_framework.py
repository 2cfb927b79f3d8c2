"""agent-framework's spans: its agents, chats, tools and workflow executors. The package is loaded by `init` and nowhere before.

agent-framework tells OpenTelemetry by itself what it does. A chat is told twice, by its `chat` span and by the span that raylight
captured; both have the response's id, so that the captured call gets its place in the tree and with it its agent: the nearest
workflow executor above it, else the nearest agent (`SpanNode.agent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from raylight.errors import TracerError
from raylight.traces.tracer import EXPORT_TIMEOUT_S, OtelTracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

DISTRIBUTION = "agent-framework-core"
NEEDED = "1.0"
"""The first version whose `enable_instrumentation` is what `init` asks for."""


def init(contents: bool = True) -> None:
    """Let agent-framework make spans in this process, also where ENABLE_INSTRUMENTATION=false turned them off.

    They go to the global tracer provider: to the current attempt where a tracer is set up, else to whoever listens there.

    Args:
        contents: whether they have messages, instructions, and the arguments and results of tools (agent-framework's "sensitive
            data"); False leaves that as ENABLE_SENSITIVE_DATA says.

    Raises:
        TracerError: agent-framework is not installed or too old, or the program called its `disable_instrumentation`.
    """
    try:
        from agent_framework.observability import OBSERVABILITY_SETTINGS, enable_instrumentation
    except ImportError as error:
        raise TracerError(
            f'{_found()}; pip install -U "{DISTRIBUTION}>={NEEDED}" agent-framework-openai ({error})'
        ) from error
    enable_instrumentation(enable_sensitive_data=True if contents else None)
    if not OBSERVABILITY_SETTINGS.ENABLED:
        raise TracerError(
            "the program called agent_framework.observability.disable_instrumentation(), so that its agents leave no spans; "
            "take that call out, or trace with OtelTracer, which does without them"
        )


class AgentFrameworkTracer(OtelTracer):
    """An OtelTracer for agents of agent-framework: it makes sure that each process that runs rollouts has their spans.

    What it turned on stays on after `teardown`: agent-framework has one switch for the whole process, and spans that nobody listens
    to cost next to nothing.

    Args:
        contents: whether spans have messages, instructions, and the arguments and results of tools, which rewards may need; they
            go to the exporter too, if there is one.

    The other arguments are OtelTracer's.
    """

    def __init__(
        self,
        service_name: str = "raylight",
        exporter: Callable[[], SpanExporter] | None = None,
        *,
        contents: bool = True,
        export_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        export_timeout: float = EXPORT_TIMEOUT_S,
    ) -> None:
        super().__init__(
            service_name,
            exporter,
            export_endpoint=export_endpoint,
            headers=headers,
            export_timeout=export_timeout,
        )
        self.contents = contents

    def setup(self) -> None:
        """Turn agent-framework's spans on, and hear them.

        Raises:
            TracerError: agent-framework cannot be traced (see `init`), or the process cannot (see `OtelTracer.setup`).
        """
        if not self._is_set_up:
            init(self.contents)
        super().setup()

    def init(self) -> None:
        """What agent-framework's own tracer for agent-lightning calls `setup`."""
        self.setup()


def _found() -> str:
    """Which agent-framework is there, in words."""
    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)} is too old to be traced"
    except PackageNotFoundError:
        return "agent-framework is not installed"
