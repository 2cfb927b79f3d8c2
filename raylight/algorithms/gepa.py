"""GEPA: reflective evolution of an agent's prompt, by the package gepa."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from raylight._utils.bounds import MAX_COUNT, MAX_SAMPLES
from raylight._utils.files import write_atomic
from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.critic import ask_model, client_on_current_loop
from raylight.algorithms.apo.edits import RejectedEdit, check_rewrite
from raylight.algorithms.apo.evaluator import PromptEvaluator
from raylight.algorithms.apo.prompt_search import BEST_FILE, PromptSearch, fingerprint
from raylight.algorithms.apo.prompts import placeholder_rules
from raylight.algorithms.apo.settings import SearchSettings
from raylight.algorithms.apo.trials import lowest_reward, trial_record
from raylight.errors import CheckpointError, ConfigError, CriticError, RolloutsFailedError
from raylight.traces.reward_spans import MAX_REWARD
from raylight.types import JsonObject, RolloutMode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")
Place = tuple[RolloutMode, int]
"""Dataset and index of a task."""
RESULT_FILE, STATE_FOLDER = "gepa.json", "gepa"
SEARCH_FILE, PACKAGE_STATE = "search.json", "gepa_state.bin"
"""Files in STATE_FOLDER: what identifies the search, and the state of the package after a round."""


class GepaSettings(SearchSettings):
    """Settings of the search; `GEPA` documents each."""

    reflection_model: str = Field(default="gpt-5-mini", min_length=1)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    max_rollouts: int = Field(default=200, ge=1, le=MAX_COUNT)
    minibatch_size: int = Field(default=3, ge=1, le=MAX_SAMPLES)
    perfect_score: float = Field(default=1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    use_merge: bool = False


class GEPA(PromptSearch[GepaSettings]):
    """Genetic-Pareto prompt evolution (Agrawal et al. 2025, https://arxiv.org/abs/2507.19457).

    The seed is the first `PromptTemplate` among the resources. The package gepa holds a pool of prompts,
    chooses one from the Pareto front over validation tasks, and rolls it out on a few training tasks. A model
    reads the conversations, rewards, errors and the agent's own `rl.emit_message` texts, and writes a new
    prompt. One that is better on the same tasks is scored on all validation tasks, and joins the pool.

    A prompt with other placeholders than the seed's is rejected without rollouts, and counted. A rollout that
    failed, timed out or has no reward scores `failure_reward`; infrastructure failures end the search, which
    `resume` continues.

    Files in the run directory: `gepa.json` (every prompt with scores and parents), `gepa/` (the state of the
    package after each round, from which `fit(resume=...)` continues), `best_prompt.txt`. At the end, the
    latest resources in the store hold the best prompt.

    Args:
        async_openai_client: client of the model that reflects; it retries transient errors itself.
        reflection_model: name of that model.
        temperature: its sampling temperature; None sends none.
        max_rollouts: budget; the search ends with the round that exceeds it.
        minibatch_size: training tasks of a round.
        perfect_score: reward at which a task needs no reflection.
        failure_reward: score of a rollout that failed, timed out or has no reward. None: the lowest reward so
            far, at most 0; the best prompt is chosen by the lowest of the whole search.
        use_merge: also merge prompts of the front.
        rollout_batch_timeout: seconds for the rollouts of one prompt on one batch, including the time in the
            queue.
        served_model: folder or name of a model that the run serves to agents; None: no model.
        seed: seed of all choices.

    Raises:
        ConfigError: the package gepa is not installed, or an argument is out of range or of a wrong type.
    """

    result_file = f"{STATE_FOLDER}/{SEARCH_FILE}"
    use_of_train = "reflects on"

    def __init__(
        self,
        async_openai_client: AsyncOpenAI,
        *,
        reflection_model: str = "gpt-5-mini",
        temperature: float | None = 1.0,
        max_rollouts: int = 200,
        minibatch_size: int = 3,
        perfect_score: float = 1.0,
        failure_reward: float | None = None,
        use_merge: bool = False,
        rollout_batch_timeout: float = 3600.0,
        served_model: str | None = None,
        seed: int = 0,
    ) -> None:
        settings = GepaSettings(
            reflection_model=reflection_model,
            temperature=temperature,
            max_rollouts=max_rollouts,
            minibatch_size=minibatch_size,
            perfect_score=perfect_score,
            failure_reward=failure_reward,
            use_merge=use_merge,
            rollout_batch_timeout=rollout_batch_timeout,
            seed=seed,
        )
        super().__init__(async_openai_client, served_model, settings)
        try:
            import gepa  # noqa: F401
        except ModuleNotFoundError:
            raise ConfigError("rl.GEPA needs the package gepa; pip install 'raylight[gepa]'") from None
        self.result: JsonObject | None = None
        """Content of `gepa.json`; None before `run`."""
        self._seed_prompt: PromptTemplate | None = None

    def get_best_prompt(self) -> PromptTemplate:
        """Return the prompt with the highest score on the validation tasks.

        Raises:
            ConfigError: the search has not run.
        """
        if self.result is None or self._seed_prompt is None:
            raise ConfigError(
                "there is no best prompt yet; run GEPA first, by Trainer(algorithm=gepa, ...).fit(...)"
            )
        text = self.result["candidates"][self.result["best"]]["text"]
        return self._seed_prompt.model_copy(update={"template": text})

    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        """Search for a better prompt.

        Raises:
            ConfigError: the store or a prompt among the resources is missing.
            DatasetError: there are no training or no validation tasks.
            PromptError: the seed is malformed.
            CriticError: the model that reflects rejects requests.
            CheckpointError: the search to resume has another seed, other settings or other tasks.
            RolloutsFailedError: rollouts were lost, or the agent never returned a reward.
        """
        train, val, name, seed = self.read_inputs(train_dataset, val_dataset)
        self._seed_prompt = seed
        context = self._run_context
        identity = {"seed": seed.template, "tasks": [fingerprint(train), fingerprint(val)], **self.resolved()}
        folder = None if context is None else context.folder
        state = _prepare_state(folder, None if context is None else context.resume_file, identity)
        goes_on = state is not None and (state / PACKAGE_STATE).exists()
        evaluator = self.evaluator(name, train, val, agent_works=goes_on)
        async with client_on_current_loop(self.client) as client:
            settings = self.settings
            adapter = RolloutAdapter(
                name,
                seed,
                evaluator,
                client,
                settings.reflection_model,
                settings.temperature,
                settings.failure_reward,
            )
            found = await self._optimize(adapter, len(train), len(val), state, goes_on)
        self.result = found | {"rejected": adapter.rejected, "identity": identity}
        await evaluator.make_latest(self.get_best_prompt())
        if folder is not None:
            write_atomic(folder / RESULT_FILE, json.dumps(self.result, indent=2) + "\n")
            (folder / BEST_FILE).write_text(self.get_best_prompt().template, encoding="utf-8")
        best = found["candidates"][found["best"]]
        self.console().print(
            f"best prompt: {found['best']} of {len(found['candidates'])}, validation "
            f"{best['val_score']:.3f}; the seed {found['candidates'][0]['val_score']:.3f}\n{best['text']}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    async def _optimize(
        self, adapter: RolloutAdapter, n_train: int, n_val: int, state: Path | None, goes_on: bool
    ) -> JsonObject:
        """Run the package's loop in a thread, which calls back into this event loop.

        Args:
            goes_on: the state has the scores of the seed.
        """
        settings = self.settings
        progress = GepaProgress(self._run_context, asyncio.get_running_loop(), adapter)

        def optimize() -> Any:
            import gepa

            return gepa.optimize(
                seed_candidate={adapter.name: adapter.seed.template},
                trainset=[("train", index) for index in range(n_train)],
                valset=[("val", index) for index in range(n_val)],
                adapter=adapter,  # type: ignore[arg-type]
                reflection_minibatch_size=settings.minibatch_size,
                perfect_score=settings.perfect_score,
                use_merge=settings.use_merge,
                val_evaluation_policy=_evaluation_policy(not goes_on),
                max_metric_calls=settings.max_rollouts,
                stop_callbacks=lambda _: adapter.stopped.is_set(),
                logger=progress,
                callbacks=[progress],  # type: ignore[list-item]
                run_dir=None if state is None else str(state),
                track_best_outputs=False,
                seed=settings.seed,
            )

        try:
            result = await asyncio.to_thread(optimize)
        except asyncio.CancelledError:
            if adapter.error is None:
                raise
        finally:
            adapter.stop()
        if adapter.error is not None:
            raise adapter.error
        scores = adapter.val_scores(result.candidates, result.val_subscores)
        candidates = [
            {"text": candidate[adapter.name], "parents": parents, "val_score": score, "rollouts": rollouts}
            for candidate, parents, score, rollouts in zip(
                result.candidates,
                result.parents,
                scores,
                result.discovery_eval_counts,
                strict=True,
            )
        ]
        return {
            "best": scores.index(max(scores)),
            "candidates": candidates,
            "rollouts": result.total_metric_calls,
        }


class GepaProgress:
    """Logger and callback of the package, which reports rounds as steps of the run."""

    def __init__(self, context: Any, loop: asyncio.AbstractEventLoop, adapter: RolloutAdapter) -> None:
        self._context, self._loop, self._adapter = context, loop, adapter
        self._ended: tuple[int, dict[str, float]] | None = None
        """Number and metrics of a round that ended, until the package has stored its state."""

    def log(self, message: str) -> None:
        """Drop the package's own lines; what they say is in the metrics and in gepa.json."""

    def on_iteration_end(self, event: Any) -> None:
        """Keep the metrics of a round."""
        state = event["state"]
        scores = self._adapter.val_scores(state.program_candidates, state.prog_candidate_val_subscores)
        self._ended = (
            event["iteration"],
            {
                "val/reward": max(scores),
                "gepa/candidates": float(len(scores)),
                "gepa/rollouts": float(state.total_num_evals),
            },
        )

    def on_state_saved(self, event: Any) -> None:
        """Report the round before. One that was cut off is not stored, and is taken again on resume."""
        if self._context is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._context.step, *self._ended)
        self._ended = None

    on_optimization_end = on_state_saved

    def on_valset_evaluated(self, event: Any) -> None:
        """Show the score of a prompt that was scored on all validation tasks."""
        if self._context is not None:
            text = (
                f"round {event['iteration']}: a prompt has {event['average_score']:.3f} on validation tasks"
            )
            self._loop.call_soon_threadsafe(self._context.stage, text)


