"""Evaluation of a model: a run with engines and runners, without learners."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator

from raylight._utils.bounds import MAX_SAMPLES, MAX_SECONDS
from raylight._utils.files import write_atomic
from raylight._utils.plain_json import plain
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, check_sampling
from raylight.algorithms.policy import RunSettings
from raylight.base_config import Config
from raylight.config import MODEL_NAME, EngineConfig
from raylight.errors import ConfigError, ModelNotFoundError
from raylight.semconv import OUTPUT_MESSAGES
from raylight.store.client import StoreClient
from raylight.traces.reward_spans import MAX_REWARD
from raylight.trainer.cluster_fit.cluster_settings import fit_served
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.cluster_fit.policy_checks import engine_with_room
from raylight.trainer.cluster_fit.scoring_models import plan_reward_models
from raylight.trainer.components.run_components import RolloutComponents
from raylight.trainer.loops.awaited_rollouts import run_rollouts
from raylight.trainer.loops.batch_metrics import raise_if_hopeless
from raylight.trainer.loops.group_grader import GroupGrader
from raylight.trainer.output.report import ProgressReporter
from raylight.trainer.output.scores import Scores, Spread, measure
from raylight.trainer.runs.run_spec import RunSpec
from raylight.trainer.spec.inputs import check_validation_size, fixed_model
from raylight.trainer.spec.run_resources import with_policy
from raylight.trainer.spec.settings import RolloutSettings, ServedSettings, ServingSettings
from raylight.types import EnqueueRolloutRequest, FinishedRollout, JsonObject, RolloutConfig
from raylight.weights.peft_files import missing_files, read_rank

ADAPTER_NAME = "adapter"
"""Name under which the only adapter is served."""
RANK_REMEDY = "set engine={'kind': 'transformers'}"
COLLECT_CHUNK = 256
"""Maximum number of rollouts whose spans are in memory at the same time."""


class EvalSettings(Config):
    """Settings of an evaluation."""

    model: str
    """Folder of a Hugging Face model, its name in the local cache, or the upstream's name of it."""
    lora_adapter: str | dict[str, str] | None = None
    """Folder of a LoRA adapter in peft's format, which is served with the model; or folders by the name of
    each of several models that the agent calls."""
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Rollouts per task."""
    sampling: JsonObject = Field(default_factory=dict)
    """Content of `llm.sampling_parameters`, such as `{"temperature": 0.0}`. Agents must pass it to their
    client themselves."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose agent failed. None: 0, or the lowest reward of the others if that is
    negative. Infrastructure failures are always left out."""
    pass_reward: float = Field(default=1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Lowest reward with which a rollout passes, for pass@k."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""
    lora_adapter_timeout_s: float = Field(default=120.0, gt=0, le=MAX_SECONDS)
    """Deadline for the adapter to reach every replica, in seconds."""

    _check_sampling = field_validator("sampling")(check_sampling)


@dataclass(kw_only=True)
class EvalRun(RunSpec[ServedSettings, RolloutComponents, ProgressReporter]):
    """A run that scores a model."""

    chosen: EvalSettings
    agent: LitAgent
    tasks: list[object]

    @classmethod
    def plan(
        cls,
        settings: RolloutSettings,
        chosen: EvalSettings,
        agent: LitAgent,
        tasks: list[object],
        requested: RunSettings,
    ) -> Self:
        """Return the run that a call of `Trainer.evaluate` asks for.

        Args:
            settings: those that the Trainer gives every run.
            requested: settings of the Trainer, as the algorithm adjusts them.

        Raises:
            ConfigError, ModelNotFoundError: the agent, the model or the adapter does not exist or cannot be
                used.
        """
        check_validation_size(len(tasks), chosen.samples, "samples")
        serving = evaluated_model(chosen, requested.engine)
        agent.check(with_policy(settings.resources, LLM(model=MODEL_NAME), serving.models), ("val",))
        planned = ServedSettings.extending(
            settings,
            rollout=chosen.rollout,
            serving=serving,
            reward_models=plan_reward_models(settings.group_reward),
        )
        return cls(settings=planned, requested=requested, chosen=chosen, agent=agent, tasks=tasks)

    @property
    def remedy(self) -> str:
        return "Start the evaluation again"

    def for_cluster(self, facts: ClusterFacts) -> tuple[str, ...]:
        self.settings, notes = fit_served(self.settings, self.requested.engine, facts)
        serving = self.settings.serving
        if ranks := [read_rank(folder) for folder in serving.lora_adapters.values()]:
            engine = engine_with_room(serving.engine, len(ranks), max(ranks), RANK_REMEDY)
            self.settings = replace(self.settings, serving=replace(serving, engine=engine))
        return notes

    def loop(self, components: RolloutComponents, report: ProgressReporter) -> EvalLoop:
        return EvalLoop(self, components, report)

    def summary(self, loop: EvalLoop, report: ProgressReporter, counts: dict[str, int]) -> JsonObject:
        """Score the rollouts; return the content of `eval.json`.

        Writes `eval.json` (all scores, and the configuration) and `eval.png` (the rewards) to the run
        directory, which has `eval.jsonl` (a line per rollout) and `eval.db` (the store).

        Raises:
            RaylightError: no rollout was scored.
        """
        chosen, finished = self.chosen, loop.finished
        report.failures(finished)
        raise_if_hopeless(finished, chosen.failure_reward)
        scores = measure(finished, chosen.samples, chosen.failure_reward, chosen.pass_reward)
        if note := ignored_sampling(finished, chosen.sampling):
            report.note(note)
        figures = describe_evaluation(self, scores, finished, loop.seconds, note)
        write_atomic(self.folder / "eval.json", json.dumps(figures, indent=2) + "\n")
        from raylight.trainer.output.plot import plot_histogram

        plot_histogram(rewards_by_name(finished), self.folder / "eval.png")
        return figures

    def resolved(self) -> JsonObject:
        """Return the resolved configuration of the evaluation."""
        serving, own = self.settings.serving, self.chosen.model_dump(mode="json")
        own["model"] = serving.model_path or self.chosen.model
        adapters = serving.lora_adapters
        own["lora_adapter"] = adapters if serving.models else adapters.get(ADAPTER_NAME)
        return self.settings.resolved() | own | {"tasks": len(self.tasks)}


class EvalLoop:
    """Rolls every task out `samples` times, and collects the rollouts.

    Attributes:
        finished: the rollouts without their spans.
        seconds: duration of the rollouts.
    """

    def __init__(self, run: EvalRun, components: RolloutComponents, report: ProgressReporter) -> None:
        self._components, self._report = components, report
        self._samples, self._file = run.chosen.samples, run.folder / "eval.jsonl"
        self._requests = [
            EnqueueRolloutRequest(
                input=task, mode="val", group_id=f"val-{index}", config=run.settings.rollout
            )
            for index, task in enumerate(run.tasks)
            for _ in range(self._samples)
        ]
        self.finished: list[FinishedRollout] = []
        self.seconds = 0.0

    async def run(self) -> None:
        """Execute and grade the rollouts, and write a line for each."""
        components, started = self._components, time.perf_counter()
        ids = await run_rollouts(components, self._requests, self._report.rollout_progress("val"))
        if (grader := GroupGrader.of(components, self._report.note)) is not None:
            await grader.grade_all(await components.store.collect(ids))
        self.seconds = time.perf_counter() - started
        self.finished = await _collect(components.store, ids, self._samples, self._file)


def evaluated_model(chosen: EvalSettings, engine: EngineConfig) -> ServingSettings:
    """Return the settings of the model that is scored.

    Raises:
        ConfigError, ModelNotFoundError: the model or the adapter does not exist or cannot be used.
    """
    serving = replace(fixed_model(chosen.model, engine), sampling_overrides=chosen.sampling)
    if serving.engine.kind == "upstream" and chosen.rollout.has_budgets:
        raise ConfigError(
            "rollout: max_turns, max_tokens and max_seconds do not limit the calls of an upstream model; "
            "leave them out, and set timeout_seconds"
        )
    if chosen.lora_adapter is not None:
        if serving.engine.kind == "upstream":
            raise ConfigError(
                "lora_adapter: an upstream model takes no adapter from raylight; leave it out, or serve the "
                "model with raylight"
            )
        adapters = chosen.lora_adapter
        given = {ADAPTER_NAME: adapters} if isinstance(adapters, str) else adapters
        serving = replace(
            serving,
            models=() if isinstance(adapters, str) else tuple(given),
            lora_adapters={name: find_adapter(folder) for name, folder in given.items()},
            lora_adapter_timeout_s=chosen.lora_adapter_timeout_s,
        )
    return serving


def clear_results(folder: Path) -> None:
    """Create a folder and remove the results of an earlier evaluation in it. Other files there are unchanged,
    so the folder may be a training run's directory.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("eval.json", "eval.png"):
            (folder / name).unlink(missing_ok=True)
        (folder / "eval.jsonl").write_text("")
    except OSError as error:
        raise ConfigError(
            f"output_dir {folder} cannot be written: {error.strerror}; choose another folder"
        ) from None


