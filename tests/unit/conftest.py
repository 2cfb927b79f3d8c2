"""A tiny random model, built once and never downloaded, and fixtures of several packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from podman_image import podman_image
from tiny_qwen import build_tiny_qwen

__all__ = ["podman_image"]
ENGINE: Any = {"slots": 16, "max_waiting": 100, "max_model_len": 1024, "dtype": "float32", "seed": 0}


def build_model(folder: Path, *, tie: bool) -> str:
    return build_tiny_qwen(folder, head_dim=16, tie_word_embeddings=tie, initializer_range=0.2)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model(tmp_path_factory.mktemp("untied"), tie=False)


@pytest.fixture
def make_engine(tied_model: str) -> Iterator[Callable[..., Any]]:
    """Start engines that are closed when the test ends."""
    from raylight.engines.transformers.engine import TransformersEngine

    with contextlib.ExitStack() as started:

        def start(path: str = tied_model, **settings: Any) -> TransformersEngine:
            engine = TransformersEngine(path, "policy", **ENGINE | settings)
            started.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="session")
def idle_engine(tied_model: str) -> Iterator[Any]:
    """Engine for requests that it refuses, which tests must leave unchanged."""
    from raylight.engines.transformers.engine import TransformersEngine

    with contextlib.closing(TransformersEngine(tied_model, "policy", **ENGINE)) as engine:
        yield engine


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset OpenTelemetry's global tracer provider for a test."""
    from opentelemetry import trace
    from opentelemetry.util._once import Once

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())


@pytest.fixture
def planned_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs that a Trainer planned. Instead of connecting to Ray, after all checks, it raises ReachedRay."""
    from unit_helpers import ReachedRay

    from raylight.trainer import launch
    from raylight.trainer.runs.custom_run import CustomRun
    from raylight.trainer.runs.eval_run import EvalRun
    from raylight.trainer.runs.policy_run import PolicyRun

    planned: list[Any] = []

    def noting(plan: Any) -> Any:
        def note(*args: Any) -> Any:
            planned.append(plan(*args))
            return planned[-1]

        return note

    for kind in (PolicyRun, CustomRun, EvalRun):
        monkeypatch.setattr(kind, "plan", noting(kind.plan))

    def refuse(*args: Any) -> None:
        raise ReachedRay

    monkeypatch.setattr(launch, "ray_session", refuse)
    return planned


@pytest.fixture
def hollow_model(tmp_path: Path) -> str:
    """A folder that looks like a model."""
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    return str(tmp_path)
