"""A display that records what it receives."""

from raylight.advisories import Advisory


class RecordingDisplay:
    """A display that records what it receives."""

    def __init__(self, notes: list[str] | None = None) -> None:
        self.stages: list[str] = []
        self.steps: list[int] = []
        self.notes = [] if notes is None else notes
        self.phases: list[tuple[str, int, int]] = []
        self.advisories: list[Advisory] = []

    def progress(self, phase: str, done: int, total: int) -> None:
        self.phases.append((phase, done, total))

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advise(self, advisory: Advisory) -> None:
        self.advisories.append(advisory)
