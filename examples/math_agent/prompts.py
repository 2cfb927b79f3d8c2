"""System message of the agent."""

from __future__ import annotations

from examples.math_agent.answers import EXTRACTORS

INSTRUCTIONS = (
    "You solve word problems. Think about which quantities are given and which one is asked for. Leave all "
    "arithmetic to the calculator: call the tool for each calculation, one expression at a time, and read "
    "its result before you go on."
)


def instructions(extractor: str) -> str:
    """Return the system message, which describes the expected format of the answer."""
    return f"{INSTRUCTIONS} {EXTRACTORS[extractor].instruction}"
