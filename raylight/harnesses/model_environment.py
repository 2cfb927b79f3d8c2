"""Environment variables in which a program finds the model of its rollout."""

from __future__ import annotations

import json
from urllib.parse import quote

from raylight.agent.resources import LLM
from raylight.types import Rollout


def model_environment(llm: LLM, rollout: Rollout, sends_spans: bool) -> dict[str, str | None]:
    """Return the variables; None removes one that is inherited.

    Args:
        llm: the model, with the URL of the attempt.
        sends_spans: add the endpoint and the key for spans.
    """
    assert rollout.attempt is not None, "only a dequeued rollout is executed"
    root = llm.endpoint.rstrip("/").removesuffix("/v1")
    ours: dict[str, str | None] = {
        "OPENAI_BASE_URL": llm.endpoint or None,
        "OPENAI_API_BASE": llm.endpoint or None,  # the name in LiteLLM and older clients
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": root or None,  # its client adds /v1
        "ANTHROPIC_MODEL": llm.model,
        "RAYLIGHT_SAMPLING_PARAMETERS": json.dumps(llm.sampling_parameters),
        "RAYLIGHT_ROLLOUT_ID": rollout.rollout_id,
        "RAYLIGHT_ATTEMPT_ID": rollout.attempt.attempt_id,
        "RAYLIGHT_MODE": rollout.mode or "",
    }
    if llm.api_key is not None:  # otherwise the client reads its own key from the environment
        ours |= {"OPENAI_API_KEY": llm.api_key, "ANTHROPIC_API_KEY": llm.api_key}
    if sends_spans and llm.traces_key is not None:
        ours |= {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{llm.endpoint}/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"Authorization={quote(f'Bearer {llm.traces_key}')}",
        }
    return ours


def home_environment(home: str) -> dict[str, str]:
    """Return the variables that give a program a separate configuration."""
    return {
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
        "XDG_CACHE_HOME": f"{home}/.cache",
    }
