"""Sets of the tokens that could have been sampled, compactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BITS = -1
"""First value of a set that is a bit set; ids are never negative."""


def _no_values() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSets:
    """The tokens that could have been sampled at each position of a sequence: the policy's own distribution
    was restricted to them.

    A set is its ids in ascending order; or, where that is shorter, `BITS` and 32-bit words, in which bit i of
    word w is the token 32 * w + i. Both arrays are read-only int32.
    """

    sizes: NDArray[np.int32] = field(default_factory=_no_values)
    """Number of values of each position, shape (positions,); 0: no token was excluded."""
    values: NDArray[np.int32] = field(default_factory=_no_values)
    """The sets of all positions, joined."""

    @classmethod
    def from_mask(cls, allowed: NDArray[np.bool_]) -> TokenSets:
        """Encode a mask of shape (positions, vocabulary)."""
        vocabulary = allowed.shape[1]
        found = []
        for row in allowed:
            ids = np.flatnonzero(row).astype(np.int32)
            if len(ids) == vocabulary:
                ids = ids[:0]
            elif len(ids) > -(-vocabulary // 32):
                bits = np.packbits(np.pad(row, (0, -vocabulary % 32)), bitorder="little")
                ids = np.concatenate([np.array([BITS], np.int32), bits.view("<i4")])
            found.append(ids)
        return cls(np.array([len(ids) for ids in found], np.int32), _join(found))

    @classmethod
    def join(cls, parts: Iterable[TokenSets]) -> TokenSets:
        """Return the sets of all positions of several sequences, in order."""
        kept = list(parts)
        if not kept:
            return NO_TOKEN_SETS
        return cls(_join([part.sizes for part in kept]), _join([part.values for part in kept]))

    @classmethod
    def unrestricted(cls, positions: int) -> TokenSets:
        """Return positions at which no token was excluded."""
        return cls(np.zeros(positions, np.int32))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, chosen: slice) -> TokenSets:
        """Return the sets of a range of positions."""
        start, stop, step = chosen.indices(len(self))
        assert step == 1, "a range of positions"
        ends = np.concatenate([[0], self.sizes.cumsum()])
        return TokenSets(self.sizes[start:stop], self.values[ends[start] : ends[max(start, stop)]])

    def split(self, lengths: Iterable[int]) -> list[TokenSets]:
        """Divide the positions into consecutive ranges of these lengths."""
        stops = np.cumsum(list(lengths))[:-1]
        values = np.split(self.values, np.concatenate([[0], self.sizes.cumsum()])[stops])
        return list(map(TokenSets, np.split(self.sizes, stops), values))

    def select(self, positions: NDArray[np.bool_]) -> TokenSets:
        """Return the sets of the positions at which a mask, shape (positions,), is true."""
        return TokenSets(self.sizes[positions], self.values[np.repeat(positions, self.sizes)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSets):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.values, other.values)

    def __post_init__(self) -> None:
        for name in ("sizes", "values"):
            array = np.asarray(getattr(self, name), np.int32).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if int(self.sizes.sum()) != len(self.values):
            raise ValueError(
                f"token sets of {int(self.sizes.sum())} values must have as many, not {len(self.values)}"
            )


NO_TOKEN_SETS = TokenSets()
"""The sets of no position: nothing was recorded. Almost all calls share it."""


def _join(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(arrays) if arrays else _no_values()
