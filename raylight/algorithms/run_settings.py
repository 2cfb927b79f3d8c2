"""What surrounds an algorithm in a run, and what an algorithm that configures it says of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run beside its algorithm's."""

    engine: EngineConfig
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    seed: int | None = None
    output_dir: str | Path | None = None
    outputs: str = "outputs"
    """Folder in which a run without an `output_dir` makes one."""
    notes: tuple[str, ...] = ()
    """What a person should know before the run."""
    cpu_fallback: RunSettings | None = None
    """What holds instead on a cluster without GPUs; None: the same."""
