"""Tickets with the right teams, from which the tiny model learns."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def demonstrations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield tickets as the service sends them, with the right teams."""
    text, chance = Path(__file__).with_name("tickets.json").read_text(), random.Random(seed)
    desk = json.loads(text)
    for _ in range(4000):
        team = chance.choice(list(desk["teams"]))
        text = f"Order {chance.randint(1000, 9999)}: {chance.choice(desk['teams'][team])}"
        yield [
            {"role": "system", "content": desk["system"]},
            {"role": "user", "content": text},
            {"role": "assistant", "content": team},
        ]
