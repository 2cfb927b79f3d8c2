"""The recipes of the page on clusters are valid settings, and fit the machines that they are for."""

import re
from pathlib import Path

import pytest
import yaml

from raylight.config import EngineConfig, LearnerConfig, RunnerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
RECIPES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
GPUS = [1, 8, 16]


@pytest.mark.parametrize(("recipe", "gpus"), list(zip(RECIPES, GPUS, strict=True)), ids=map(str, GPUS))
def test_a_recipe_is_valid_and_fits(recipe: str, gpus: int) -> None:
    settings = yaml.safe_load(recipe)
    engine = EngineConfig(**settings.pop("engine"))
    learner = LearnerConfig(**settings.pop("learner"))
    RunnerConfig(**settings.pop("runner", {}))
    assert not settings
    sampling = engine.replicas * engine.num_gpus * engine.args.get("tensor_parallel_size", 1)
    assert sampling + learner.n * learner.num_gpus == gpus
    assert engine.max_model_len <= learner.max_tokens_per_micro_batch
