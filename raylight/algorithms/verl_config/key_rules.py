"""Rules for the keys of verl's configuration, from which the table in `keys.py` is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol


class ConfigReader(Protocol):
    """Read access to a configuration merged over verl's defaults."""

    def __call__(self, key: str) -> Any:
        """Return the value of a key: the user's, or else verl's default."""
        ...

    def is_set(self, key: str) -> bool:
        """Return True if the user's configuration has the key."""
        ...


class UnsupportedValueError(Exception):
    """Value that raylight does not support; the text follows `key=value` and has the reason or the remedy."""


class _KeepDefault:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _KeepDefault()
"""Return value of a converter that leaves its setting at raylight's default."""
Converter = Callable[[Any, ConfigReader], Any]
"""Function from a key's value and the configuration to a raylight setting, or UNSET."""


@dataclass(frozen=True)
class KeyRule:
    """Treatment of one key.

    It sets a raylight setting (`target`), is read by the rule of another key (`used_by`), is accepted only
    with values that match raylight's behaviour (`accepted`), or is ignored.
    """

    key: str
    target: str = ""
    """Setting, such as `algorithm.lr`, `learner.n`, `engine.kind`, `critic.lr` or `run.seed`; "" for none."""
    converter: Converter | None = None
    """Converts the key's value into the setting; None takes the value as it is."""
    own_default: bool = False
    """True if raylight's default holds, instead of verl's, where the key is not set."""
    reads: tuple[str, ...] = ()
    """Other keys that `converter` reads; each has a rule with `used_by`."""
    used_by: str = ""
    """Key whose converter reads this one."""
    accepted: tuple[Any, ...] | None = None
    """Values that match raylight's behaviour, besides verl's default; None accepts any."""
    reason: str = ""
    """Behaviour of raylight that makes the key unnecessary."""


def maps_to(
    key: str,
    target: str,
    converter: Converter | None = None,
    *,
    own_default: bool = False,
    reads: tuple[str, ...] = (),
) -> KeyRule:
    """Return the rule of a key that sets a raylight setting."""
    return KeyRule(key, target, converter, own_default=own_default, reads=reads)


def used_by(key: str, user: str) -> KeyRule:
    """Return the rule of a key that the converter of another key reads."""
    return KeyRule(key, used_by=user)


def only(key: str, *values: object, reason: str) -> KeyRule:
    """Return the rule of a key of which raylight supports only some values."""
    return KeyRule(key, accepted=values, reason=reason)


def ignored(key: str, reason: str) -> KeyRule:
    """Return the rule of a key whose value has no effect in raylight."""
    return KeyRule(key, reason=reason)


def by_full_key(sections: dict[str, tuple[KeyRule, ...]]) -> dict[str, KeyRule]:
    """Return the rules by full key.

    Names in `reads` and `used_by` that begin with a dot are relative to the rule's section.
    """
    rules = {}
    for section, section_rules in sections.items():
        for rule in section_rules:
            key = f"{section}.{rule.key}"
            assert key not in rules, f"{key} has two rules"
            reads = tuple(_full_key(name, section) for name in rule.reads)
            rules[key] = replace(rule, key=key, reads=reads, used_by=_full_key(rule.used_by, section))
    return rules


def _full_key(name: str, section: str) -> str:
    return section + name if name.startswith(".") else name
