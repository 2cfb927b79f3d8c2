"""Logging for scripts: one line on the console for each message of raylight's."""

from __future__ import annotations

import logging


def setup_logging(level: int | str = "INFO") -> None:
    """Show raylight's log messages on the console from this level on. Calling it again changes the level.

    Raises:
        ValueError: there is no such level.
    """
    from rich.logging import RichHandler

    logger = logging.getLogger("raylight")
    logger.setLevel(level)
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(show_path=False, log_time_format="%H:%M:%S"))
        logger.propagate = False