def _prepare_state(folder: Path | None, resume_file: Path | None, identity: JsonObject) -> Path | None:
    """Return the folder of the package's state: from the search to resume, or a new one.

    Raises:
        CheckpointError: the state belongs to another search.
    """
    if folder is None:
        return None
    state = folder / STATE_FOLDER
    text = json.dumps(
        {key: value for key, value in identity.items() if key != "max_rollouts"}, sort_keys=True
    )
    if resume_file is not None and resume_file.read_text() != text:
        raise CheckpointError(
            f"{resume_file.parent} is of a search with another prompt, other tasks or other settings; "
            "restore them, or start fresh in another output_dir"
        )
    if resume_file is None or resume_file.parent.resolve() != state.resolve():
        shutil.rmtree(state, ignore_errors=True)
        if resume_file is not None:
            shutil.copytree(resume_file.parent, state)
    state.mkdir(parents=True, exist_ok=True)
    write_atomic(state / SEARCH_FILE, text)
    return state


def _evaluation_policy(scores_seed: bool) -> Any:
    """Return the package's policy of scoring prompts on all validation tasks.

    Args:
        scores_seed: False leaves out the seed, which the package scores before it reads its state.
    """
    from gepa.strategies.eval_policy import FullEvaluationPolicy

    class Policy(FullEvaluationPolicy):
        def get_seed_eval_batch(self, loader: Any) -> list[object]:
            return list(loader.all_ids()) if scores_seed else []

    return Policy()


