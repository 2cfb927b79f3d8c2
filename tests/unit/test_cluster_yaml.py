"""cluster.yaml is what `ray up` takes, and starts Ray as raylight needs it."""

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from raylight.serving.deploy.ingress import SERVE_FLAGS

FILE = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def flags_of(commands: list[str]) -> dict[str, str]:
    """The variables in front of the only `ray start` of the commands."""
    (start,) = [command for command in commands if "ray start" in command]
    words = shlex.split(start.split(";")[-1])
    return dict(word.split("=", 1) for word in words[: words.index("ray")])


def test_fits_the_schema_that_ray_ships(config):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)


def test_ray_accepts_it_with_its_defaults(config):
    validate_config(prepare_config(copy.deepcopy(config)))


@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_starts_with_the_serve_flags(config, key):
    assert flags_of(config[key]) == SERVE_FLAGS


def test_head_and_workers_meet_at_one_port(config):
    head, worker = (config[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))
    assert "--port=6379" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker


def test_limits_are_consistent(config):
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert head["resources"]["GPU"] == 0
    assert head["max_workers"] == 0, "the head's kind is for the head alone"
    assert types, "there are workers"
    for worker in types.values():
        assert worker["resources"]["GPU"] >= 1
        assert 0 <= worker["min_workers"] <= worker["max_workers"] <= config["max_workers"]
    assert config["idle_timeout_minutes"] > 0
    assert config["upscaling_speed"] > 0


def test_installs_what_is_mounted(config):
    (mount,) = config["file_mounts"]
    assert mount == f"/home/{config['auth']['ssh_user']}/raylight"
    (install,) = [command for command in config["setup_commands"] if "pip install -e" in command]
    assert shlex.split(install)[-1] == "~/raylight[vllm]", "the extra pins vLLM's version"


def test_mounts_shared_storage_on_every_node_before_anything_else(config):
    commands = config["setup_commands"]
    mounts = [
        i for i, command in enumerate(commands) if command.endswith(" /shared") and " mount " in command
    ]
    assert mounts
    assert mounts[0] < next(i for i, command in enumerate(commands) if "pip install" in command)


def test_every_placeholder_is_marked():
    lines = FILE.read_text().splitlines()
    for number, line in enumerate(lines):
        if "CHANGEME" in line and not line.lstrip().startswith("#"):
            # a comment cannot be in a folded command, so it stands above
            assert any("# CHANGE" in near for near in lines[max(number - 4, 0) : number + 1]), line


def test_the_settings_that_it_shows_are_valid():
    from raylight.config import EngineConfig, LearnerConfig, StoreConfig

    shown = yaml.safe_load(
        "\n".join(
            line.removeprefix("#").strip()
            for line in FILE.read_text().splitlines()
            if line.startswith(("#   engine:", "#   learner:", "#   store:"))
        )
    )
    assert EngineConfig(**shown["engine"]).kind == "vllm"
    assert LearnerConfig(**shown["learner"]).num_gpus == 1
    StoreConfig(**shown["store"])
    types = yaml.safe_load(FILE.read_text())["available_node_types"]
    assert shown["engine"]["resources"].keys() <= types["gpu_worker"]["resources"].keys()


def test_unknown_key_is_refused(config):
    config["max_wrokers"] = 3
    with pytest.raises(jsonschema.ValidationError, match="max_wrokers"):
        validate_config(prepare_config(config))


def test_more_workers_than_the_limit_are_refused(config):
    config["available_node_types"]["gpu_worker"]["min_workers"] = config["max_workers"] + 1
    with pytest.raises(ValueError, match="max_workers"):
        validate_config(prepare_config(config))
