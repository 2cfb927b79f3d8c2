"""Descriptions of sandboxes."""

from typing import Any

import pytest

from raylight.errors import ConfigError
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("procces", "unknown"),
        (3, "give a text"),
        ("a.b", "sandbox"),
        ("process:python", "no images"),
        ("bubblewrap:python", "has no images"),
        ("ssh", "ssh:user@host"),
        (SandboxSpec("kubernetes", "x", options={"arguments": {"warmpool": "y"}}), "kubernetes:POOL"),
    ],
)
def test_a_wrong_description_is_an_error(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxSpec.parse(value)


@pytest.mark.parametrize(
    ("backend", "image", "limit"),
    [
        ("process", None, {"processes": 3}),
        ("process", None, {"network": False}),
        ("apptainer", "x", {"network": False}),
        ("apptainer", "x", {"file_mb": 1}),
        ("docker", "x", {"file_mb": 1}),
        ("e2b", "x", {"memory_mb": 1}),
        ("modal", "x", {"network": False}),
        ("ssh", "host", {"network": False}),
    ],
)
def test_a_limit_that_cannot_be_enforced_is_an_error(
    backend: str, image: str | None, limit: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"cannot limit {next(iter(limit))}"):
        SandboxSpec.parse(SandboxSpec(backend, image, SandboxLimits(**limit)))
