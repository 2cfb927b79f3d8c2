"""What a row of the table of keys is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol


class Values(Protocol):
    """A configuration with verl's defaults below it."""

    def __call__(self, key: str) -> Any:
        """The value of a key: the given one, or verl's default."""
        ...

    def given(self, key: str) -> bool:
        """Whether the configuration itself has the key."""
        ...


class NotHonouredError(Exception):
    """A value that raylight does not carry out; the text says why, and what would be."""


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = _Nothing()
"""What a converter returns where nothing is to be set."""
Convert = Callable[[Any, Values], Any]


@dataclass(frozen=True)
class KeyRule:
    """How one key is honoured: it becomes a setting, it helps another key to become one, or it says what raylight does anyway."""

    key: str
    target: str = ""
    """The setting, as `algorithm.lr`, `learner.n`, `engine.kind`, `critic.lr` or `run.seed`; "" is none."""
    convert: Convert | None = None
    """Makes the setting of the key's value; None leaves that as it is."""
    own: bool = False
    """Where the key is not given, raylight's default holds and not verl's."""
    reads: tuple[str, ...] = ()
    """Other keys that `convert` reads; these have rows of their own, without a target."""
    part_of: str = ""
    """The key whose row reads this one."""
    agrees: tuple[Any, ...] | None = None
    """Values that say what raylight does anyway, beside verl's default; None allows any."""
    why: str = ""
    """What that is."""


def to(
    key: str, target: str, convert: Convert | None = None, *, own: bool = False, reads: tuple[str, ...] = ()
) -> KeyRule:
    """A key that becomes a setting."""
    return KeyRule(key, target, convert, own=own, reads=reads)


def part(key: str, of: str) -> KeyRule:
    """A key that the row of another reads."""
    return KeyRule(key, part_of=of)


def same(key: str, *values: Any, why: str) -> KeyRule:
    """A key of which only some values are what raylight does."""
    return KeyRule(key, agrees=values, why=why)


def any_of(key: str, why: str) -> KeyRule:
    """A key that changes nothing here, whatever it says."""
    return KeyRule(key, why=why)


def absolute(sections: dict[str, tuple[KeyRule, ...]]) -> dict[str, KeyRule]:
    """Rows by their whole keys, with a key of `reads` and `part_of` that begins with a dot in the row's own section."""
    rows = {}
    for section, own_rows in sections.items():
        for row in own_rows:
            key = f"{section}.{row.key}"
            assert key not in rows, f"{key} has two rows"
            reads = tuple(_whole(name, section) for name in row.reads)
            rows[key] = replace(row, key=key, reads=reads, part_of=_whole(row.part_of, section))
    return rows


def _whole(name: str, section: str) -> str:
    return section + name if name.startswith(".") else name
