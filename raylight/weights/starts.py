"""Starts of replicas: how far each has come, when it may take device memory, and its seed.

vLLM sizes its cache by the memory that is free when it starts, and fails if other processes return memory
meanwhile. So a replica that shares GPUs with learners enters only while these hold still, and learners begin
to compute only when the replicas that have entered are up, or are lost. Laws:

- A hold has a token. Its release also ends a request for it that is still under way.
- A request for a hold bars further replicas at once, so that replacements cannot starve the learners.
- A start that is silent for `SILENCE_S` is lost, and holds up nobody. Once `MAX_LOST` are, a further start is
  no progress: replicas that die again and again must not extend a deadline forever.
"""

from __future__ import annotations

import collections
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SILENCE_S = 30.0
"""Seconds without a report after which a replica that starts counts as dead. It reports every second, but for
imports that hold up all its threads."""
MAX_LOST = 4
"""Starts that may be lost before others no longer count as progress."""
REMEMBERED = 256
"""Number of ended starts and released holds that are remembered."""
SEED_BITS = 31
"""Bits of a derived seed: the range that torch, numpy and vLLM all take."""


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
        """Return the total seconds, and the seconds of each stage that took at least one."""
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


class Starts:
    """The replicas that have not taken their memory yet.

    Args:
        clock: returns seconds.
        limit_s: seconds without progress after which a start that has entered holds up nobody.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock, self._limit_s = clock, limit_s
        self._starts: dict[str, _Start] = {}
        self._ended: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        """Starts that have ended: a late report must not revive one."""
        self._released: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        self._lost = 0
        self.progressed = 0
        """Number of reports of progress so far."""
        self.holds: dict[str, bool] = {}
        """Token of each hold, and True if it is granted."""

    def report(self, replica: str, stage: str, work: int, entered: bool = False) -> bool:
        """Take a report; True if there was progress since the last one, or the replica may have to wait.

        Args:
            work: a number that grows with the replica's work, such as the bytes that it has read.
            entered: True if the replica was let in, perhaps by a coordinator before its restart.
        """
        if replica in self._ended:
            return False
        self._drop_silent()
        start = self._entry(replica)
        start.heard, start.entered = self._clock(), start.entered or entered
        if (start.stage, start.work) == (stage, work) and not self.holds:
            return False
        start.stage, start.work, start.progressed = stage, work, start.heard
        if self._lost >= MAX_LOST and not self.holds:
            return False
        self.progressed += 1
        return True

    def end(self, replica: str) -> None:
        """Forget a replica that has its memory, or has failed."""
        self._starts.pop(replica, None)
        self._ended.append(replica)

    def enter(self, replica: str) -> bool:
        """Let a replica take device memory; False while a hold is granted or requested."""
        if not self.holds:
            self._entry(replica).entered = True
        return not self.holds

    def hold(self, token: str) -> bool:
        """Request a hold; True once no replica is taking memory, or if the hold has been released already."""
        if token in self._released:
            return True
        self._drop_silent()
        entered = [start for start in self._starts.values() if start.entered]
        self.holds[token] = all(self._clock() - start.progressed > self._limit_s for start in entered)
        return self.holds[token]

    def release(self, token: str) -> None:
        """End a hold, or a request for it."""
        self.holds.pop(token, None)
        self._released.append(token)

    def stages(self) -> dict[str, str]:
        """Return what each replica does."""
        self._drop_silent()
        return {replica: start.stage for replica, start in self._starts.items() if start.stage}

    def _entry(self, replica: str) -> _Start:
        now = self._clock()
        return self._starts.setdefault(replica, _Start("", 0, now, now))

    def _drop_silent(self) -> None:
        now = self._clock()
        silent = [replica for replica, start in self._starts.items() if now - start.heard > SILENCE_S]
        for replica in silent:
            del self._starts[replica]
        self._lost += len(silent)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed for a part of what `seed` stands for.

    Two engines with one seed draw the same random numbers, so that equal prompts get equal responses. So each
    start of a replica has a seed derived from the run's.

    Args:
        parts: names of the part. Without any, and for the single part "0", the result is `seed` itself.
    """
    if parts in ((), ("0",)):
        return seed
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> (64 - SEED_BITS)


class SamplingStreams:
    """Names one stream of random numbers for each replica that ever starts.

    Args:
        restored: True if an earlier object named streams and its names are lost. Replicas' ids, which are
            unique, are then the names.
    """

    def __init__(self, restored: bool = False) -> None:
        self._restored = restored
        self._names: dict[str, str] = {}

    def name_for(self, replica: str) -> str:
        """Return the stream of a replica: "0" for the first that starts, then "1", "2", ..."""
        return self._names.setdefault(replica, replica if self._restored else str(len(self._names)))
