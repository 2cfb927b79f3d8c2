"""History of a search: every prompt with its parent and scores, and every rejected rewrite."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raylight._utils.files import write_atomic
from raylight.agent.prompts import PromptTemplate
from raylight.errors import CheckpointError
from raylight.types import JsonObject

RejectionKind = Literal["endpoint", "empty", "cut off", "malformed", "placeholders", "duplicate"]


class HistoryModel(BaseModel):
    """Base of the models in the result file."""

    model_config = ConfigDict(extra="forbid")


class Candidate(HistoryModel):
    """Prompt of the search."""

    version: str
    """`v0` for the seed; later prompts are numbered in the order of their creation."""
    template: PromptTemplate
    parent: str | None = None
    """Version of the rewritten prompt; None for the seed."""
    round: int = 0
    """Round in which the prompt was created; 0 for the seed."""
    critique: str = ""
    """Critique of the parent that led to this prompt."""
    batch_scores: dict[int, float] = Field(default_factory=dict)
    """Round -> mean reward on its validation batch."""
    val_score: float | None = None
    """Mean reward on all validation tasks; None if the prompt never led a beam."""
    batch_failures: dict[int, float] = Field(default_factory=dict)
    """Round -> fraction of its rollouts without a reward."""
    val_failures: float = 0.0
    """Fraction of the rollouts on all validation tasks without a reward."""

    @property
    def last_score(self) -> float | None:
        """Mean reward on the latest validation batch; None if there is none."""
        return self.batch_scores[max(self.batch_scores)] if self.batch_scores else None


class Rejection(HistoryModel):
    """Branch of the search without a usable prompt."""

    parent: str
    round: int
    kind: RejectionKind
    reason: str
    text: str = ""
    """Rejected text, if there is any."""


class History(HistoryModel):
    """State of a search, sufficient for resuming it.

    A round is finished once `beams` has its beam; its rewrites are complete once `generated` is its number.
    """

    resource: str
    """Name of the prompt among the agents' resources."""
    tasks: str
    """Fingerprint of the validation tasks."""
    settings: JsonObject
    candidates: list[Candidate]
    rejections: list[Rejection] = Field(default_factory=list)
    beams: list[list[str]]
    """Versions in the beam after each round, best first; the first beam holds the seed only."""
    generated: int = 0
    """Last round whose rewrites are complete."""
    failure_reward: float = 0.0
    """Score of a rollout without a reward."""
    best: str = "v0"
    """Version of the prompt with the highest score on all validation tasks; the seed until there is a
    score."""

    @classmethod
    def begin(cls, seed: PromptTemplate, resource: str, tasks: str, settings: JsonObject) -> History:
        """Return the history of a new search, which holds the seed only."""
        return cls(
            resource=resource,
            tasks=tasks,
            settings=settings,
            candidates=[Candidate(version="v0", template=seed)],
            beams=[["v0"]],
        )

    @property
    def rounds_done(self) -> int:
        """Number of finished rounds."""
        return len(self.beams) - 1

    @property
    def beam(self) -> list[Candidate]:
        """Beam after the last finished round, best first."""
        return [self.candidate(version) for version in self.beams[-1]]

    def candidate(self, version: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.version == version)

    @property
    def best_candidate(self) -> Candidate:
        """Best prompt so far."""
        return self.candidate(self.best)

    @property
    def has_scores(self) -> bool:
        """True if any prompt has a score."""
        return any(candidate.val_score is not None or candidate.batch_scores for candidate in self.candidates)

    def created_in(self, round: int) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.round == round]

    def add(self, template: PromptTemplate, parent: str, round: int, critique: str) -> Candidate:
        added = Candidate(
            version=f"v{len(self.candidates)}",
            template=template,
            parent=parent,
            round=round,
            critique=critique,
        )
        self.candidates.append(added)
        return added

    def set_failure_reward(self, reward: float) -> None:
        """Correct all scores for another score of rollouts without a reward."""
        change, self.failure_reward = reward - self.failure_reward, reward
        for candidate in self.candidates:
            for number, fraction in candidate.batch_failures.items():
                candidate.batch_scores[number] += change * fraction
            if candidate.val_score is not None:
                candidate.val_score += change * candidate.val_failures
        self.choose_best()

    def choose_best(self) -> None:
        """Let the prompt with the highest score on all validation tasks be the best; of equals, the one that
        was."""
        scores = {c.version: c.val_score for c in self.candidates if c.val_score is not None}
        self.best = max(scores, key=lambda version: (scores[version], version == self.best), default="v0")

    def contains(self, text: str) -> bool:
        """Return True if there is a prompt with this text."""
        return any(candidate.template.template == text for candidate in self.candidates)

    def rejected_by_kind(self) -> dict[str, int]:
        """Return the number of rejections of each kind, most frequent first."""
        return dict(Counter(rejection.kind for rejection in self.rejections).most_common())

    def save(self, file: Path) -> None:
        """Write the search to a file atomically."""
        write_atomic(file, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, file: Path) -> History:
        """Read a file that `save` wrote.

        Raises:
            CheckpointError: the file cannot be read, or is not a result of APO.
        """
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{file} is not a result of APO ({field}: {first['msg']}); remove it, or start a new search "
                "with resume=False"
            ) from None

    def check_same_search(self, seed: PromptTemplate, resource: str, tasks: str, file: Path) -> None:
        """Raise CheckpointError unless the resource, the seed and the validation tasks are the same."""
        for name, saved, current in (
            ("resource", self.resource, resource),
            ("seed", self.candidates[0].template, seed),
            ("val_dataset", self.tasks, tasks),
        ):
            if saved != current:
                raise CheckpointError(
                    f"{file} is of a search with another {name}, so its scores are not comparable; use the "
                    f"same {name}, choose another output_dir, or start a new search with resume=False"
                )