async def _collect(store: StoreClient, ids: list[str], samples: int, path: Path) -> list[FinishedRollout]:
    """Write a line per rollout; return the finished rollouts without their spans."""
    finished: list[FinishedRollout] = []
    with path.open("a") as file:
        for start in range(0, len(ids), COLLECT_CHUNK):
            chunk = ids[start : start + COLLECT_CHUNK]
            for item in await store.collect(chunk, with_spans=True, with_span_tokens=False):
                task, sample = divmod(len(finished), samples)
                file.write(json.dumps(eval_line(item, task, sample)) + "\n")
                finished.append(replace(item, spans=[]))
    return finished


def describe_evaluation(
    run: EvalRun,
    scores: Scores,
    finished: list[FinishedRollout],
    seconds: float,
    note: str | None,
) -> JsonObject:
    """Return the content of `eval.json`. Its `rewards` have the primary reward as `reward`, and the others by
    name; another one of that name is `reward/reward`."""
    config = run.resolved()
    primary = next((next(iter(item.rewards)) for item in finished if item.rewards), None)
    failures = [item.rollout.failure for item in finished if item.rollout.failure]
    rewards = {} if scores.primary is None else {"reward": scores.primary}
    rewards |= {"reward/reward" if name == "reward" else name: one for name, one in scores.others.items()}
    return {
        "agent": run.agent.display_name,
        "model": config["model"],
        "lora_adapter": config["lora_adapter"],
        "tasks": scores.tasks,
        "samples": run.chosen.samples,
        "rollouts": scores.rollouts,
        "failed": scores.failed,
        "lost": sum(failure.kind in ("infrastructure", "cancelled") for failure in failures),
        "failures": {
            text: sum(f.error == text for f in failures) for text in sorted({f.error for f in failures})
        },
        "unscored": scores.unscored,
        "primary": primary,
        "rewards": {name: _spread(spread) for name, spread in rewards.items()},
        "best_of": {str(k): value for k, value in scores.best_of.items()},
        "pass_at": {str(k): value for k, value in scores.pass_at.items()},
        "calls": scores.calls,
        "tokens": scores.tokens,
        "tokens_per_rollout": scores.tokens / scores.rollouts,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(scores.tokens / seconds, 1),
        "notes": [note] if note else [],
        "config": config,
    }


