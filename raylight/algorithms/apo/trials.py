"""What came of a prompt on a batch of tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.traces.messages import OpenAIMessages

Ending = Literal["succeeded", "failed", "timed out", "lost"]
"""lost: to the infrastructure, which says nothing of the prompt."""

TASK_CHARACTERS = 1_000
TRANSCRIPT_CHARACTERS = 6_000
"""Shown of each rollout to the model that criticises."""


@dataclass(frozen=True)
class Trial:
    """One rollout with a prompt."""

    task: Any
    ending: Ending
    reward: float | None = None
    conversations: Sequence[OpenAIMessages] = ()
    """One per call to a model."""
    notes: Sequence[str] = ()
    """A line a span, where no call to a model was seen."""
    error: str = ""

    @property
    def counted(self) -> float:
        """What it adds to the score."""
        return self.reward if self.reward is not None and self.ending == "succeeded" else 0.0


@dataclass(frozen=True)
class Evaluation:
    """A prompt on a batch of tasks."""

    trials: Sequence[Trial] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Mean reward. What failed, ran out of time or gave no reward counts as 0; what was lost is left out.

        Raises:
            ZeroDivisionError: everything was lost.
        """
        known = [trial.counted for trial in self.trials if trial.ending != "lost"]
        return sum(known) / len(known)

    def endings(self) -> str:
        """Of what did not succeed, in words; empty if all did."""
        counts = Counter(trial.ending for trial in self.trials if trial.ending != "succeeded")
        unscored = sum(trial.ending == "succeeded" and trial.reward is None for trial in self.trials)
        return ", ".join(
            [f"{count} {ending}" for ending, count in counts.items()]
            + [f"{unscored} without a reward"] * bool(unscored)
        )


def describe_trials(trials: Sequence[Trial]) -> str:
    """Rollouts as text, for a model to read."""
    return "\n\n".join(f"### Attempt {number}\n{_describe(trial)}" for number, trial in enumerate(trials, 1))


def _describe(trial: Trial) -> str:
    reward = "none was given" if trial.reward is None else f"{trial.reward:g}"
    lines = [
        f"Task: {_short(_text(trial.task), TASK_CHARACTERS)}",
        f"Outcome: {trial.ending}",
        f"Reward: {reward}",
    ]
    if trial.error:
        lines.append(f"Error: {_short(trial.error, TASK_CHARACTERS)}")
    shown = _transcript(trial.conversations) if trial.conversations else "\n".join(trial.notes)
    if shown:
        lines.append(f"What happened:\n{_short(shown, TRANSCRIPT_CHARACTERS)}")
    return "\n".join(lines)


def _transcript(conversations: Sequence[OpenAIMessages]) -> str:
    """Each conversation once: one that a later one goes on with is left out."""
    dialogues = [item["messages"] for item in conversations]
    whole = [
        dialogue
        for place, dialogue in enumerate(dialogues)
        if not any(later[: len(dialogue)] == dialogue for later in dialogues[place + 1 :])
    ]
    return "\n---\n".join(
        "\n".join(f"[{m.get('role', '?')}] {_said(m)}" for m in dialogue) for dialogue in whole
    )


def _said(message: dict[str, Any]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = "" if content is None else _text(content)
    return f"{text} (calls {_text(calls)})".strip() if calls else text


def _text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):  # keys that JSON does not have, or a value within itself
        return repr(value)


def _short(text: str, most: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
