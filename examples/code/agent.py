"""The agent: it asks a model for a Python function, and lets it correct what does not parse."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from typing import Any

import raylight as rl
from raylight.sandboxes.registry import SandboxPool

TURNS, MAX_TOKENS, TIMEOUT_S = 2, 256, 10.0
BLOCK = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
HAS_BUBBLEWRAP = shutil.which("bwrap") is not None
SANDBOX = rl.sandboxes.SandboxSpec(
    "bubblewrap" if HAS_BUBBLEWRAP else "process",
    limits=rl.sandboxes.SandboxLimits(memory_mb=1024, network=not HAS_BUBBLEWRAP),
)
POOL = SandboxPool(os.cpu_count())


def question(task: dict[str, Any]) -> dict[str, Any]:
    """Return the message that asks for the function of a task."""
    text = f"Write a Python function of one line, {task['header']}, that returns {task['goal']}."
    return {"role": "user", "content": text}


def code_in(text: str) -> str:
    """Return the first block of code of an answer, or all of it."""
    return (found[1] if (found := BLOCK.search(text)) else text).strip()


def syntax_error(code: str) -> str | None:
    """Return the message of the parser for code that Python cannot read."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


async def passed(code: str, tests: list[dict[str, Any]]) -> bool:
    """Run code on the arguments of the tests; return True if all results are the expected ones.

    Expected results stay outside of the sandbox, so no code can read or print them.
    """
    arguments = [test["arguments"] for test in tests]
    program = f"{code}\n\nimport json\nprint(json.dumps([solve(*values) for values in {arguments!r}]))\n"
    async with POOL.started(SANDBOX) as place:
        await place.write("solution.py", program.encode())
        ended = await place.exec(["python3", "-I", "solution.py"], timeout_s=TIMEOUT_S)
    try:
        results = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return False
    return results == [test["expected"] for test in tests]


@rl.rollout
async def write_function(task: dict[str, Any], llm: rl.LLM) -> float:
    """Return 1 if the function passes the hidden tests, and 0 otherwise."""
    messages: list[Any] = [question(task)]
    for _ in range(TURNS):
        reply = await llm.client().chat.completions.create(
            model=llm.model, messages=messages, temperature=1.0, max_tokens=MAX_TOKENS
        )
        answer = reply.choices[0].message.content or ""
        code = code_in(answer)
        if (error := syntax_error(code)) is None:
            return float(await passed(code, task["tests"]))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": error}]
    return 0.0