def find_adapter(folder: str) -> str:
    """Return the absolute path of a peft adapter's folder.

    Raises:
        ModelNotFoundError: the folder does not exist, or contains no adapter.
    """
    path = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise ModelNotFoundError(
            f"there is no adapter folder {path}; give the folder to which peft saved the adapter"
        )
    if missing := missing_files(path):
        raise ModelNotFoundError(
            f"{path} is not a LoRA adapter in peft's format: {', '.join(missing)} is missing"
        )
    return path


def eval_line(item: FinishedRollout, task: int, sample: int) -> JsonObject:
    """Return the content of a rollout's line in `eval.jsonl`.

    Args:
        task: index of the task.
        sample: index of the rollout among its task's.
    """
    rollout, attempt = item.rollout, item.rollout.attempt
    ended = attempt.end_time if attempt else None
    texts = [span.attributes[OUTPUT_MESSAGES] for span in item.spans if OUTPUT_MESSAGES in span.attributes]
    return {
        "task": plain(rollout.input),
        "task_index": task,
        "sample": sample,
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "error": rollout.failure.error if rollout.failure else None,
        "failure": rollout.failure.kind if rollout.failure else None,
        "reward": item.reward,
        "rewards": item.rewards,
        "calls": len(texts),
        "tokens": sum(len(call.output_ids) for call in item.generations),
        "seconds": round(ended - attempt.start_time, 4) if attempt and ended is not None else None,
        "text": _text(texts[-1]) if texts else None,
    }


def _text(messages: str) -> str | None:
    """Return the text of the last recorded message; None if it has none, such as a message with only tool
    calls."""
    content = json.loads(messages)[-1].get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content


def ignored_sampling(finished: Iterable[FinishedRollout], wanted: JsonObject) -> str | None:
    """Return a note about sampling parameters that the agent did not pass on, by the recorded calls; None if
    it did."""
    calls = [call.sampling for item in finished for call in item.generations]
    defaults = {"temperature": 1.0, "top_p": 1.0}
    parts = []
    for name in defaults.keys() & wanted.keys():
        others = [
            value for sampling in calls if (value := sampling.get(name, defaults[name])) != wanted[name]
        ]
        if others:
            parts.append(
                f"{len(others)} of {len(calls)} calls were sampled at {name} {others[0]:g}, not "
                f"{wanted[name]:g}"
            )
    if not parts:
        return None
    return (
        f"{'; '.join(sorted(parts))}: the agent does not use llm.sampling_parameters. Pass them to its client"
    )


def rewards_by_name(finished: Iterable[FinishedRollout]) -> dict[str, list[float]]:
    """Return all rewards of succeeded rollouts, by name."""
    rewards: dict[str, list[float]] = {}
    for item in finished:
        if item.rollout.status == "succeeded":
            for name, value in item.rewards.items():
                rewards.setdefault(name, []).append(value)
    return rewards


def _spread(spread: Spread) -> JsonObject:
    interval = spread.interval
    return {
        "mean": spread.mean,
        "std": spread.std,
        "standard_error": spread.error,
        "interval_95": list(interval) if interval else None,
        "rollouts": spread.rollouts,
    }
