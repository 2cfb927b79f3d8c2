"""Logging to the console for scripts."""

from __future__ import annotations

import logging


def setup_logging(level: int | str = "INFO") -> None:
    """Log raylight's messages of at least this level to the console. A second call changes the level.

    Raises:
        ValueError: the level is unknown.
    """
    from rich.logging import RichHandler

    logger = logging.getLogger("raylight")
    logger.setLevel(level)
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(show_path=False, log_time_format="%H:%M:%S"))
        logger.propagate = False
