"""The agent under fault. It asks three questions in one conversation and keeps its own log."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from chaos_log import HELD_ROLLOUTS, HOLD_VARIABLE, AttemptLog, questions

import raylight as rl

PROGRAM = Path(__file__).with_name("chaos_program.py")


@rl.rollout
async def asker(task: dict, llm: rl.LLM, rollout: rl.AttemptedRollout) -> float:
    with AttemptLog(rollout.rollout_id, rollout.attempt.attempt_id, rollout.mode or "") as log:
        if HOLD_VARIABLE in os.environ and rollout.rollout_id.endswith(HELD_ROLLOUTS):
            await asyncio.Event().wait()
        model = llm.client()
        messages: list[Any] = []
        for question in questions(task):
            messages.append({"role": "user", "content": question})
            reply = await model.chat.completions.create(
                model=llm.model, messages=messages, temperature=1.0, max_tokens=8
            )
            log.answers.append(reply.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": log.answers[-1]})
        return log.finish()


def asker_program() -> rl.LitAgent:
    """Return the same agent as a program in a separate process."""
    return rl.CommandAgent([sys.executable, "-S", str(PROGRAM)])
