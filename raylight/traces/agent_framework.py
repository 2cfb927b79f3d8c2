"""Spans of agent-framework: its agents, chats, tools and workflow executors.

Only `init` imports that package.

agent-framework records spans through OpenTelemetry by itself. A chat has two spans: agent-framework's `chat`
span and the span that raylight captured. Both carry the response id, by which the captured call is placed in
the tree. Its agent is the nearest workflow executor above it, else the nearest agent (`SpanNode.agent`).
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
MIN_VERSION = "1.0"
"""The first version with the `enable_instrumentation` that `init` calls."""


def init(contents: bool = True) -> None:
    """Enable agent-framework's spans in this process, even if ENABLE_INSTRUMENTATION=false disabled them.

    They go to the global tracer provider, and from there to the current attempt if a tracer is set up.

    Args:
        contents: True if spans include messages, instructions, and the arguments and results of tools
            (agent-framework's "sensitive data"). False: the variable ENABLE_SENSITIVE_DATA decides.

    Raises:
        TracerError: agent-framework is not installed or too old, or the program called its
            `disable_instrumentation`.
    """
    try:
        from agent_framework.observability import OBSERVABILITY_SETTINGS, enable_instrumentation
    except ImportError as error:
        raise TracerError(
            f"{_version_problem()} ({error}); pip install -U "
            f'"{DISTRIBUTION}>={MIN_VERSION}" agent-framework-openai'
        ) from error
    enable_instrumentation(enable_sensitive_data=True if contents else None)
    if not OBSERVABILITY_SETTINGS.ENABLED:
        raise TracerError(
            "the program called agent_framework.observability.disable_instrumentation(), so its agents "
            "record no spans; remove that call, or trace with OtelTracer, which does not need them"
        )


class AgentFrameworkTracer(OtelTracer):
    """OtelTracer that enables agent-framework's spans in each process that runs rollouts.

    The spans stay enabled after `teardown`: agent-framework has one switch per process, and spans without a
    listener cost almost nothing. The other arguments are OtelTracer's.

    Args:
        contents: True if spans include messages, instructions, and the arguments and results of tools, which
            rewards may need. They are exported too, if there is an exporter.
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
        """Enable agent-framework's spans, and start to record them.

        Raises:
            TracerError: agent-framework cannot be traced (see `init`), or the process cannot (see
                `OtelTracer.setup`).
        """
        if not self._is_set_up:
            init(self.contents)
        super().setup()

    def init(self) -> None:
        """Call `setup`, under the name that agent-framework's own tracer for agent-lightning uses."""
        self.setup()


def _version_problem() -> str:
    """Describe why the installed agent-framework cannot be traced."""
    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)} is too old to be traced"
    except PackageNotFoundError:
        return "agent-framework is not installed"
