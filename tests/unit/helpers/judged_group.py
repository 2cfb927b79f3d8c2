"""Finished rollouts of a group, and a scripted judge behind a real server."""

import json
from typing import Any

import numpy as np

from raylight.agent.resources import LLM
from raylight.rewards.group import GroupRollout
from raylight.semconv import INPUT_MESSAGES, OUTPUT_MESSAGES
from raylight.types import CallKey, FinishedRollout, Generation, Rollout, Span

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote Faust?"}]


def rollout(
    number: int, answer: str, reward: float | None = None, tokens: int = 1, **rewards: float
) -> GroupRollout:
    """A rollout of one call with this answer."""
    name = f"run-train-0-{number}"
    attributes = {
        INPUT_MESSAGES: json.dumps(QUESTION),
        OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": answer}]),
    }
    span = Span(trace_id="1" * 32, span_id=f"{number + 1:016x}", name="chat", attributes=attributes)
    call = Generation(
        CallKey(name, "at-1", "c"),
        "policy",
        np.array([1]),
        np.arange(tokens),
        np.zeros(tokens),
        np.zeros(tokens),
        "stop",
        0.0,
        1.0,
    )
    named = ({} if reward is None else {"primary": reward}) | rewards
    state = Rollout(rollout_id=name, input="Faust", status="succeeded", start_time=0.0)
    return GroupRollout(FinishedRollout(state, reward, [call], [span], named))


def judge_llm(url: str) -> LLM:
    return LLM(endpoint=url, model="judge", api_key="key", sampling_parameters={"temperature": 0.0})


def scores_of(text: str, score: Any) -> str:
    """The answer of a judge that scores each attempt by its last line."""
    attempts = [part.split("</attempt>")[0] for part in text.split("<attempt number=")[1:]]
    entries = [
        {
            "attempt": number,
            "reason": "r",
            "score": score(json.loads(body.strip().splitlines()[-1])["content"]),
        }
        for number, body in enumerate(attempts, 1)
    ]
    return f"<think>{{x}}</think>```json\n{json.dumps({'scores': entries})}\n```"
