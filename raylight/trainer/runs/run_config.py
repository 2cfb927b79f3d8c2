"""The content of a run's config.yaml."""

from __future__ import annotations

from typing import Any

from raylight.agent.resources import NamedResources
from raylight.algorithms.policy import RunSettings
from raylight.algorithms.verl import VERL
from raylight.trainer.runs.run_plan import Fit
from raylight.trainer.spec.run_file import (
    describe_algorithm,
    describe_component,
    describe_data,
    describe_resources,
)

SECTIONS = ("engine", "learner", "runner", "checkpoint", "store")
"""Settings of a run that a run file has under the same names."""


def run_config(
    fit: Fit,
    given: RunSettings,
    resources: NamedResources,
    specs: dict[str, Any],
    process: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of config.yaml: a run file that starts the run again (see `RunFile`).

    Args:
        given: settings of the Trainer, before the algorithm adjusted them.
        resources: the Trainer's.
        specs: components of the Trainer as they were specified.
        process: settings of the Trainer's own process.
    """
    facts, inputs, serving = fit.settings.resolved(), fit.inputs, fit.settings.serving
    if inputs is None:
        return _supervised_config(fit, facts, specs, process)
    is_verl = isinstance(fit.algorithm, VERL)
    algorithm = describe_algorithm(
        fit.settings.training.algorithm if fit.settings.training else fit.algorithm
    )
    if fit.settings.training is not None and serving is not None and not is_verl:
        algorithm |= {"model": serving.model_path}
    content = {
        "agent": describe_component(inputs.agent_spec),
        "data": {"train": describe_data(inputs.train), "val": describe_data(inputs.val)},
        "algorithm": algorithm,
        "output_dir": fit.settings.folder,
        "seed": facts.pop("seed", None),
        "resources": describe_resources(resources) or None,
        **{name: facts.pop(name, None) for name in SECTIONS},
        **{name: describe_component(spec) for name, spec in specs.items()},
        **process,
        "run": {name: value for name, value in facts.items() if name not in ("algorithm", "model")},
    }
    content = {name: value for name, value in content.items() if value is not None}
    if is_verl:
        # VERL derives the rest from its configuration again, and rejects other values beside it
        for name in ("engine", "learner", "checkpoint"):
            content[name] = getattr(given, name).model_dump(mode="json", exclude_unset=True)
        if given.seed is None:
            del content["seed"]
        if given.output_dir is None and fit.requested.output_dir is not None:
            del content["output_dir"]
    return content


def _supervised_config(
    fit: Fit, facts: dict[str, Any], specs: dict[str, Any], process: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of config.yaml of a run without rollouts."""
    supervised = fit.settings.supervised
    assert supervised is not None, "a run without inputs learns from examples"
    content = {
        "algorithm": describe_algorithm(supervised.algorithm) | {"model": supervised.model_path},
        "output_dir": fit.settings.folder,
        "seed": facts.pop("seed"),
        "learner": facts.pop("learner"),
        "checkpoint": facts.pop("checkpoint"),
        "loggers": describe_component(specs["loggers"]),
        **process,
        "run": {name: value for name, value in facts.items() if name != "algorithm"},
    }
    return {name: value for name, value in content.items() if value is not None}
