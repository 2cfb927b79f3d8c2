"""APO: the algorithm that optimises an agent's prompt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.beam import BeamSearch
from raylight.algorithms.apo.critic import PromptCritic, client_on_current_loop
from raylight.algorithms.apo.history import History
from raylight.algorithms.apo.prompt_search import BEST_FILE, PromptSearch, fingerprint
from raylight.algorithms.apo.settings import ApoSettings
from raylight.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Task = TypeVar("Task")
"""Type of the tasks, as in `APO[MyTask](client)`."""
RESULT_FILE = "apo.json"
EXCERPT_CHARACTERS = 60
"""Characters of a prompt in the table."""


class APO(PromptSearch[ApoSettings], Generic[Task]):
    """Automatic prompt optimisation after ProTeGi (Pryzant et al. 2023, https://arxiv.org/abs/2305.03495).

    The seed is the first `PromptTemplate` among the resources. In each round, prompts of the beam are rolled
    out on batches of training tasks. One model criticises the prompt by these rollouts (a textual gradient),
    another rewrites it by the critique. The beam and the rewrites are scored on one batch of validation
    tasks, and the best form the next beam. The first of them is scored on all validation tasks; it becomes
    the best prompt if its score is strictly higher.

    A rewrite with missing or unknown placeholders, with invalid syntax, or of a text that was tried before is
    rejected and counted. A rollout that failed, timed out or has no reward scores `failure_reward`;
    infrastructure failures are excluded.

    Files in the run directory: `apo.json` (every prompt with its scores and parent; `fit(resume=...)` resumes
    from it) and `best_prompt.txt`. At the end, the latest resources in the store hold the best
    prompt.

    Args:
        async_openai_client: client for both models; it retries transient errors itself (`max_retries`).
        gradient_model: name of the model that criticises prompts.
        apply_edit_model: name of the model that rewrites prompts.
        diversity_temperature: sampling temperature of both models; None sends none.
        gradient_batch_size: training tasks per critique.
        val_batch_size: validation tasks on which the prompts of a round are compared.
        beam_width: prompts kept after a round, and parents in a round.
        branch_factor: rewrites per parent.
        beam_rounds: rounds of the search.
        rollout_batch_timeout: seconds for the rollouts of one prompt on one batch, including the time in the
            queue.
        run_initial_validation: score the seed on all validation tasks first, so that only a better prompt
            replaces it.
        failure_reward: score of a rollout that failed, timed out or has no reward. None: the lowest reward of
            the search, at most 0; scores follow when it falls.
        served_model: folder or name of a model that the run serves to agents, as `llm` or for every LLM
            without an endpoint; None: no model.
        max_concurrent: most prompts that are rolled out or criticised at a time.
        seed: seed of batches, parents and variants of requests.

    Raises:
        ConfigError: an argument is out of range or of a wrong type.
    """

    result_file = RESULT_FILE
    use_of_train = "criticises prompts on"

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
        failure_reward: float | None = None,
        served_model: str | None = None,
        max_concurrent: int = 8,
        seed: int = 0,
    ) -> None:
        settings = ApoSettings(
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
            failure_reward=failure_reward,
            max_concurrent=max_concurrent,
            seed=seed,
        )
        super().__init__(async_openai_client, served_model, settings)
        self.history: History | None = None
        """History of the search; None before `run`."""

    def total_steps(self, n_train: int) -> int:
        return self.settings.beam_rounds

    def get_best_prompt(self) -> PromptTemplate:
        """Return the prompt with the highest score on all validation tasks.

        Raises:
            ConfigError: the search has not run.
        """
        if self.history is None:
            raise ConfigError(
                "there is no best prompt yet; run APO first, by Trainer(algorithm=apo, ...).fit(...)"
            )
        return self.history.best_candidate.template

    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        """Search for a better prompt.

        Raises:
            ConfigError: the store or a prompt among the resources is missing.
            DatasetError: there are no training or no validation tasks.
            PromptError: the seed is malformed.
            CriticError: the models that criticise and rewrite do not answer.
            CheckpointError: the search to resume has another seed or other tasks.
            RolloutsFailedError: a batch of rollouts was lost, or the agent never returned a reward.
        """
        train, val, name, seed = self.read_inputs(train_dataset, val_dataset)
        context = self._run_context
        folder = None if context is None else context.folder
        history = self._load_or_begin(
            seed, name, fingerprint(val), None if context is None else context.resume_file
        )
        self.history = history
        console = self.console()
        evaluator = self.evaluator(name, train, val, agent_works=history.has_scores)
        async with client_on_current_loop(self.client) as client:
            critic = PromptCritic(client, self.settings)
            search = BeamSearch(
                self.settings,
                history,
                len(train),
                len(val),
                evaluator,
                critic.critique,
                critic.edit,
                on_change=lambda: _save(history, folder),
                log=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            )
            await self._search(search)
        await evaluator.make_latest(self.get_best_prompt())
        print_result(history, console)
        if folder is not None:
            console.print(
                *(f"  {folder / file}" for file in (RESULT_FILE, BEST_FILE)),
                sep="\n",
                soft_wrap=True,
            )

    def _load_or_begin(
        self, seed: PromptTemplate, name: str, tasks: str, resume_file: Path | None
    ) -> History:
        if resume_file is None:
            return History.begin(seed, name, tasks, self.resolved())
        history = History.load(resume_file)
        history.check_same_search(seed, name, tasks, resume_file)
        return history.model_copy(update={"settings": self.resolved()})

    async def _search(self, search: BeamSearch) -> None:
        history, context = search.history, self._run_context
        seed = history.candidates[0]
        was_scored = seed.val_score is not None
        await search.begin()
        if context is not None and not was_scored and seed.val_score is not None:
            context.step(0, {"val/reward": seed.val_score})
        while history.rounds_done < self.settings.beam_rounds:
            started, number = time.perf_counter(), history.rounds_done + 1
            if context is not None:
                context.stage(f"round {number}/{self.settings.beam_rounds}")
            await search.round()
            if context is not None:
                context.step(number, round_metrics(history, time.perf_counter() - started))


def round_metrics(history: History, seconds: float) -> dict[str, float]:
    """Return the metrics of the last finished round."""
    number, beam = history.rounds_done, history.beam
    assert beam[0].val_score is not None, "the leader of a finished round was validated"
    best = history.best_candidate.val_score
    assert best is not None, "the best of a finished round was validated"
    return {
        "val/reward": beam[0].val_score,
        "apo/best": best,
        "apo/beam_mean": sum(candidate.batch_scores[number] for candidate in beam) / len(beam),
        "apo/made": float(len(history.created_in(number))),
        "apo/rejected": float(sum(rejection.round == number for rejection in history.rejections)),
        "time/round_s": seconds,
    }


def _save(history: History, folder: Path | None) -> None:
    """Write the history and the best prompt into the run directory."""
    if folder is not None:
        history.save(folder / RESULT_FILE)
        (folder / BEST_FILE).write_text(history.best_candidate.template.template, encoding="utf-8")


def prompt_table(history: History) -> Table:
    """Return a table of all prompts with their parents, scores and first words; a star marks the best."""
    table = Table(title="prompts tried", title_style="bold")
    for name in ("prompt", "from", "round", "batch score", "validation", "in beam of", "text"):
        table.add_column(name, justify="left" if name in ("prompt", "from", "text") else "right")
    for candidate in history.candidates:
        best = candidate.version == history.best
        rounds = [
            str(number) for number, beam in enumerate(history.beams) if number and candidate.version in beam
        ]
        table.add_row(
            f"{candidate.version} *" if best else candidate.version,
            candidate.parent or "-",
            str(candidate.round or "seed"),
            format_score(candidate.last_score),
            format_score(candidate.val_score),
            ", ".join(rounds) or "-",
            Text(excerpt(candidate.template.template)),
            style="bold green" if best else None,
        )
    return table


def print_result(history: History, console: Console) -> None:
    """Print the table, the number of rejected rewrites, and the best prompt."""
    console.print(prompt_table(history))
    if kinds := history.rejected_by_kind():
        console.print(
            Text(
                f"{sum(kinds.values())} rewrites rejected: "
                + ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
                style="yellow",
            ),
            soft_wrap=True,
        )
    best, seed = history.best_candidate, history.candidates[0]
    before = f"; the seed {format_score(seed.val_score)}" if best is not seed else ""
    console.print(
        Text(f"best prompt: {best.version}, validation {format_score(best.val_score)}{before}", style="bold"),
        soft_wrap=True,
    )
    console.print(Text(best.template.template), soft_wrap=True)


def format_score(value: float | None) -> str:
    """Return a score with three decimals; "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def excerpt(text: str) -> str:
    """Return the beginning of a prompt on one line."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARACTERS else f"{line[: EXCERPT_CHARACTERS - 1]}…"
