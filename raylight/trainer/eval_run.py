"""A run that scores a model with engines and runners, without learners."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.config import EngineConfig, StoreConfig
from raylight.disk import disk_errors
from raylight.engines.registry import choose_engine
from raylight.errors import ConfigError
from raylight.files import write_atomic
from raylight.runner.actor import RunnerPayload
from raylight.semconv import OUTPUT_MESSAGES
from raylight.trainer.cluster import ray_session
from raylight.trainer.cluster_monitor import run_until_lost
from raylight.trainer.display import make_display, print_scores
from raylight.trainer.engine_nodes import plan_for_nodes
from raylight.trainer.eval_session import EvalPlan, EvalSession, EvalSettings, find_adapter
from raylight.trainer.hardware import plan_for_hardware
from raylight.trainer.inputs import resolve_model
from raylight.trainer.outcome import raise_if_hopeless
from raylight.trainer.plan import MODEL_NAME, merge_resources, with_policy
from raylight.trainer.plot import plot_histogram
from raylight.trainer.report import ProgressReporter
from raylight.trainer.scores import Scores, Spread, measure
from raylight.types import FinishedRollout

if TYPE_CHECKING:
    from raylight.trainer.trainer import Trainer

COLLECT_CHUNK = 256
"""Maximum number of rollouts whose spans are in memory at the same time."""


class EvalRun:
    """Rolls every task out `samples` times and scores the rollouts.

    Writes `eval.json` (all scores, and the configuration), `eval.jsonl` (a line per rollout), `eval.png` (the
    rewards) and `eval.db` (the store) to `folder`. Other files there are unchanged, so the folder may be a
    training run's directory.

    Raises:
        RaylightError: the agent, the model or the adapter does not exist or cannot be used.
    """

    def __init__(
        self, trainer: Trainer, agent: LitAgent, tasks: list[Any], settings: EvalSettings, folder: Path
    ) -> None:
        self.trainer = trainer
        self.agent = agent
        self.tasks = tasks
        self.folder = folder
        resources = merge_resources(agent, trainer.initial_resources)
        agent.check(with_policy(resources, LLM(model=MODEL_NAME)), ("val",))
        path, engine = _engine(trainer.engine, settings)
        if settings.lora_adapter is not None:
            settings = settings.model_copy(update={"lora_adapter": find_adapter(settings.lora_adapter)})
        self.plan = EvalPlan(
            name=f"raylight-eval-{secrets.token_hex(4)}",
            payload=RunnerPayload(agent, trainer.tracer, trainer.hooks, secrets.token_hex(16)),
            runner=trainer.runner,
            store=trainer.store,
            store_path=(isinstance(trainer.store, StoreConfig) and trainer.store.path)
            or str(folder / "eval.db"),
            resources=resources,
            model_path=path,
            engine=engine,
            seed=trainer.seed,
            settings=settings,
            n_tasks=len(tasks),
        )

    def run(self, address: str | None, log_to_driver: bool) -> dict[str, Any]:
        """Run the evaluation; return the content of `eval.json`.

        Raises:
            RaylightError: the model could not be served, or no rollout was scored.
        """
        self._clear()
        show = self.trainer.progress
        start_timeout_s = self.plan.runner.start_timeout_s
        with (
            disk_errors(self.folder),
            ray_session(address, log_to_driver, start_timeout_s) as connection,
            make_display(show, 0) as display,
        ):
            progress = ProgressReporter(display)
            progress.stage(f"run {self.plan.name}")
            connection.announce(display.note, display.stage)
            plan, notes = plan_for_hardware(self.plan, self.trainer.engine)
            for note in notes:
                display.note(note)
            self.plan = plan_for_nodes(plan, self.trainer.engine)
            work = self._work(progress, connection.owns_cluster)
            figures = run_until_lost(work, "Start the evaluation again")
        if show:
            print_scores(figures, str(self.folder))
        return figures

    def _clear(self) -> None:
        """Create the folder and remove the results of an earlier evaluation in it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("eval.json", "eval.png"):
                (self.folder / name).unlink(missing_ok=True)
            (self.folder / "eval.jsonl").write_text("")
        except OSError as error:
            raise ConfigError(
                f"output_dir {self.folder} cannot be written: {error.strerror}; choose another folder"
            ) from None

    async def _work(self, progress: ProgressReporter, owns_cluster: bool) -> dict[str, Any]:
        settings = self.plan.settings
        async with EvalSession(self.plan, progress.stage, owns_cluster) as session:
            started = time.perf_counter()
            work = session.run_tasks(self.tasks, "val", settings.samples, progress.rollout_progress("val"))
            ids = await session.watched(work)
            seconds = time.perf_counter() - started
            finished = await self._collect(session, ids)
            progress.failures(finished)
            progress.stage("stopping")
        raise_if_hopeless(finished, settings.failure_reward)
        scores = measure(finished, settings.samples, settings.failure_reward, settings.pass_reward)
        if note := ignored_sampling(finished, settings.sampling):
            progress.note(note)
        figures = self._figures(scores, finished, seconds, note)
        write_atomic(self.folder / "eval.json", json.dumps(figures, indent=2) + "\n")
        plot_histogram(rewards_by_name(finished), self.folder / "eval.png")
        return figures

    async def _collect(self, session: EvalSession, ids: list[str]) -> list[FinishedRollout]:
        """Write a line per rollout; return the finished rollouts without their spans."""
        finished: list[FinishedRollout] = []
        with (self.folder / "eval.jsonl").open("a") as file:
            for start in range(0, len(ids), COLLECT_CHUNK):
                chunk = ids[start : start + COLLECT_CHUNK]
                for item in await session.store.collect(chunk, with_spans=True, with_span_tokens=False):
                    task, sample = divmod(len(finished), self.plan.settings.samples)
                    file.write(json.dumps(eval_line(item, task, sample), default=repr) + "\n")
                    finished.append(replace(item, spans=[]))
        return finished

    def _figures(
        self, scores: Scores, finished: list[FinishedRollout], seconds: float, note: str | None
    ) -> dict[str, Any]:
        primary = next((next(iter(item.rewards)) for item in finished if item.rewards), None)
        failures = [
            item.rollout.attempt.failure
            for item in finished
            if item.rollout.attempt and item.rollout.attempt.failure
        ]
        return {
            "agent": self.agent.display_name,
            "model": self.plan.model_path or self.plan.settings.model,
            "lora_adapter": self.plan.settings.lora_adapter,
            "tasks": scores.tasks,
            "samples": self.plan.settings.samples,
            "rollouts": scores.rollouts,
            "failed": scores.failed,
            "lost": sum(failure.kind in ("infrastructure", "cancelled") for failure in failures),
            "failures": {
                text: sum(f.error == text for f in failures) for text in sorted({f.error for f in failures})
            },
            "unscored": scores.unscored,
            "primary": primary,
            "rewards": {name: _spread(spread) for name, spread in scores.rewards.items()},
            "best_of": {str(k): value for k, value in scores.best_of.items()},
            "pass_at": {str(k): value for k, value in scores.pass_at.items()},
            "calls": scores.calls,
            "tokens": scores.tokens,
            "tokens_per_rollout": scores.tokens / scores.rollouts,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(scores.tokens / seconds, 1),
            "notes": [note] if note else [],
            "config": self.plan.resolved(),
        }


