"""Exported training states: transformers computes the same log-probs as the saved policy."""

import re
from pathlib import Path

import policy_set_ranks
import pytest
import state_ranks
import torch
from process_groups import only_rank
from ranks import PROBE
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from raylight.cli import app
from raylight.errors import CheckpointError, ConfigError
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL


def export(*arguments: str) -> BaseException | None:
    """Run `raylight export`; return what it raised."""
    return CliRunner().invoke(app, ["export", *arguments]).exception


def logprobs(model, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [logits[place, token].item() for place, token in enumerate(ids[1:])]


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_an_exported_state_has_the_logprobs_of_the_policy(kind: str, tmp_path: Path):
    states = tmp_path / "state"
    with only_rank():
        expected = state_ranks.main(0, 1, str(states), kind, 0, 2)["probe"]

    assert export(str(states), str(tmp_path / "model")) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert logprobs(model, PROBE) == pytest.approx(expected, abs=1e-4)
    starter = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    assert logprobs(starter, PROBE) != pytest.approx(expected, abs=1e-3)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "model").vocab_size
        == AutoTokenizer.from_pretrained(STARTER_MODEL).vocab_size
    )
    if kind == "lora":
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(starter, tmp_path / "model" / "adapter")
        assert logprobs(adapted, PROBE) == pytest.approx(expected, abs=1e-4)

    other = str(tmp_path / "other")
    for error, message, arguments in [
        (ConfigError, "exists already", [f"{states}/step-2", str(tmp_path / "model")]),
        (CheckpointError, r"choose one of the steps \[2\]", [f"{states}/step-7", other]),
        (ConfigError, "cannot load the model", [str(states), other, "--model", str(tmp_path / "nowhere")]),
    ]:
        raised = export(*arguments)
        assert isinstance(raised, error)
        assert re.search(message, str(raised))
    assert not Path(other).exists()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Export a state of several models; return their folder and their log-probs by name."""
    folder = tmp_path_factory.mktemp("several")
    states, models = str(folder / "state"), folder / "models"
    content = TrainingStates(states).new_content(1)
    with only_rank():
        _, expected = policy_set_ranks.main(0, 1, states, content)
    assert export(states, str(models)) is None
    return models, expected


def test_each_of_several_models_is_exported(several: tuple[Path, dict[str, list[float]]]):
    models, expected = several
    for name, logprobs_of_state in expected.items():
        model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        assert logprobs(model, PROBE) == pytest.approx(logprobs_of_state, abs=1e-4)
        assert (models / name / "adapter").is_dir()


def test_the_initial_state_of_several_models_has_their_initial_adapters(
    several: tuple[Path, dict[str, list[float]]], tmp_path: Path
):
    models, expected = several
    config = policy_set_ranks.CONFIG["algorithm"] | {
        "models": {"coder": {"adapter": str(models / "coder" / "adapter")}, "new": {}}
    }
    initial = TrainingStates(str(tmp_path / "initial"))
    initial.complete(0, {"config": policy_set_ranks.CONFIG | {"algorithm": config}})
    assert export(str(tmp_path / "initial"), str(tmp_path / "first")) is None
    for name, wanted in (("coder", expected["coder"]), ("new", None)):
        folder = STARTER_MODEL if wanted is None else tmp_path / "first" / name
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "first" / name, dtype=torch.float32)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert logprobs(found, PROBE) == pytest.approx(wanted or logprobs(plain, PROBE), abs=1e-4)
