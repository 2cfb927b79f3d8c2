"""Base of the algorithms that search for a better prompt: their client, seed, tasks and adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from rich.console import Console

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.evaluator import PromptEvaluator
from raylight.algorithms.apo.settings import SearchSettings
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import as_list
from raylight.errors import ConfigError, DatasetError, PromptError
from raylight.traces.messages import TraceToMessages
from raylight.types import JsonObject

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BEST_FILE = "best_prompt.txt"
S = TypeVar("S", bound=SearchSettings)


class PromptSearch(Algorithm, Generic[S]):
    """Search for a better prompt than the first `PromptTemplate` among the resources.

    Args:
        client: client of the models that criticise and rewrite prompts.
        served_model: folder or name of a model that the run serves to agents; None: no model.

    Raises:
        ConfigError: `client` is not an asynchronous client of OpenAI.
    """

    use_of_train: ClassVar[str]
    """Verb phrase of the training tasks' use, for messages."""

    def __init__(self, client: AsyncOpenAI, served_model: str | None, settings: S) -> None:
        from openai import OpenAI

        if not hasattr(client, "chat") or isinstance(client, OpenAI):
            raise ConfigError(
                f"async_openai_client is {client!r:.80}; {type(self).__name__} needs an openai.AsyncOpenAI "
                "client"
            )
        self.client, self.served_model, self.settings = client, served_model, settings

    def resolved(self) -> JsonObject:
        return self.settings.model_dump(mode="json") | {"served_model": self.served_model}

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """Return the name and the template of the first prompt among the resources.

        Raises:
            ConfigError: the prompt is missing.
        """
        for name, resource in (self.get_initial_resources() or {}).items():
            if isinstance(resource, PromptTemplate):
                return name, resource
        raise ConfigError(
            f"the resources have no PromptTemplate, from which {type(self).__name__} starts; add one: "
            "Trainer(initial_resources={'prompt_template': PromptTemplate(template='...')})"
        )

    def get_adapter(self) -> TraceToMessages:
        """Return the adapter that converts spans into conversations for the critic.

        Raises:
            ConfigError: the Trainer has an adapter of another type.
        """
        adapter = None if self._trainer is None else getattr(self.get_trainer(), "adapter", None)
        if adapter is not None and not isinstance(adapter, TraceToMessages):
            raise ConfigError(
                f"the Trainer's adapter is a {type(adapter).__name__}, and {type(self).__name__} needs "
                "TraceToMessages; leave adapter out"
            )
        return adapter or (self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages())

    def read_inputs(
        self, train_dataset: object, val_dataset: object
    ) -> tuple[list[object], list[object], str, PromptTemplate]:
        """Return training tasks, validation tasks, and name and template of the seed.

        Raises:
            ConfigError: the resources have no prompt.
            DatasetError: there are no training or no validation tasks.
            PromptError: the seed is malformed.
        """
        train, val = as_list(train_dataset, "train_dataset"), as_list(val_dataset, "val_dataset")
        for dataset, tasks in (("train_dataset", train), ("val_dataset", val)):
            if not tasks:
                raise DatasetError(
                    f"{dataset} is missing; {type(self).__name__} {self.use_of_train} train_dataset and "
                    "scores prompts on val_dataset"
                )
        name, seed = self.get_seed_prompt_template()
        try:
            seed.placeholders()
        except PromptError as error:
            raise PromptError(f"resource {name!r}: {error}") from None
        return train, val, name, seed

    def evaluator(
        self, name: str, train: list[object], val: list[object], agent_works: bool
    ) -> PromptEvaluator:
        """Return the evaluator of prompts; its arguments are as there and in `read_inputs`."""
        context = self._run_context
        return PromptEvaluator(
            self.get_store(),
            self.get_initial_resources() or {},
            name,
            {"train": train, "val": val},
            self.settings.rollout_batch_timeout,
            self.get_adapter(),
            report_failures=(lambda finished: None) if context is None else context.report_failures,
            agent_works=agent_works,
        )

    def console(self) -> Console:
        """Return the console for results, which is quiet if the Trainer shows no progress."""
        return Console(quiet=not (self._trainer is None or getattr(self.get_trainer(), "progress", True)))


def fingerprint(tasks: Sequence[object]) -> str:
    """Return a digest of tasks that is the same in every process."""
    text = json.dumps(tasks, skipkeys=True, default=lambda item: type(item).__qualname__)
    return f"{len(tasks)} tasks, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
