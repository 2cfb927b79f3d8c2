"""The page on prompt optimisation: its settings and names match the code, and its agent can be run."""

import inspect
import re

import pytest
from docs_snippets import DOCS, snippet, snippets
from page_tables import tables

import raylight as rl
from raylight.algorithms.apo.algorithm import BEST_FILE, RESULT_FILE, round_metrics
from raylight.algorithms.apo.history import History

PAGE = DOCS / "prompt_optimisation.md"


@pytest.mark.parametrize(("place", "cls"), [(0, rl.APO), (2, rl.GEPA)])
def test_the_settings_are_those_of_the_algorithm(place: int, cls: type) -> None:
    settings = list(tables(PAGE))[place]
    shown: dict[str, str] = {}
    for row in settings.rows:
        names = re.findall(r"`(\w+)`", row[0])
        defaults = [value.strip().strip("`") for value in row[1].split(",")]
        shown |= dict(zip(names, defaults, strict=True))
    parameters = {name: p for name, p in inspect.signature(cls.__init__).parameters.items() if name != "self"}
    assert [*shown] == [*parameters]
    for name, p in parameters.items():
        if p.default is not p.empty:
            expected = f"{p.default:g}" if name == "rollout_batch_timeout" else str(p.default)
            assert shown[name] == expected, name


def test_the_files_and_metrics_are_those_of_a_run() -> None:
    _, files, _ = tables(PAGE)
    named = " ".join(cell for row in files.rows for cell in row)
    history = History.begin(rl.PromptTemplate(template="x"), "p", "t", {})
    history.candidates[0].val_score, history.candidates[0].batch_scores = 1.0, {1: 1.0}
    history.beams.append(["v0"])
    for name in (
        RESULT_FILE,
        BEST_FILE,
        *(key for key in round_metrics(history, 1.0) if not key.startswith("time/")),
    ):
        assert f"`{name}`" in named


def test_the_agent_of_the_page_can_be_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    known = snippet(PAGE, "apo").run()
    trainer = known["trainer"]
    assert isinstance(trainer.algorithm, rl.APO)
    known["agent"].check(trainer.initial_resources, ("train", "val"))
    assert trainer.initial_resources["prompt_template"].placeholders() == {"question"}
    assert all(block.not_run for block in snippets(PAGE) if block.name != "apo")
