"""Every prompt that was tried: where it comes from, what it scored, and what became of those that were not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raylight.agent.prompts import PromptTemplate
from raylight.errors import CheckpointError
from raylight.files import write_atomic

RejectionKind = Literal["endpoint", "empty", "cut off", "malformed", "placeholders", "duplicate"]


class Record(BaseModel):
    """Base of what is written into the result file."""

    model_config = ConfigDict(extra="forbid")


class Candidate(Record):
    """A prompt that was tried."""

    version: str
    """`v0` is the seed; numbers grow in the order in which prompts were made."""
    template: PromptTemplate
    parent: str | None = None
    """Version that it is a rewrite of; None for the seed."""
    round: int = 0
    """In which it was made; 0 for the seed."""
    critique: str = ""
    """Of its parent, which led to it."""
    batch_scores: dict[int, float] = Field(default_factory=dict)
    """Mean reward on the validation batch of each round in which it was scored."""
    val_score: float | None = None
    """Mean reward on all validation tasks; None if it never led a beam."""

    @property
    def last_score(self) -> float | None:
        """On the latest validation batch that it was scored on."""
        return self.batch_scores[max(self.batch_scores)] if self.batch_scores else None


class Rejection(Record):
    """A branch that led to no prompt."""

    parent: str
    round: int
    kind: RejectionKind
    reason: str
    text: str = ""
    """What was rejected, if there was anything."""


class History(Record):
    """A search so far. It is all that going on with it needs.

    A round is over when `beams` has its beam; its rewrites are made when `generated` says so.
    """

    resource: str
    """Name under which agents are given the prompt."""
    tasks: str
    """Tells the validation tasks from others."""
    settings: dict[str, Any]
    candidates: list[Candidate]
    rejections: list[Rejection] = Field(default_factory=list)
    beams: list[list[str]]
    """Versions in the beam after each round, best first; the first is the seed's alone."""
    generated: int = 0
    """The last round whose rewrites were all made."""
    best: str = "v0"
    """Version of the prompt with the highest score on all validation tasks; the seed until one has one."""

    @classmethod
    def begin(cls, seed: PromptTemplate, resource: str, tasks: str, settings: dict[str, Any]) -> History:
        """A search that has only its seed."""
        return cls(
            resource=resource,
            tasks=tasks,
            settings=settings,
            candidates=[Candidate(version="v0", template=seed)],
            beams=[["v0"]],
        )

    @property
    def rounds_done(self) -> int:
        return len(self.beams) - 1

    @property
    def beam(self) -> list[Candidate]:
        """The beam after the last finished round, best first."""
        return [self.candidate(version) for version in self.beams[-1]]

    def candidate(self, version: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.version == version)

    @property
    def best_candidate(self) -> Candidate:
        return self.candidate(self.best)

    @property
    def has_scores(self) -> bool:
        """Whether anything was measured."""
        return any(candidate.val_score is not None or candidate.batch_scores for candidate in self.candidates)

    def made_in(self, round: int) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.round == round]

    def add(self, template: PromptTemplate, parent: str, round: int, critique: str) -> Candidate:
        """A new candidate, with the next version."""
        added = Candidate(
            version=f"v{len(self.candidates)}",
            template=template,
            parent=parent,
            round=round,
            critique=critique,
        )
        self.candidates.append(added)
        return added

    def knows(self, text: str) -> bool:
        """Whether a prompt with this text was tried."""
        return any(candidate.template.template == text for candidate in self.candidates)

    def rejected_by_kind(self) -> dict[str, int]:
        """How many branches led to no prompt, by what was wrong; most frequent first."""
        return dict(Counter(rejection.kind for rejection in self.rejections).most_common())

    def save(self, file: Path) -> None:
        """Write the search to a file atomically."""
        write_atomic(file, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, file: Path) -> History:
        """Read what `save` wrote.

        Raises:
            CheckpointError: it cannot be read, or is something else.
        """
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{file} is no result of APO ({where}: {first['msg']}); remove it, or begin anew with resume=False"
            ) from None

    def must_fit(self, seed: PromptTemplate, resource: str, tasks: str, file: Path) -> None:
        """Raise CheckpointError unless this is a search from the same seed, measured by the same tasks."""
        seeds = self.candidates[0].template
        for what, then, now in (
            ("resource", self.resource, resource),
            ("seed", seeds, seed),
            ("val_dataset", self.tasks, tasks),
        ):
            if then != now:
                raise CheckpointError(
                    f"{file} is of a search with another {what}, whose scores mean nothing here; give the same, choose another "
                    "output_dir, or begin anew with resume=False"
                )
