"""Starts of replicas: how far each has come, and when it may take device memory.

vLLM sizes its cache by the memory that is free when it starts, and fails if other processes return memory
meanwhile. So a replica that shares GPUs with learners enters only while these hold still, and learners begin
nothing new until the replicas that have entered are up, or are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SILENCE_S = 60.0
"""Seconds without a report after which a replica that starts counts as dead."""


@dataclass(frozen=True)
class StartProgress:
    """State of the starts of all replicas.

    Attributes:
        ready: number of replicas that are up.
        progressed: number of reports of progress so far.
        stages: what each of the others does, by its name.
    """

    ready: int
    progressed: int
    stages: Mapping[str, str]

    def __str__(self) -> str:
        counts = Counter(self.stages.values())
        if len(self.stages) <= 1:
            return next(iter(counts), "waiting for its process")
        return ", ".join(f"{stage} ({count} replicas)" for stage, count in counts.items())


class StageTimes:
    """Durations of the stages of a start.

    Args:
        now: seconds of a clock.
    """

    def __init__(self, now: float) -> None:
        self._began = self._entered = now
        self._stage = ""
        self._spent: dict[str, float] = {}

    def enter(self, stage: str, now: float) -> bool:
        """Note the stage at a time; False if it has not changed."""
        if stage == self._stage:
            return False
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._entered
        self._stage, self._entered = stage, now
        return True

    def describe(self, now: float) -> str:
        """Return the seconds in all, and those of each stage that took at least one."""
        self.enter("", now)
        parts = [
            f"{stage} {seconds:.0f} s" for stage, seconds in self._spent.items() if stage and seconds >= 1
        ]
        return f"{now - self._began:.0f} s" + (f" ({', '.join(parts)})" if parts else "")


@dataclass
class _Start:
    stage: str
    work: int
    heard: float
    progressed: float
    entered: bool = False


@dataclass
class Starts:
    """The replicas that are not up yet.

    Args:
        clock: returns seconds.
        limit_s: seconds without progress after which a start counts as lost.
    """

    clock: Callable[[], float]
    limit_s: float
    progressed: int = 0
    """Number of reports of progress so far."""
    held: bool = False
    """True while no replica may enter."""
    _starts: dict[str, _Start] = field(default_factory=dict)

    def report(self, replica: str, stage: str, work: int, entered: bool = False) -> bool:
        """Take a report; True if there was progress since the last one, or the replica may have to wait.

        Args:
            work: a number that grows with the replica's work, such as the bytes that it has read.
            entered: True if the replica was let in, perhaps by a coordinator before its restart.
        """
        now, start = self.clock(), self._starts.get(replica)
        if start is None:
            start = self._starts[replica] = _Start("", 0, now, now)
        start.heard, start.entered = now, start.entered or entered
        if (start.stage, start.work) == (stage, work) and not self.held:
            return False
        start.stage, start.work, start.progressed = stage, work, now
        self.progressed += 1
        return True

    def end(self, replica: str) -> None:
        """Forget a replica that is up, or has failed."""
        self._starts.pop(replica, None)

    def enter(self, replica: str) -> bool:
        """Let a replica take device memory; False while that is held up."""
        if not self.held and (start := self._starts.get(replica)) is not None:
            start.entered = True
        return not self.held

    def hold(self) -> bool:
        """Let no further replica enter; False while some have entered and are not up."""
        now = self.clock()
        for replica, start in list(self._starts.items()):
            if now - start.heard > SILENCE_S:
                del self._starts[replica]
        if any(one.entered and now - one.progressed <= self.limit_s for one in self._starts.values()):
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Let replicas enter again."""
        self.held = False

    def stages(self) -> dict[str, str]:
        """Return what each replica does."""
        return {replica: start.stage for replica, start in self._starts.items()}
