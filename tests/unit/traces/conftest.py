"""A process without a tracer provider."""

import pytest
from opentelemetry import trace as otel
from opentelemetry.util._once import Once


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the global tracer provider for a test."""
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(otel, "_TRACER_PROVIDER_SET_ONCE", Once())
