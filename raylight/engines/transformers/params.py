"""How to sample one response."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from raylight.engines.capture_context import CONSTRAINED
from raylight.types import GREEDY_BELOW


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. Every default is without effect."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are left out."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token id and what is added to its logit."""
    min_tokens: int = 0
    """Sampled before the response may end."""
    ignore_eos: bool = False
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell at each place."""
    grammar: Any = field(default=None, compare=False)
    """A compiled grammar (see `grammar.py`) that the response keeps to."""

    @property
    def greedy(self) -> bool:
        """Always the most probable token."""
        return self.temperature < GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed by what was sampled before, or by a bias."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    def record(self) -> dict[str, Any]:
        """What a record shows: the temperature, and whatever else is not the default."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "grammar"}
        plain = vars(SamplingParams(self.max_tokens))
        kept = {
            name: value
            for name, value in shown.items()
            if name in ("temperature", "max_tokens") or value != plain[name]
        }
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
        return listed | ({CONSTRAINED: True} if self.grammar is not None else {})
