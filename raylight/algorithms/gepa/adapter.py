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
from raylight.algorithms.apo.trials import Trial, trial_record
from raylight.errors import CriticError, RolloutsFailedError
from raylight.types import RolloutMode

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
    """

    propose_new_texts = None

    def __init__(
        self,
        name: str,
        seed: PromptTemplate,
        evaluator: PromptEvaluator,
        client: AsyncOpenAI,
        model: str,
        temperature: float | None,
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

    def stop(self) -> None:
        """End the search with its current call."""
        self.stopped.set()
        if self._pending is not None:
            self._pending.cancel()

    def get_adapter_state(self) -> dict[str, Any]:
        """Return what the package keeps in its state."""
        return {"rejected": list(self.rejected)}

    def set_adapter_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.rejected = list(state.get("rejected", []))

    def evaluate(self, batch: list[Place], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Roll a prompt out on tasks; a prompt that cannot be filled in scores 0 without rollouts.

        Raises:
            RolloutsFailedError: the infrastructure lost a rollout.
        """
        from gepa.core.adapter import EvaluationBatch

        if not batch:  # the seed of a search that goes on has its scores
            return EvaluationBatch(outputs=[], scores=[])
        try:
            template = self._template(candidate[self.name])
        except RejectedEdit as error:
            self.rejected.append({"reason": str(error), "text": candidate[self.name]})
            trials = [Trial(None, "failed", error=str(error)) for _ in batch]
        else:
            modes = {mode for mode, _ in batch}
            assert len(modes) == 1, "gepa evaluates tasks of one dataset at a time"
            indices = [index for _, index in batch]
            trials = list(self._call(self._evaluator(template, indices, modes.pop())).trials)
        if lost := [trial for trial in trials if trial.outcome == "lost"]:
            raise RolloutsFailedError(
                f"{len(lost)} of {len(trials)} rollouts of a prompt were lost to the infrastructure: "
                f"{lost[0].error}; continue with fit(resume='auto')"
            )
        scores = [trial.score for trial in trials]
        return EvaluationBatch(
            outputs=[trial.outcome for trial in trials],
            scores=scores,
            trajectories=trials if capture_traces else None,
            num_metric_calls=len(trials),
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return rollouts as records for the model that reflects."""
        return {
            name: [trial_record(trial) for trial in eval_batch.trajectories] for name in components_to_update
        }

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return the model's answer to a request for reflection; empty, which is rejected, if it did not
        answer.

        Raises:
            CriticError: no request can succeed: the API key, the model's name or the base URL is wrong.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self._call(ask_model(self._client, self._model, messages, self._temperature))
        except RejectedEdit as error:
            self.rejected.append({"reason": str(error), "text": error.text})
            return ""
        except CriticError as error:  # gepa goes on after errors of a round
            self.error = error
            self.stopped.set()
            raise

    def reflection_template(self) -> str:
        """Return gepa's request for a new prompt, with the rules for placeholders."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature

        return f"{InstructionProposalSignature.default_prompt_template}\n\n{placeholder_rules(self.seed)}"

    def _template(self, text: str) -> PromptTemplate:
        """Return a prompt with this text.

        Raises:
            RejectedEdit: it is empty or malformed, or has other placeholders than the seed.
        """
        if text == self.seed.template:
            return self.seed
        return parse_rewrite(self.seed, f"<prompt>{text}</prompt>")

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
