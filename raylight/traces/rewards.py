"""Reading rewards from spans: those of raylight and those of agent-lightning 0.2 and 0.3."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from raylight.semconv import ANNOTATION, REWARD_PREFIX


class NamedReward(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float
