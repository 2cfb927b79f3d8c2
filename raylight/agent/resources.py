"""Named resources of a rollout: models and prompt templates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_SAMPLES
from raylight._utils.no_proxy import is_loopback
from raylight._utils.synonyms import take_synonyms
from raylight.agent.attempt_keys import KeyUse, attempt_key, attempt_path
from raylight.agent.clients import Provider, async_client, sync_client
from raylight.base_config import Config, validation_message
from raylight.errors import ConfigError
from raylight.types import JsonObject

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

    from raylight.types import Rollout

LLM_SYNONYMS = {"name": "model"}
"""Other names for arguments of `LLM`, see `take_synonyms`."""
_ATTEMPT_PATH = re.compile(r"(?P<attempt>/rollout/[^/]+/attempt/[^/]+)(?:/agent/[^/]+)?$")
"""Path of an attempt, and of an agent in it, at the end of a URL without `/v1`."""


class SamplingParameters(Config):
    """Bounds of the sampling parameters that every provider has. Others are passed on unchanged."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    seed: int | None = Field(default=None, ge=-(2**53), le=2**53)
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    repetition_penalty: float | None = Field(default=None, gt=0, le=MAX_FACTOR)


def check_sampling(values: JsonObject) -> JsonObject:
    """Return sampling parameters unchanged after a check of their types and bounds.

    Raises:
        ConfigError: one is out of range or of a wrong type.
    """
    SamplingParameters(**{str(name): value for name, value in values.items()})
    return values


class Resource(BaseModel):
    """Base class of resources. The field `resource_type` of subclasses distinguishes them in JSON."""

    model_config = ConfigDict(extra="forbid")


