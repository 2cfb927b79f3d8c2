"""A run that serves a fixed model to the agents of an algorithm with its own loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylight.agent.resources import LLM, NamedResources
from raylight.engines.registry import choose_engine
from raylight.trainer.inputs import resolve_model
from raylight.trainer.plan import ServedPlan, with_policy
from raylight.trainer.served_session import ServedSession

if TYPE_CHECKING:
    from raylight.trainer.trainer import Trainer

SERVING_ARGUMENTS = frozenset({"engine", "port", "seed"})
"""Arguments of a Trainer that such a run reads."""


@dataclass(frozen=True)
class ServedAlgorithmPlan(ServedPlan):
    """The components of a run that serves a fixed model."""

    def resolved(self) -> dict[str, Any]:
        return super().resolved() | {
            "seed": self.seed,
            "model": self.model_path,
            "engine": self.engine.model_dump(mode="json"),
        }


def serving_plan(common: dict[str, Any], trainer: Trainer, model: str) -> ServedAlgorithmPlan:
    """Return the plan of a run that serves a fixed model.

    Args:
        common: fields of `RunPlan`.
        model: folder, name in the local cache, or the upstream's name.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: the engine is not installed.
    """
    kind = choose_engine(trainer.engine)
    update: dict[str, Any] = {"kind": kind}
    if kind == "upstream":
        update["upstream_model"] = trainer.engine.upstream_model or model
    return ServedAlgorithmPlan(
        **common,
        model_path="" if kind == "upstream" else resolve_model(model),
        engine=trainer.engine.model_copy(update=update),
        seed=trainer.seed,
    )


class ServedAlgorithmSession(ServedSession):
    """A ServedSession whose `resources` contain the served model, for the algorithm to use."""

    def _resources_with(self, llm: LLM) -> NamedResources:
        self.resources = with_policy(self.resources, llm)
        return self.resources
