"""Outcomes of a prompt's rollouts, and their text for the critic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raylight.traces.messages import OpenAIMessages
from raylight.types import JsonObject

Outcome = Literal["succeeded", "failed", "timed out", "lost"]
"""Outcome of a rollout; lost: an infrastructure failure, which has nothing to do with the prompt."""

MAX_TASK_CHARACTERS = 1_000
"""Characters of a task, or an error, that the critic reads."""
MAX_TRANSCRIPT_CHARACTERS = 6_000
"""Characters of a rollout's transcript that the critic reads."""


@dataclass(frozen=True)
class Trial:
    """One rollout with a prompt."""

    task: object
    outcome: Outcome
    reward: float | None = None
    conversations: Sequence[OpenAIMessages] = ()
    """Messages of each model call."""
    notes: Sequence[str] = ()
    """One line per span, for a rollout without a recorded model call."""
    error: str = ""
    feedback: Sequence[str] = ()
    """Texts that the agent emitted by `rl.emit_message`."""

    @property
    def score(self) -> float | None:
        """Reward of a rollout that succeeded; None if it failed, timed out or has no reward."""
        return self.reward if self.outcome == "succeeded" else None


@dataclass(frozen=True)
class Evaluation:
    """Rollouts of a prompt on a batch of tasks."""

    trials: Sequence[Trial] = field(default_factory=list)

    def score(self, failure_reward: float) -> float:
        """Return the mean reward, with `failure_reward` for rollouts that failed, timed out or have no
        reward; lost rollouts are excluded.

        Raises:
            ZeroDivisionError: all rollouts were lost.
        """
        scores = self._scores()
        return sum(failure_reward if score is None else score for score in scores) / len(scores)

    @property
    def failed_fraction(self) -> float:
        """Fraction of the rollouts that have no score, without lost ones."""
        scores = self._scores()
        return sum(score is None for score in scores) / len(scores)

    def _scores(self) -> list[float | None]:
        return [trial.score for trial in self.trials if trial.outcome != "lost"]

    def problems(self) -> str:
        """Return the counts of rollouts without success or reward, in words; empty if there are none."""
        counts = Counter(trial.outcome for trial in self.trials if trial.outcome != "succeeded")
        unscored = sum(trial.outcome == "succeeded" and trial.reward is None for trial in self.trials)
        return ", ".join(
            [f"{count} {outcome}" for outcome, count in counts.items()]
            + [f"{unscored} without a reward"] * bool(unscored)
        )


def lowest_reward(trials: Sequence[Trial], before: float) -> float:
    """Return the lowest reward of rollouts, or `before` if that is lower."""
    return min([before, *(trial.score for trial in trials if trial.score is not None)])


def describe_trials(trials: Sequence[Trial]) -> str:
    """Return rollouts as text for a model to read."""
    return "\n\n".join(f"### Attempt {number}\n{_describe(trial)}" for number, trial in enumerate(trials, 1))


def _describe(trial: Trial) -> str:
    reward = "none" if trial.reward is None else f"{trial.reward:g}"
    lines = [
        f"Task: {_shorten(_text(trial.task), MAX_TASK_CHARACTERS)}",
        f"Outcome: {trial.outcome}",
        f"Reward: {reward}",
    ]
    if trial.error:
        lines.append(f"Error: {_shorten(trial.error, MAX_TASK_CHARACTERS)}")
    transcript = _transcript(trial.conversations) if trial.conversations else "\n".join(trial.notes)
    if transcript:
        lines.append(f"Transcript:\n{_shorten(transcript, MAX_TRANSCRIPT_CHARACTERS)}")
    return "\n".join(lines)


def trial_record(trial: Trial) -> dict[str, str]:
    """Return a rollout as a record of a reflective dataset: its input, its output, and feedback on it."""
    transcript = _transcript(trial.conversations) if trial.conversations else "\n".join(trial.notes)
    feedback = [f"Reward: {'none' if trial.reward is None else format(trial.reward, 'g')}."]
    feedback += [f"The rollout {trial.outcome}."] if trial.outcome != "succeeded" else []
    feedback += [f"Error: {_shorten(trial.error, MAX_TASK_CHARACTERS)}"] if trial.error else []
    feedback += [_shorten(text, MAX_TASK_CHARACTERS) for text in trial.feedback]
    return {
        "Inputs": _shorten(_text(trial.task), MAX_TASK_CHARACTERS),
        "Generated Outputs": _shorten(transcript, MAX_TRANSCRIPT_CHARACTERS) or "(none)",
        "Feedback": "\n".join(feedback),
    }


def _transcript(conversations: Sequence[OpenAIMessages]) -> str:
    """Return each conversation once: one that a later one extends is left out."""
    dialogues = [item["messages"] for item in conversations]
    complete = [
        dialogue
        for index, dialogue in enumerate(dialogues)
        if not any(later[: len(dialogue)] == dialogue for later in dialogues[index + 1 :])
    ]
    return "\n---\n".join(
        "\n".join(f"[{m.get('role', '?')}] {_message_text(m)}" for m in dialogue) for dialogue in complete
    )


def _message_text(message: JsonObject) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = "" if content is None else _text(content)
    return f"{text} (calls {_text(calls)})".strip() if calls else text


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):  # keys that JSON does not support, or a circular reference
        return repr(value)


def _shorten(text: str, limit: int) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
