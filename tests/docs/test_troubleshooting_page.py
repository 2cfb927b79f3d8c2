"""Every typed error has a section in docs/troubleshooting.md, and what the page says of settings and metrics is so."""

import inspect
import re

from docs_snippets import DOCS

from raylight import config, errors
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.experience.settings import CriticSettings
from raylight.types import RolloutConfig

PAGE = DOCS / "troubleshooting.md"
SOURCE = "".join(path.read_text() for path in (DOCS.parent / "raylight").rglob("*.py"))


def sections() -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^#{2,3} (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_error_has_a_section_that_says_something() -> None:
    public = {
        name
        for name, cls in vars(errors).items()
        if inspect.isclass(cls)
        and issubclass(cls, Exception)
        and cls.__module__ == errors.__name__
        and not name.startswith("_")
    }
    told = sections()
    assert {name for name in told if name.endswith("Error")} == public
    short = {name for name in public if len(told[name].split()) < 15}
    assert not short, "a section says the cause and what to do"


def test_settings_that_the_page_names_are_there() -> None:
    groups = {
        "engine": config.EngineConfig,
        "learner": config.LearnerConfig,
        "runner": config.RunnerConfig,
        "store": config.StoreConfig,
        "checkpoint": config.CheckpointConfig,
        "rollout": RolloutConfig,
    }
    text = PAGE.read_text()
    dotted = re.findall(rf"`({'|'.join(groups)})\.(\w+)`", text)
    within = [
        (group, name)
        for group, body in re.findall(rf"({'|'.join(groups)})=\{{([^}}]*)", text)
        for name in re.findall(r'"(\w+)":', body)
    ]
    assert min(len(dotted), len(within)) > 8
    wrong = [
        f"{group}.{name}"
        for group, name in dotted + within
        if name not in {*groups[group].model_fields, "db"}
    ]
    assert not wrong


def test_metrics_and_names_in_code_are_those_of_the_source() -> None:
    known = {*PolicyAlgorithm.model_fields, *CriticSettings.model_fields}
    for name in re.findall(r"`([a-z]+/[a-z_]+)`", PAGE.read_text()):
        assert f'"{name}"' in SOURCE, f"there is no metric {name}"
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE.read_text()):
        assert name in known or name in SOURCE, f"there is no {name}"