def _engine(config: EngineConfig, settings: EvalSettings) -> tuple[str, EngineConfig]:
    """Return the model's folder, empty for an upstream model, and the engine's settings with its resolved
    kind."""
    kind = choose_engine(config)
    update: dict[str, Any] = {"kind": kind}
    if kind == "upstream":
        if settings.lora_adapter is not None:
            raise ConfigError(
                "lora_adapter: an upstream model takes no adapter from raylight; leave it out, or serve the "
                "model with raylight"
            )
        return "", config.model_copy(
            update=update | {"upstream_model": config.upstream_model or settings.model}
        )
    if settings.lora_adapter is not None:
        update["max_adapters"] = max(config.max_adapters, 1)
    return resolve_model(settings.model), config.model_copy(update=update)


def eval_line(item: FinishedRollout, task: int, sample: int) -> dict[str, Any]:
    """Return the content of a rollout's line in `eval.jsonl`.

    Args:
        task: index of the task.
        sample: index of the rollout among those of its task.
    """
    rollout, attempt = item.rollout, item.rollout.attempt
    ended = attempt.end_time if attempt else None
    texts = [span.attributes[OUTPUT_MESSAGES] for span in item.spans if OUTPUT_MESSAGES in span.attributes]
    return {
        "task": rollout.input,
        "task_index": task,
        "sample": sample,
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "error": attempt.failure.error if attempt and attempt.failure else None,
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


def ignored_sampling(finished: Iterable[FinishedRollout], wanted: dict[str, Any]) -> str | None:
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


def _spread(spread: Spread) -> dict[str, Any]:
    interval = spread.interval
    return {
        "mean": spread.mean,
        "std": spread.std,
        "standard_error": spread.error,
        "interval_95": list(interval) if interval else None,
        "rollouts": spread.rollouts,
    }