class LLM(Resource):
    """A language model as the agent sees it: an OpenAI-compatible base URL, a key and a model name.

        A rollout may have several: traced models, which raylight serves and trains, and fixed upstream
            models.

    Args:
        name: synonym of `model`.

    Raises:
        ConfigError: a field is unknown or has a wrong value, or `name` and `model` are both given and differ.
    """

    resource_type: Literal["llm"] = "llm"
    endpoint: str = ""
    """Base URL for an OpenAI client, ending in `/v1`. raylight sets it for the model that it serves."""
    model: str = ""
    """Name of the model, as requests give it."""
    api_key: str | None = Field(default="unused", repr=False)
    """API key. Omitted when the model is printed or recorded as an input. None: the client reads it from the
    environment."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters for the agent's requests, such as `{"temperature": 0.7}`. The agent must pass them
    on."""
    tokenizer_only: bool = False
    """True if only the tokenizer of this model is needed; then the model is not served."""
    traced: bool = False
    """True for a model served by raylight: each attempt gets its own URL and its own keys."""
    traces_key: str | None = Field(default=None, repr=False)
    """Key with which other processes of the agent send spans and rewards to the attempt's `/v1/traces`; None
    for a model that is not traced. `api_key` calls models only. Pass this one on only to code that may set
    rewards."""
    agent_id: str | None = None
    """Id of the agent that calls through this model; set by `for_agent`."""

    if not TYPE_CHECKING:

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**take_synonyms(values, LLM_SYNONYMS))
            except ValidationError as error:
                raise ConfigError(validation_message(type(self), error)) from None

    else:  # shows `name` to editors and type checkers

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
            traces_key: str | None = None,
            agent_id: str | None = None,
            resource_type: str = "llm",
        ) -> None: ...

    _check_sampling = field_validator("sampling_parameters")(check_sampling)

    @property
    def name(self) -> str:
        """Synonym of `model`."""
        return self.model

    @property
    def routed(self) -> bool:
        """True if each attempt has its own URL."""
        return self.traced

    @overload
    def client(self, provider: Literal["openai"] = "openai") -> AsyncOpenAI: ...

    @overload
    def client(self, provider: Literal["anthropic"]) -> AsyncAnthropic: ...

    def client(self, provider: Provider = "openai") -> Any:
        """Return an asynchronous client of OpenAI or Anthropic with the URL and the key of this model.

        Its connections are shared by all clients of the event loop and kept open, even when the client is
        closed. So it costs nothing to call this method in each rollout. A proxy of the environment, such as
        HTTP_PROXY, is used for upstream models only.

        Raises:
            ConfigError: no event loop is running, or the library is not installed.
        """
        return async_client(provider, self.endpoint, self.api_key, self.direct_host is not None)

    @overload
    def sync_client(self, provider: Literal["openai"] = "openai") -> OpenAI: ...

    @overload
    def sync_client(self, provider: Literal["anthropic"]) -> Anthropic: ...

    def sync_client(self, provider: Provider = "openai") -> Any:
        """Return a synchronous client, for agents in threads; see `client`. Its connections are shared by all
        threads of the process.

        Raises:
            ConfigError: the library is not installed.
        """
        return sync_client(provider, self.endpoint, self.api_key, self.direct_host is not None)

    @property
    def direct_host(self) -> str | None:
        """Host of the model if no proxy leads to it, because raylight serves it or it is on this machine."""
        direct = self.traces_key is not None or is_loopback(self.endpoint)
        return urlsplit(self.endpoint).hostname if direct else None

    def for_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        secret: str,
        *,
        trains: bool = False,
        has_budgets: bool = False,
    ) -> Self:
        """Return the model with the URL and the keys of one attempt, or itself if attempts share its URL.

        Args:
            trains: True if the rollout's calls are trained.
            has_budgets: True if the rollout has a budget.
        """
        if not self.routed:
            return self
        update: JsonObject = {"endpoint": self._route(attempt_path(rollout_id, attempt_id))}
        if self.traced:
            ids = (secret, rollout_id, attempt_id)
            use: KeyUse = "train" if trains else "model"
            if has_budgets:
                use = "train-budgets" if trains else "model-budgets"
            update["api_key"] = attempt_key(*ids, use)
            update["traces_key"] = attempt_key(*ids, "traces")
        return self.model_copy(update=update)

    def for_agent(self, agent_id: str) -> Self:
        """Return the model for one of a rollout's agents. Calls through it are recorded as that agent's.

        A model without a URL per attempt is returned unchanged.

        Raises:
            ConfigError: the id cannot be part of a URL.
        """
        has_surrogates = any("\ud800" <= letter <= "\udfff" for letter in agent_id)
        if agent_id in ("", ".", "..") or has_surrogates:
            raise ConfigError(
                f"the agent id {agent_id!r} cannot be part of a URL, by which calls are attributed to "
                "agents; choose another id"
            )
        if not self.routed:
            return self
        named = self.model_copy(update={"agent_id": agent_id})
        scope = _ATTEMPT_PATH.search(_without_version(self.endpoint))
        return (
            named if scope is None else named.model_copy(update={"endpoint": named._route(scope["attempt"])})
        )

    def with_attempted_rollout(self, rollout: Rollout) -> LLM:
        """Return the model for the attempt of `rollout`: this model itself, except for a `ProxyLLM`."""
        return self

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for an OpenAI client. Only a `ProxyLLM` uses the ids."""
        return self.endpoint

    def _route(self, attempt: str) -> str:
        """Return the endpoint with the path of an attempt, in place of any other attempt's."""
        bare = _without_version(self.endpoint)
        agent = (
            ""
            if self.agent_id is None
            else attempt_path("", "", self.agent_id).removeprefix(attempt_path("", ""))
        )
        version = "/v1" if self.traced or bare != self.endpoint.rstrip("/") else ""
        return f"{_ATTEMPT_PATH.sub('', bare)}{attempt}{agent}{version}"


class ProxyLLM(LLM):
    """A model behind a proxy that gives each attempt its own URL, under one shared key."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # type: ignore[assignment]

    @property
    def routed(self) -> bool:
        return True

    def with_attempted_rollout(self, rollout: Rollout) -> LLM:
        """Return a plain model with the URL of the rollout's attempt.

        Raises:
            ConfigError: the rollout has no attempt yet.
        """
        if rollout.attempt is None:
            raise ConfigError(
                f"rollout {rollout.rollout_id} has no attempt yet, and so its model has no URL; dequeue the "
                "rollout first"
            )
        fields = self.model_dump(exclude={"resource_type"})
        return LLM(**fields | {"endpoint": self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)})

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return an attempt's base URL, with `/rollout/R/attempt/A` before `/v1`; without ids, the endpoint.

        Raises:
            ConfigError: one id is given without the other, or an id is not a string.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if not isinstance(rollout_id, str) or not isinstance(attempt_id, str):
            raise ConfigError(
                "the rollout id and the attempt id of get_base_url must be strings or all be empty, not "
                f"{rollout_id!r:.80} and {attempt_id!r:.80}; pass rollout.rollout_id and "
                "rollout.attempt.attempt_id, or neither"
            )
        return self._route(attempt_path(rollout_id, attempt_id))


def _without_version(endpoint: str) -> str:
    return endpoint.rstrip("/").removesuffix("/v1")


NamedResources = dict[str, Any]
"""Resources by name, as rollout functions take them."""
