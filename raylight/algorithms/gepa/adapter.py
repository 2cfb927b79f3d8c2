"""gepa's view of a run: prompts are evaluated by rollouts, and rollouts are described for reflection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.critic import ask_model
from raylight.algorithms.apo.edits import RejectedEdit, parse_rewrite
from raylight.algorithms.apo.evaluator import PromptEvaluator
from raylight.algorithms.apo.prompts import placeholder_rules
from raylight.algorithms.apo.trials import lowest_reward, trial_record
from raylight.errors import CriticError, RolloutsFailedError
from raylight.types import JsonObject, RolloutMode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")
Place = tuple[RolloutMode, int]
"""Dataset and index of a task."""


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
        """Continue from a state."""
        self.rejected = list(state.get("rejected", []))
        self._failed = dict(state.get("failed", {}))
        self._failure_reward = state.get("failure_reward", self._failure_reward)

    def evaluate(self, batch: list[Place], candidate: dict[str, str], capture_traces: bool = False) -> Any:
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
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return rollouts as records for the model that reflects."""
        return {
            name: [trial_record(trial) for trial in eval_batch.trajectories] for name in components_to_update
        }

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
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
            return {self.name: parse_rewrite(self.seed, f"<prompt>{text}</prompt>").template}
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

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the run's event loop, and return its result."""
        if self.stopped.is_set():
            work.close()
            raise asyncio.CancelledError
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._pending = future
        if self.stopped.is_set():  # meanwhile, so that `stop` has not seen it
            future.cancel()
        return future.result()