class RolloutAdapter:
    """Implementation of gepa's `GEPAAdapter`. Its methods are called in gepa's thread.

    Args:
        name: name of the prompt among the resources.
        seed: the prompt whose placeholders all others have.
        evaluator: rolls prompts out.
        client: client of the model that reflects.
        failure_reward: score of a rollout without a reward; None: the lowest reward so far, at most 0.
    """

    def __init__(
        self,
        name: str,
        seed: PromptTemplate,
        evaluator: PromptEvaluator,
        client: AsyncOpenAI,
        model: str,
        temperature: float | None,
        failure_reward: float | None = None,
    ) -> None:
        self.name, self.seed = name, seed
        self._evaluator, self._client, self._model, self._temperature = evaluator, client, model, temperature
        self._loop = asyncio.get_running_loop()
        self._pending: Future[Any] | None = None
        self.stopped = threading.Event()
        self.error: CriticError | None = None
        """Error that ended the search."""
        self.rejected: list[dict[str, str]] = []
        """Texts that were not rolled out, with the reasons."""
        self._fixed_failure_reward = failure_reward
        self._failure_reward = 0.0 if failure_reward is None else failure_reward
        self._failed: dict[str, list[int]] = {}
        """Text of a prompt -> validation tasks whose rollouts have no reward."""

    def stop(self) -> None:
        """End the search with its current call."""
        self.stopped.set()
        if self._pending is not None:
            self._pending.cancel()

    def get_adapter_state(self) -> JsonObject:
        """Return what the package keeps in its state."""
        return {
            "rejected": list(self.rejected),
            "failure_reward": self._failure_reward,
            "failed": dict(self._failed),
        }

    def set_adapter_state(self, state: JsonObject) -> None:
        self.rejected = list(state.get("rejected", []))
        self._failed = dict(state.get("failed", {}))
        self._failure_reward = state.get("failure_reward", self._failure_reward)

    def evaluate(self, batch: list[Place], candidate: dict[str, str], capture_traces: bool = False) -> object:
        """Roll a prompt out on tasks.

        Raises:
            RolloutsFailedError: the infrastructure lost a rollout.
        """
        from gepa.core.adapter import EvaluationBatch

        if not batch:  # the seed of a search that goes on has its scores
            return EvaluationBatch(outputs=[], scores=[])
        modes = {mode for mode, _ in batch}
        assert len(modes) == 1, "gepa evaluates tasks of one dataset at a time"
        mode, indices, text = modes.pop(), [index for _, index in batch], candidate[self.name]
        template = self.seed.model_copy(update={"template": text})
        trials = list(self._call(self._evaluator(template, indices, mode)).trials)
        if lost := [trial for trial in trials if trial.outcome == "lost"]:
            raise RolloutsFailedError(
                f"{len(lost)} of {len(trials)} rollouts of a prompt were lost to the infrastructure: "
                f"{lost[0].error}; continue with fit(resume='auto')"
            )
        if self._fixed_failure_reward is None:
            self._failure_reward = lowest_reward(trials, self._failure_reward)
        scores = [self._failure_reward if trial.score is None else trial.score for trial in trials]
        if mode == "val":
            self._failed[text] = [i for i, trial in zip(indices, trials, strict=True) if trial.score is None]
        return EvaluationBatch(
            outputs=[trial.outcome for trial in trials],
            scores=scores,
            trajectories=trials if capture_traces else None,
            num_metric_calls=len(trials),
        )

    def val_scores(
        self, candidates: Sequence[dict[str, str]], scores: Sequence[Mapping[int, float]]
    ) -> list[float]:
        """Return the mean scores of prompts on validation tasks, with the current score of failed rollouts.

        Args:
            scores: for each prompt, the task's index -> the score when it was rolled out.
        """
        means = []
        for candidate, values in zip(candidates, scores, strict=True):
            failed = self._failed.get(candidate[self.name], [])
            total = sum(self._failure_reward if i in failed else value for i, value in values.items())
            means.append(total / len(values))
        return means

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, object]]]:
        """Return rollouts as records for the model that reflects."""
        return {
            name: [trial_record(trial) for trial in eval_batch.trajectories] for name in components_to_update
        }

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, object]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return the model's rewrite of a prompt; nothing, which ends the round, if no agent could use it.

        Raises:
            CriticError: no request can succeed: the API key, the model's name or the base URL is wrong.
        """
        from gepa.strategies.instruction_proposal import InstructionProposalSignature

        request = {
            "current_instruction_doc": candidate[self.name],
            "dataset_with_feedback": reflective_dataset[self.name],
            "prompt_template": (
                f"{InstructionProposalSignature.default_prompt_template}\n\n{placeholder_rules(self.seed)}"
            ),
        }
        try:
            text = InstructionProposalSignature.run(self._reflect, request)["new_instruction"]
            return {self.name: check_rewrite(self.seed, text.strip()).template}
        except RejectedEdit as error:
            self.rejected.append({"reason": str(error), "text": error.text})
            return {}

    def _reflect(self, prompt: str | list[JsonObject]) -> str:
        """Return the model's answer to a request for reflection.

        Raises:
            CriticError: no request can succeed: the API key, the model's name or the base URL is wrong.
            RejectedEdit: the model did not answer.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self._call(ask_model(self._client, self._model, messages, self._temperature))
        except CriticError as error:  # gepa goes on after errors of a round
            self.error = error
            self.stopped.set()
            raise

    def _call(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine in the run's event loop, and return its result."""
        if self.stopped.is_set():
            work.close()
            raise asyncio.CancelledError
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._pending = future
        if self.stopped.is_set():  # meanwhile, so that `stop` has not seen it
            future.cancel()
        return future.result()
