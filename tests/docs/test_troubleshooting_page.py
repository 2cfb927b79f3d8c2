"""Every typed error has a section in docs/troubleshooting.md, whose settings and metrics exist."""

import inspect
import re

from docs_snippets import DOCS

from raylight import config, errors
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.experience.settings.policy_settings import CriticSettings
from raylight.types import RolloutConfig

PAGE = DOCS / "troubleshooting.md"
SOURCE = "".join(path.read_text() for path in (DOCS.parent / "raylight").rglob("*.py"))


def sections() -> dict[str, str]:
    """Return the text below each heading."""
    parts = re.split(r"^#{2,3} (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_error_has_a_section_with_cause_and_remedy() -> None:
    public = {
        name
        for name, cls in vars(errors).items()
        if inspect.isclass(cls)
        and issubclass(cls, Exception)
        and cls.__module__ == errors.__name__
        and not name.startswith("_")
    }
    texts = sections()
    assert {name for name in texts if name.endswith("Error")} == public
    short = {name for name in public if len(texts[name].split()) < 15}
    assert not short, f"sections too short for a cause and a remedy: {short}"


def test_settings_that_the_page_names_exist() -> None:
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


def test_metrics_and_names_that_the_page_shows_exist() -> None:
    known = {*PolicyAlgorithm.model_fields, *CriticSettings.model_fields}
    for name in re.findall(r"`([a-z]+/[a-z_]+)`", PAGE.read_text()):
        assert f'"{name}"' in SOURCE, f"there is no metric {name}"
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE.read_text()):
        assert name in known or name in SOURCE, f"there is no {name}"
