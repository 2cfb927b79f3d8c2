"""Logging to the console: raylight's loggers and the agent's."""

import logging
from collections.abc import Iterator

import pytest

from raylight.log import kept_root_logger, log_level, setup_logging, setup_module_logging

OWN = "an_agent_of_a_test"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("raylight", OWN)]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:], logger.propagate = handlers, propagate


def test_further_loggers_are_set_up_once(capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("INFO", "DEBUG"):
        setup_logging(level, apply_to=["raylight", OWN])
    logging.getLogger(OWN).debug("the agent's own")
    logging.getLogger("raylight.store").debug("the store's")
    printed = capsys.readouterr().out
    assert printed.count("the agent's own") == printed.count("the store's") == 1


def test_one_logger_is_set_up_alone(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup_module_logging("DEBUG", name=OWN)
    assert (logger.name, logger.level) == (OWN, logging.DEBUG)
    logger.debug("the agent's own")
    assert capsys.readouterr().out.count("the agent's own") == 1
    assert logging.getLogger("raylight").level != logging.DEBUG


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        setup_logging("LOUD")


def test_a_block_leaves_the_root_logger_as_it_was() -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    with kept_root_logger():
        root.handlers[:] = [logging.StreamHandler()]
        root.setLevel("DEBUG")
    assert (root.handlers, root.level) == before


def test_a_logger_has_a_level_within_a_block() -> None:
    logger = logging.getLogger(OWN)
    logger.setLevel(logging.INFO)

    @log_level(OWN, logging.ERROR)
    def level() -> int:
        return logger.level

    assert [level(), logger.level, level(), logger.level] == [logging.ERROR, logging.INFO] * 2
