"""Export of a training state as a model in Hugging Face format. It runs in one process, without Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist

from raylight._utils.disk import disk_errors
from raylight._utils.machine import check_writable
from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import CheckpointError, ConfigError
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model import weights
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.model.verl_engines import build_policy, build_reward_model
from raylight.learner.state import state
from raylight.learner.state.checkpoints import TrainingStates, locate_state


def export_state(source: str, output: Path, model: str | None = None) -> None:
    """Write the policy of a training state and its tokenizer to a new folder.

    With LoRA the adapter is merged into the model, and is also written to the subfolder `adapter` in peft's
    format. Several models are each written to a subfolder.

    Args:
        source: a state (`.../state/step-8`, or a URL that fsspec can open), or a folder of states, of which
            the last is used.
        model: folder of the model that training started from; None for its path at that time.

    Raises:
        ConfigError: `output` exists already or cannot be written, or the model does not exist.
        CheckpointError: the state does not exist, or belongs to another model.
    """
    if output.exists():
        raise ConfigError(f"the output folder {output} exists already; name a new folder")
    check_writable(output, "the output folder")
    states, step = _open_states(source)
    config = states.metadata(step)["config"]
    lora, models = config["learner"]["lora"], config["algorithm"].get("models") or {"": None}
    initial = {name: (own or {}).get("adapter") for name, own in models.items()}
    base = model or config["algorithm"]["model"]
    learner = LearnerConfig(lora=LoraConfig(**lora) if lora else None, dtype="float32")
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group("gloo", store=dist.FileStore(f"{rendezvous}/ranks", 1), rank=0, world_size=1)
        try:
            with disk_errors(output, "Make room, and export again"):
                is_reward_model = "center_rewards_coefficient" in config["algorithm"]
                engine = _build(base, learner, is_reward_model)
                if "" not in models:
                    output.mkdir(parents=True)
                # an initial adapter replaces the model's previous one, and a new one changes nothing
                for name, adapter in sorted(initial.items(), key=lambda one: one[1] is not None):
                    if step:  # step 0 is the model's own files
                        with states.reading(step) as content:
                            state.load_weights(engine, content, name)
                    elif adapter is not None:
                        weights.load_adapter(engine, adapter)
                    weights.save_model(engine, str(output / name))
        finally:
            dist.destroy_process_group()


def _open_states(source: str) -> tuple[TrainingStates, int]:
    url, step = locate_state(source)
    states = TrainingStates(url)
    steps = states.steps()
    if not steps or (step is not None and step not in steps):
        raise CheckpointError(
            f"no complete training state at {source}; "
            + (
                f"choose one of the steps {steps}"
                if steps
                else "give the path of a state or of a run directory"
            )
        )
    return states, steps[-1] if step is None else step


def _build(model: str, learner: LearnerConfig, is_reward_model: bool) -> RaylightEngine:
    build = build_reward_model if is_reward_model else build_policy
    try:
        return build(model, learner, PolicySettings(), 1)
    except OSError as error:
        raise ConfigError(
            f"cannot load the model that training started from, {model}: {error}; name its folder with "
            "--model"
        ) from error
