"""Rules of verl's keys, which `keys.yaml` lists and explains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from raylight._utils.files import read_table
from raylight.algorithms.verl_config import converters
from raylight.algorithms.verl_config.converters import Converter
from raylight.types import JsonObject


@dataclass(frozen=True)
class KeyRule:
    """Treatment of one key."""

    key: str
    target: str = ""
    """Setting, such as `algorithm.lr`, `learner.n`, `engine.kind`, `critic.lr` or `run.seed`; "" for none."""
    when: str | None = None
    """Key that must be true for the setting to be made."""
    values: dict[object, object] | None = None
    """Value of the key -> value of the setting; None takes the value as it is."""
    converter: Converter | None = None
    """Function that returns the setting."""
    own_default: bool = False
    """True if raylight's default holds, instead of verl's, where the key is not set."""
    reads: tuple[str, ...] = ()
    """Other keys that `converter` reads."""
    accepted: tuple[object, ...] | None = None
    """Values that match raylight's behaviour, besides verl's default; None accepts any."""
    reason: str = ""
    """Behaviour of raylight that makes the key unnecessary."""


def _rule(section: str, name: str, entry: str | JsonObject) -> KeyRule:
    key = f"{section}.{name}"
    match entry:
        case str():
            return KeyRule(key, entry)
        case {"ignored": reason}:
            return KeyRule(key, reason=reason)
        case {"only": values, "reason": reason}:
            return KeyRule(key, accepted=tuple(values), reason=reason)
    reads = tuple(section + other if other.startswith(".") else other for other in entry.get("reads", ()))
    converter = getattr(converters, entry["converter"]) if "converter" in entry else None
    return replace(KeyRule(key), **entry | {"reads": reads, "converter": converter})


SECTIONS: dict[str, JsonObject] = read_table(Path(__file__).with_name("keys.yaml"))
del SECTIONS["shared"]
KEYS = {
    rule.key: rule
    for section, entries in SECTIONS.items()
    for rule in (_rule(section, name, entry) for name, entry in entries.items())
}
