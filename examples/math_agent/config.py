"""Settings of the agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

HERE = Path(__file__).parent
DATA = HERE / "data"

ClientName = Literal["openai", "agent_framework", "langgraph", "agents"]
ExtractorName = Literal["hashes", "answer_tag", "four_hashes", "last_number"]

CALCULATOR_COMMAND = (sys.executable, str(HERE / "calculator_server.py"))
"""Command of the calculator server in this folder, run by this Python."""


class MathSettings(BaseModel):
    """Settings of the rollout function, passed as the resource `settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: ClientName = "openai"
    """Client library of the agent."""
    extractor: ExtractorName = "hashes"
    """Format in which the model marks its answer."""
    mcp_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Command line of an MCP server over stdio; None for the calculator in this folder."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of model calls in a rollout."""

    @property
    def command(self) -> tuple[str, ...]:
        return self.mcp_command or CALCULATOR_COMMAND
