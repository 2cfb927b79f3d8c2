"""An engine whose process dies while it scores tokens, once."""

import os
import signal
from pathlib import Path
from typing import Any

from raylight.engines.protocol import EngineSettings
from raylight.engines.transformers.engine import build_engine


def build_dying_engine(settings: EngineSettings, marker: str) -> Any:
    """Make the transformers engine; its first log-probs kill the process.

    Args:
        marker: file that exists once that has happened.
    """
    engine: Any = build_engine(settings)
    if Path(marker).exists():
        return engine

    async def die(ids: list[int], adapter: str | None = None, temperature: float = 1.0) -> list[float]:
        Path(marker).touch()  # noqa: ASYNC240 - the process ends
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    engine.logprobs = die
    return engine
