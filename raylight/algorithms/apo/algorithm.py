"""APO: a better prompt for an agent, by textual gradients and beam search."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.beam import BeamSearch
from raylight.algorithms.apo.critic import PromptCritic, on_this_loop
from raylight.algorithms.apo.evaluator import PromptEvaluator
from raylight.algorithms.apo.history import History
from raylight.algorithms.apo.report import show
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import as_list
from raylight.errors import ConfigError, DatasetError, PromptError
from raylight.traces.messages import TraceToMessages
from raylight.types import RolloutMode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RESULT_FILE = "apo.json"
TREE_FILE = "apo_tree.png"
BEST_FILE = "best_prompt.txt"


class APO(Algorithm):
    """Automatic prompt optimisation after ProTeGi (Pryzant et al. 2023, https://arxiv.org/abs/2305.03495).

    The seed is the first `PromptTemplate` among the resources. In each round, prompts of the beam are rolled out on batches of
    training tasks; a model criticises the prompt by what happened (a textual gradient), another rewrites it by the critique; the
    beam and the rewrites are scored on one batch of validation tasks, and the best are the next beam. The first of them is scored
    on all validation tasks, and is the best prompt if none before did as well.

    A rewrite that lost a placeholder, invented one, cannot be filled or was tried before is rejected and counted. A rollout that
    failed, ran out of time or gave no reward counts as 0; one lost to the infrastructure is left out.

    In the run directory: `apo.json` (every prompt with its scores and parent; `fit(resume=...)` goes on from it), `apo_tree.png`,
    `best_prompt.txt`. When it is over, the latest resources in the store have the best prompt.

    Args:
        async_openai_client: asks the two models; it retries transient errors itself (`max_retries`).
        gradient_model: criticises prompts.
        apply_edit_model: rewrites prompts.
        diversity_temperature: of both; None sends none, for models that take none.
        gradient_batch_size: training tasks that a critique is made from.
        val_batch_size: validation tasks that the prompts of a round are compared on.
        beam_width: prompts that are kept, and parents in a round.
        branch_factor: rewrites of each parent.
        beam_rounds: rounds of the search.
        rollout_batch_timeout: seconds that the rollouts of one prompt on one batch may take, waiting for a runner included.
        run_initial_validation: score the seed on all validation tasks first, so that only a better prompt replaces it.
        served_model: folder or name of a model that the run serves to agents, as `llm` or where an LLM has no endpoint; None: none.
        max_concurrent: prompts that are rolled out, or criticised, at once.
        seed: of batches, parents and ways to ask.

    Raises:
        ConfigError: an argument does not fit.
    """

    result_file = RESULT_FILE

    def __init__(
        self,
        async_openai_client: AsyncOpenAI,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float | None = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        served_model: str | None = None,
        max_concurrent: int = 8,
        seed: int = 0,
    ) -> None:
        from openai import OpenAI

        if not hasattr(async_openai_client, "chat") or isinstance(async_openai_client, OpenAI):
            raise ConfigError(
                f"APO asks its models through an openai.AsyncOpenAI client, not {async_openai_client!r:.80}"
            )
        self.client = async_openai_client
        self.served_model = served_model
        self.settings = ApoSettings(
            gradient_model=gradient_model,
            apply_edit_model=apply_edit_model,
            diversity_temperature=diversity_temperature,
            gradient_batch_size=gradient_batch_size,
            val_batch_size=val_batch_size,
            beam_width=beam_width,
            branch_factor=branch_factor,
            beam_rounds=beam_rounds,
            rollout_batch_timeout=rollout_batch_timeout,
            run_initial_validation=run_initial_validation,
            max_concurrent=max_concurrent,
            seed=seed,
        )
        self.history: History | None = None
        """Every prompt that was tried; None before `run`."""

    def total_steps(self, n_train: int) -> int:
        return self.settings.beam_rounds

    def resolved(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json") | {"served_model": self.served_model}

    def get_best_prompt(self) -> PromptTemplate:
        """The prompt with the highest score on all validation tasks; the seed if none did better.

        Raises:
            ConfigError: it has not run.
        """
        if self.history is None:
            raise ConfigError(
                "there is no best prompt yet: run APO first, by Trainer(algorithm=apo, ...).fit(...)"
            )
        return self.history.best_candidate.template

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """The first prompt among the resources, and its name.

        Raises:
            ConfigError: there is none.
        """
        for name, resource in (self.get_initial_resources() or {}).items():
            if isinstance(resource, PromptTemplate):
                return name, resource
        raise ConfigError(
            "APO needs a prompt to begin with: Trainer(initial_resources={'prompt_template': PromptTemplate(template='...')})"
        )

    def get_adapter(self) -> TraceToMessages:
        """What makes conversations of spans for the critic.

        Raises:
            ConfigError: the Trainer was given one that makes something else.
        """
        given = None if self._trainer is None else getattr(self.get_trainer(), "adapter", None)
        if given is not None and not isinstance(given, TraceToMessages):
            raise ConfigError(
                f"the critic of APO reads conversations, which {type(given).__name__} does not make; leave adapter out"
            )
        return given or (self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages())

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Search.

        Raises:
            ConfigError: there is no store, or no prompt to begin with.
            DatasetError: there are no training or no validation tasks.
            PromptError: the prompt to begin with is malformed.
            CriticError: the models that criticise and rewrite do not answer.
            CheckpointError: the search to go on with is of another prompt or other tasks.
            RolloutsFailedError: a batch of rollouts was lost, or gave no reward.
        """
        train, val = as_list(train_dataset, "train_dataset"), as_list(val_dataset, "val_dataset")
        for name, tasks in (("train_dataset", train), ("val_dataset", val)):
            if not tasks:
                raise DatasetError(
                    f"APO criticises prompts on training tasks and scores them on others; {name} is missing"
                )
        name, seed = self.get_seed_prompt_template()
        try:
            seed.placeholders()
        except PromptError as error:
            raise PromptError(f"resource {name!r}: {error}") from None
        side = self._run_context
        folder = None if side is None else side.folder
        history = self._begin(seed, name, _digest(val), None if side is None else side.resume_file)
        self.history = history
        console = Console(quiet=not (self._trainer is None or getattr(self.get_trainer(), "progress", True)))
        datasets: dict[RolloutMode, Sequence[Any]] = {"train": train, "val": val}
        evaluator = PromptEvaluator(
            self.get_store(),
            self.get_initial_resources() or {},
            name,
            datasets,
            self.settings.rollout_batch_timeout,
            self.get_adapter(),
            tell=(lambda finished: None) if side is None else side.report_failures,
            works=history.has_scores,
        )
        async with on_this_loop(self.client) as client:
            critic = PromptCritic(client, self.settings)
            search = BeamSearch(
                self.settings,
                history,
                len(train),
                len(val),
                evaluator,
                critic.critique,
                critic.edit,
                changed=lambda: _keep(history, folder),
                say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            )
            await self._search(search, folder)
        await evaluator.settle_on(self.get_best_prompt())
        show(history, console)
        if folder is not None:
            console.print(
                *(f"  {folder / file}" for file in (RESULT_FILE, TREE_FILE, BEST_FILE)),
                sep="\n",
                soft_wrap=True,
            )

    def _begin(self, seed: PromptTemplate, name: str, tasks: str, result: Path | None) -> History:
        if result is None:
            return History.begin(seed, name, tasks, self.resolved())
        history = History.load(result)
        history.must_fit(seed, name, tasks, result)
        return history.model_copy(update={"settings": self.resolved()})

    async def _search(self, search: BeamSearch, folder: Path | None) -> None:
        history, side = search.history, self._run_context
        was_scored = history.candidates[0].val_score is not None
        await search.begin()
        await asyncio.to_thread(_draw, history, folder)
        if side is not None and not was_scored and (found := history.candidates[0].val_score) is not None:
            side.step(0, {"val/reward": found})
        while history.rounds_done < self.settings.beam_rounds:
            started, number = time.perf_counter(), history.rounds_done + 1
            if side is not None:
                side.stage(f"round {number}/{self.settings.beam_rounds}")
            await search.round()
            await asyncio.to_thread(_draw, history, folder)
            if side is not None:
                side.step(number, round_metrics(history, time.perf_counter() - started))


def round_metrics(history: History, seconds: float) -> dict[str, float]:
    """The figures of the last round."""
    number, beam = history.rounds_done, history.beam
    assert beam[0].val_score is not None, "the leader of a finished round was validated"
    return {
        "val/reward": beam[0].val_score,
        "apo/best": history.best_candidate.val_score or 0.0,
        "apo/beam_mean": sum(candidate.batch_scores[number] for candidate in beam) / len(beam),
        "apo/made": float(len(history.made_in(number))),
        "apo/rejected": float(sum(rejection.round == number for rejection in history.rejections)),
        "time/round_s": seconds,
    }


def _keep(history: History, folder: Path | None) -> None:
    """Write what there is into the run directory."""
    if folder is not None:
        history.save(folder / RESULT_FILE)
        (folder / BEST_FILE).write_text(history.best_candidate.template.template, encoding="utf-8")


def _draw(history: History, folder: Path | None) -> None:
    if folder is not None:
        from raylight.algorithms.apo.tree_plot import plot_tree

        plot_tree(history, folder / TREE_FILE)


def _digest(tasks: Sequence[Any]) -> str:
    """Tells tasks apart, the same in every process."""
    text = json.dumps(tasks, skipkeys=True, default=lambda item: type(item).__qualname__)
    return f"{len(tasks)} tasks, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
