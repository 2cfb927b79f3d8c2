"""Settings of the agent, and the configuration that trains it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

HERE = Path(__file__).parent
DATA = HERE / "data"

ClientName = Literal["openai", "agent_framework", "langgraph", "agents"]
ExtractorName = Literal["hashes", "answer_tag", "four_hashes", "last_number"]

CALCULATOR_COMMAND = (sys.executable, str(HERE / "calculator_server.py"))
"""Command of the calculator server in this folder, run by this Python."""


class MathSettings(BaseModel):
    """Settings of the rollout function, passed as the resource `settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: ClientName = "openai"
    """Client library of the agent."""
    extractor: ExtractorName = "hashes"
    """Format in which the model marks its answer."""
    mcp_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Command line of an MCP server over stdio; None for the calculator in this folder."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of model calls in a rollout."""

    @property
    def command(self) -> tuple[str, ...]:
        return self.mcp_command or CALCULATOR_COMMAND


def verl_config(model: str, engine: Literal["vllm", "hf"] = "vllm") -> dict[str, Any]:
    """verl's nested dict for GRPO with this agent: 8 questions a step, 4 rollouts of each.

    Args:
        model: folder or name of a model that calls tools in Hermes' format, such as Qwen2.5-1.5B-Instruct.
        engine: "vllm", or "hf" for raylight's own engine, which needs no GPU.
    """
    rollout: dict[str, Any] = {"name": engine, "n": 4, "temperature": 1.0, "multi_turn": {"format": "hermes"}}
    if engine == "vllm":
        rollout |= {"gpu_memory_utilization": 0.6, "tensor_model_parallel_size": 1}
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 8, "max_prompt_length": 4096, "max_response_length": 2048},
        "actor_rollout_ref": {
            "model": {"path": model, "use_remove_padding": True, "enable_gradient_checkpointing": True},
            "rollout": rollout,
            "actor": {
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
                "optim": {"lr": 1e-6},
                "use_kl_loss": False,
                "entropy_coeff": 0,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.3,
            },
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "total_epochs": 2,
            "test_freq": 4,
            "val_before_train": True,
            "project_name": "math_agent",
            "experiment_name": "calculator",
        },
    }


def shortened(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Shorten a config to a few small steps, for a test run."""
    rollout = config["actor_rollout_ref"]["rollout"] | {"n": 2}
    actor = config["actor_rollout_ref"]["actor"] | {
        "ppo_mini_batch_size": 2,
        "ppo_micro_batch_size_per_gpu": 2,
    }
    return config | {
        "data": {"train_batch_size": 2, "max_prompt_length": 1792, "max_response_length": 256},
        "actor_rollout_ref": config["actor_rollout_ref"] | {"rollout": rollout, "actor": actor},
        "trainer": config["trainer"]
        | {"total_training_steps": steps, "test_freq": steps, "val_before_train": False},
    }
