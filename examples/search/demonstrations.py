"""Demonstrations: a search by the two words of a question that matter, and the answer from the fact found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from agent import INSTRUCTIONS, search
from corpus import make_facts

CORPORA = 4
"""Other corpora that demonstrations are about."""
TOOL = {
    "type": "function",
    "function": {
        "name": search.name,
        "description": search.description,
        "parameters": search.params_json_schema,
    },
}


def searches(seed: int) -> Iterator[dict[str, Any]]:
    """Yield conversations that end with the right answer, about facts that are not in the corpus."""
    for fact in itertools.chain.from_iterable(
        make_facts(seed=1 + seed * CORPORA + n) for n in range(CORPORA)
    ):
        call = {"name": search.name, "arguments": json.dumps({"query": f"{fact.name} {fact.verb}"})}
        yield {
            "messages": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": fact.question},
                {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "call_1", "content": fact.text},
                {"role": "assistant", "content": fact.value},
            ],
            "tools": [TOOL],
        }
