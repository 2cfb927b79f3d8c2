"""Resources that a rollout is given by name: models and prompt templates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.config import take_synonyms
from raylight.errors import ConfigError

if TYPE_CHECKING:
    from raylight.types import Rollout

LLM_SYNONYMS = {"name": "model"}
_SCOPE = re.compile(r"(?P<attempt>/rollout/[^/]+/attempt/[^/]+)(?:/agent/[^/]+)?$")
"""What names an attempt, at the end of a URL without its `/v1`."""


class Resource(BaseModel):
    """Base of what a rollout is given by name. `resource_type` tells the kinds apart where they travel as JSON."""

    model_config = ConfigDict(extra="forbid")


class LLM(Resource):
    """A language model as the agent sees it: an OpenAI-compatible base URL, a key and a model name.

    A rollout may have several: traced ones, which raylight serves and trains, and fixed ones upstream, which are left as they are.

    Args:
        name: another word for `model`.

    Raises:
        pydantic.ValidationError: a field is unknown or has a wrong value.
        ConfigError: `name` and `model` are both given and differ.
    """

    resource_type: Literal["llm"] = "llm"
    endpoint: str = ""
    """Base URL for an OpenAI client, ending in `/v1`. Filled by the serving side for the model being trained."""
    model: str = ""
    api_key: str | None = Field(default="unused", repr=False)
    """Not shown when the model is printed or recorded as an input. None lets the client take it from the environment."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """What the agent should sample with, such as `{"temperature": 0.7}`; it is up to the agent to pass it on."""
    tokenizer_only: bool = False
    """True if only the tokenizer of this model is wanted, so that nothing serves it."""
    traced: bool = False
    """True for a model served by raylight: each attempt gets its own URL and its own key."""
    agent_id: str | None = None
    """The agent that calls through this; set by `for_agent`."""

    if TYPE_CHECKING:  # so that editors know of `name`

        def __init__(
            self,
            *,
            name: str = "",
            model: str = "",
            endpoint: str = "",
            api_key: str | None = "unused",
            sampling_parameters: dict[str, Any] = ...,
            tokenizer_only: bool = False,
            traced: bool = False,
            agent_id: str | None = None,
            resource_type: str = "llm",
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _take_synonyms(cls, values: Any) -> Any:
        return take_synonyms(values, LLM_SYNONYMS) if isinstance(values, dict) else values

    @property
    def name(self) -> str:
        """The model's name, as in `model`."""
        return self.model

    @property
    def routed(self) -> bool:
        """Whether each attempt has a URL of its own."""
        return self.traced

    def for_attempt(self, rollout_id: str, attempt_id: str, secret: str) -> Self:
        """The same model under a URL and key that belong to one attempt; one without a URL per attempt is returned as it is."""
        if not self.routed:
            return self
        key = attempt_key(secret, rollout_id, attempt_id) if self.traced else self.api_key
        return self.model_copy(
            update={"endpoint": self._route(attempt_path(rollout_id, attempt_id)), "api_key": key}
        )

    def for_agent(self, agent_id: str) -> Self:
        """The same model for one of several agents in a rollout: calls through it are recorded as that agent's.

        A model without a URL per attempt is returned as it is.

        Raises:
            ConfigError: the id cannot be a part of a URL.
        """
        if agent_id in ("", ".", "..") or any(
            "\ud800" <= letter <= "\udfff" for letter in agent_id
        ):  # no half characters
            raise ConfigError(
                f"an agent cannot be called {agent_id!r}, because its calls are told by their URL"
            )
        if not self.routed:
            return self
        named = self.model_copy(update={"agent_id": agent_id})
        scope = _SCOPE.search(_without_version(self.endpoint))
        return (
            named if scope is None else named.model_copy(update={"endpoint": named._route(scope["attempt"])})
        )

    def with_attempted_rollout(self, rollout: Rollout) -> LLM:
        """The model for the attempt of `rollout`: this one, which belongs to it already or is the same for all."""
        return self

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The base URL to give to an OpenAI client. The ids matter only to a `ProxyLLM`."""
        return self.endpoint

    def _route(self, attempt: str) -> str:
        """The endpoint with the part that names an attempt, which replaces such a part that is there."""
        bare = _without_version(self.endpoint)
        agent = (
            ""
            if self.agent_id is None
            else attempt_path("", "", self.agent_id).removeprefix(attempt_path("", ""))
        )
        version = "/v1" if self.traced or bare != self.endpoint.rstrip("/") else ""
        return f"{_SCOPE.sub('', bare)}{attempt}{agent}{version}"


class ProxyLLM(LLM):
    """A model behind a proxy that tells attempts apart by the URL: each attempt gets its own, under the same key."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # type: ignore[assignment]

    @property
    def routed(self) -> bool:
        return True

    def with_attempted_rollout(self, rollout: Rollout) -> LLM:
        """A plain model under the URL of the rollout's attempt.

        Raises:
            ConfigError: the rollout has no attempt yet.
        """
        if rollout.attempt is None:
            raise ConfigError(
                f"rollout {rollout.rollout_id} has no attempt yet, so that its model has no address; dequeue it first"
            )
        fields = self.model_dump(exclude={"resource_type"})
        return LLM(**fields | {"endpoint": self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)})

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The base URL of one attempt, `/rollout/R/attempt/A` before `/v1`; without ids, the endpoint itself.

        Raises:
            ConfigError: one id is given without the other.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if rollout_id is None or attempt_id is None:
            raise ConfigError("get_base_url takes the rollout id and the attempt id together, or neither")
        return self._route(attempt_path(rollout_id, attempt_id))


def _without_version(endpoint: str) -> str:
    return endpoint.rstrip("/").removesuffix("/v1")


NamedResources = dict[str, Any]
"""Resources by the name under which a rollout function asks for them."""
