"""A training state as a model in Hugging Face format, for other programs. One process, no Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import CheckpointError, ConfigError
from raylight.experience.checkpoints import TrainingStates, locate_state
from raylight.experience.settings import PolicySettings
from raylight.learner import state, weights
from raylight.learner.engines import build_policy


def export_state(source: str, output: Path, model: str | None = None) -> None:
    """Write the policy of a training state to a new folder, with its tokenizer.

    With LoRA the adapter is merged into it, and also is in the folder `adapter` of it in peft's format.

    Args:
        source: a state (`.../state/step-8`, or a URL that fsspec knows), or the folder of states, of which the last is taken.
        model: folder of the model that training began with; None: where it was then.

    Raises:
        ConfigError: `output` is there already, or the model is not.
        CheckpointError: there is no such state, or it is of another model.
    """
    if output.exists():
        raise ConfigError(f"{output} is there already; name a new folder")
    states, step = _find(source)
    config = states.metadata(step)["config"]
    lora = config["learner"]["lora"]
    base = model or config["algorithm"]["model"]
    learner = LearnerConfig(lora=LoraConfig(**lora) if lora else None, dtype="fp32")
    with tempfile.TemporaryDirectory() as meet:
        dist.init_process_group("gloo", store=dist.FileStore(f"{meet}/ranks", 1), rank=0, world_size=1)
        try:
            _write(states, step, base, learner, output)
        finally:
            dist.destroy_process_group()


def _find(source: str) -> tuple[TrainingStates, int]:
    url, step = locate_state(source)
    states = TrainingStates(url)
    there = states.steps()
    if not there or (step is not None and step not in there):
        raise CheckpointError(
            f"no complete training state at {source}"
            + (f": there are those of steps {there}" if there else "")
        )
    return states, there[-1] if step is None else step


def _write(states: TrainingStates, step: int, model: str, learner: LearnerConfig, output: Path) -> None:
    try:
        engine = build_policy(model, learner, PolicySettings(), 1)
    except OSError as error:
        raise ConfigError(
            f"the model that training began with is not at {model}; name its folder: {error}"
        ) from error
    if step:  # step 0 is the model's own files
        with states.open(step) as file:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        state.load_weights(engine, content["engines"]["policy"]["model"])
    weights.save_model(engine, str(output))
