"""Seeds of the replicas, and the names of their streams of random numbers.

Two engines with one seed draw the same random numbers, so that equal prompts get equal responses. Therefore
every start of a replica has a seed of its own, derived from the run's seed.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 31
"""Bits of a derived seed: the range that torch, numpy and vLLM all take."""


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed for a part of what `seed` stands for.

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
