"""Logging to the console for scripts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence


def setup_logging(level: int | str = "INFO", *, apply_to: Sequence[str] = ()) -> None:
    """Log raylight's messages of at least this level to the console. A second call changes the level.

    Args:
        level: least level of the messages.
        apply_to: names of further loggers, such as the agent's own `[__name__]`.

    Raises:
        ValueError: the level is unknown.
    """
    for name in dict.fromkeys(("raylight", *apply_to)):
        setup_module_logging(level, name=name)


def setup_module_logging(level: int | str = "INFO", *, name: str = "raylight") -> logging.Logger:
    """Log one logger's messages of at least this level to the console; return the logger.

    Raises:
        ValueError: the level is unknown.
    """
    from rich.logging import RichHandler

    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(show_path=False, log_time_format="%H:%M:%S"))
        logger.propagate = False
    return logger


@contextlib.contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Log messages of one logger of at least this level only, until the block ends."""
    logger = logging.getLogger(name)
    previous = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(previous)


@contextlib.contextmanager
def kept_root_logger() -> Iterator[None]:
    """Undo changes of a block, such as an import, to the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
