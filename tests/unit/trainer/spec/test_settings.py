"""The configuration of a run, as it is written down."""

import yaml
from run_settings import make_settings, policy_settings

from raylight.algorithms.policy import GRPO
from raylight.store.client import StoreClient
from raylight.store.service import StoreService


def test_settings_are_written_as_yaml_without_secrets() -> None:
    resolved = make_settings(resources={"b": 2, "a": 1}).resolved()
    text = yaml.safe_dump(resolved)
    assert yaml.safe_load(text) == resolved
    assert "s3cr3t" not in text
    assert (resolved["resources"], resolved["store"]["lease_s"]) == (["a", "b"], 60.0)
    assert make_settings(store=StoreClient(StoreService())).resolved()["store"] == "given in code"


def test_the_settings_of_a_training_run_are_written_whole() -> None:
    algorithm = GRPO(model="m", rollout={"retry_condition": {"timeout", "failed"}})
    training = {"total_steps": 7, "trained_agents": "plan.*"}
    resolved = policy_settings("/models/m", algorithm=algorithm, training=training, seed=4).resolved()
    assert yaml.safe_load(yaml.safe_dump(resolved)) == resolved
    assert (resolved["seed"], resolved["total_steps"], resolved["trained_agents"]) == (4, 7, "plan.*")
    assert (resolved["algorithm"]["name"], resolved["algorithm"]["model"]) == ("GRPO", "/models/m")
    assert resolved["algorithm"]["rollout"]["retry_condition"] == ["failed", "timeout"]
    assert "model" not in resolved
