"""Resources that a rollout is given by name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class LLM(BaseModel):
    """A language model as the agent sees it: an OpenAI-compatible base URL, a key and a model name."""

    model_config = ConfigDict(extra="forbid")

    endpoint: str = ""
    """Base URL for an OpenAI client, ending in `/v1`. Filled by the serving side for the model being trained."""
    model: str = ""
    api_key: str = "unused"
    traced: bool = False
    """True for a model served by raylight: each attempt gets its own URL and its own key."""

    def for_attempt(self, rollout_id: str, attempt_id: str, secret: str) -> LLM:
        """The same model under a URL and key that belong to one attempt; an untraced model is returned as it is."""
        if not self.traced:
            return self
        from raylight.agent.keys import attempt_path, scoped_key

        endpoint = f"{self.endpoint}{attempt_path(rollout_id, attempt_id)}/v1"
        return self.model_copy(update={"endpoint": endpoint, "api_key": scoped_key(secret, rollout_id, attempt_id)})

    def get_base_url(self) -> str:
        """The base URL to give to an OpenAI client."""
        return self.endpoint


NamedResources = dict[str, Any]
"""Resources by the name under which a rollout function asks for them."""
