"""Validated arguments of APO, shared by its algorithm, its search and its critic."""

from __future__ import annotations

from pydantic import Field

from raylight._utils.bounds import MAX_CONCURRENT, MAX_SAMPLES, MAX_SECONDS, Seed
from raylight.base_config import Config
from raylight.traces.reward_spans import MAX_REWARD


class SearchSettings(Config):
    """Settings that all searches for a prompt have."""

    rollout_batch_timeout: float = Field(default=3600.0, gt=0, le=MAX_SECONDS)
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    seed: Seed = 0


class ApoSettings(SearchSettings):
    """Settings of the search; `APO` documents each."""

    gradient_model: str = Field(default="gpt-5-mini", min_length=1)
    apply_edit_model: str = Field(default="gpt-4.1-mini", min_length=1)
    diversity_temperature: float | None = Field(default=1.0, ge=0, le=2)
    gradient_batch_size: int = Field(default=4, ge=1, le=MAX_SAMPLES)
    val_batch_size: int = Field(default=16, ge=1, le=MAX_SAMPLES)
    beam_width: int = Field(default=4, ge=1, le=MAX_SAMPLES)
    branch_factor: int = Field(default=4, ge=1, le=MAX_SAMPLES)
    beam_rounds: int = Field(default=3, ge=0, le=MAX_SAMPLES)
    run_initial_validation: bool = True
    max_concurrent: int = Field(default=8, ge=1, le=MAX_CONCURRENT)
