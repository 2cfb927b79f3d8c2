"""Typed settings. An unknown key is an error, with the nearest known ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from raylight.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class Config(BaseModel):
    """Base of all settings: frozen after creation, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        """Read settings.

        Raises:
            ConfigError: a key is unknown or a value does not fit; the message names it and the nearest known keys.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from None

    @classmethod
    def parse(cls, values: Self | dict[str, Any] | None, **overrides: Any) -> Self:
        """Settings from an instance, a dict, or nothing (all defaults), and those that are given beside it and are not None.

        Raises:
            ConfigError: as above, or `values` is something else, or says otherwise than what is given beside it.
        """
        if not isinstance(values, cls | dict | None):
            raise ConfigError(f"{cls.__name__} takes a dict or a {cls.__name__}, not {type(values).__name__}")
        given = values.model_dump(exclude_unset=True) if isinstance(values, cls) else dict(values or {})
        beside = {name: value for name, value in overrides.items() if value is not None}
        for name, value in beside.items():
            if given.get(name) is not None and given[name] != value:
                raise ConfigError(
                    f"{cls.__name__}.{name} is {given[name]!r} in the settings and {value!r} beside them; give it once"
                )
        return cls(**given | beside)


def explain(cls: type[BaseModel], error: ValidationError) -> str:
    """One line for each wrong key of a pydantic error."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(name, cls.model_fields, n=3, cutoff=0.5) or sorted(
                cls.model_fields
            )
            lines.append(f"{cls.__name__} has no setting {name!r}; it has: {', '.join(near)}")
        else:
            lines.append(f"{cls.__name__}.{name}: {item['msg']} (given: {item.get('input')!r})")
    return "; ".join(lines)


def take_synonyms(values: Mapping[str, Any], synonyms: Mapping[str, str]) -> dict[str, Any]:
    """Return keyword arguments under raylight's own names.

    Args:
        values: arguments by name. None under a synonym counts as not given.
        synonyms: raylight's name of an argument by its other name, such as `{"n_workers": "n_runners"}`.

    Raises:
        ConfigError: an argument is given under both names, with different values.
    """
    renamed = dict(values)
    for synonym, name in synonyms.items():
        value = renamed.pop(synonym, None)
        if value is None:
            continue
        own = renamed.get(name)
        # other values are compared by identity: the == of a dataset may raise or return an array
        if own is not None and own is not value and not (isinstance(own, int | str) and own == value):
            raise ConfigError(f"{name} and {synonym} mean the same; give one of them")
        renamed[name] = value
    return renamed


def accept_synonyms(**synonyms: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that some of its arguments may be given under other names, those of agent-lightning.

    With `@accept_synonyms(n_workers="n_runners")`, `n_workers=4` is passed on as `n_runners=4`. Synonyms are
    keywords only, and do not show in the signature. A call that gives an argument under both names, with
    different values, raises ConfigError.

    Args:
        synonyms: raylight's name of an argument by its other name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            positional = dict(zip(parameters, args, strict=False))
            if synonyms.keys().isdisjoint(kwargs) or not positional.keys().isdisjoint(kwargs):
                return function(*args, **kwargs)
            arguments = take_synonyms(positional | kwargs, synonyms)
            first = [arguments.pop(name) for name in positional]
            return function(*first, *args[len(first) :], **arguments)

        return call

    return decorate


def cpu_threads(config: EngineConfig | LearnerConfig) -> int:
    """How many threads an engine or a learner computes with on a CPU."""
    return config.num_threads or max(1, int(config.num_cpus))


class EngineConfig(Config):
    """The serving deployment."""

    kind: Literal["auto", "transformers", "vllm", "upstream"] = "auto"
    """auto: vllm where it is installed and replicas have a GPU, else transformers; upstream where a `url` is given."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What the engine itself takes beside: any engine argument of vLLM, or `tool_parser` and `reasoning` of transformers."""
    url: str | None = None
    """Base URL of an OpenAI-compatible upstream, such as https://api.example.com/v1."""
    api_key: SecretStr | None = None
    """The upstream's key; agents never see it."""
    upstream_model: str | None = None
    """The upstream's name of the model; None: the name under which it is served here."""
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    """Serve adds replicas up to this number while there is load, and takes them away again. None: always `replicas`."""
    num_cpus: float = Field(default=0.5, ge=0)
    """In the synchronous loop engines and learners never compute at once, so that on a CPU each claims half a core."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads that compute on the CPU; None: as many as `num_cpus`, at least one. Where engines and learners take turns, each may
    have all cores, which pays from some ten million parameters on."""
    num_gpus: float = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt plus response, in tokens; the model's own limit applies if it is lower."""
    max_concurrent: int = Field(default=128, ge=1)
    """Sequences that a replica decodes at once."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that wait for a place before the replica answers 503."""
    max_adapters: int = Field(default=0, ge=0)
    """LoRA adapters that vLLM has room for beside the model itself; the transformers engine takes any number."""
    update_mode: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight when new weights come go on with them (each token tells its version), hold them up, or end."""
    token_in: bool = True
    """A conversation's next prompt is made of the tokens that were sampled so far and the new turns, so that rendering it anew
    cannot change the past."""
    sleep_while_learning: bool = False
    """Free the device's memory while the learners compute; for engines and learners on the same GPU."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Longest body of a request."""
    host: str | None = None
    """Address that HTTP listens on. None: loopback on a cluster of one node, all interfaces on more."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """HTTP port. None: 8000, or any free port if that is taken."""
    start_timeout_s: float = Field(default=180.0, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")
        if self.kind == "upstream" and self.url is None:
            raise ValueError("an upstream engine needs a url")
        if self.kind not in ("auto", "upstream") and self.url is not None:
            raise ValueError(f"url is for an upstream engine, and kind is {self.kind!r}")
        return self


class RunnerConfig(Config):
    """The pool of RunnerActors."""

    n: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.1, ge=0)
    max_concurrent: int = Field(default=64, ge=1)
    """Rollouts that one runner executes at once (asynchronous agents on its event loop, others in as many threads)."""
    max_restarts: int = Field(default=3, ge=0)
    """Runners that may die, and are replaced, without a rollout succeeding meanwhile; with one more the run ends."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts after which a runner ends; None for no limit."""
    stuck_after_s: float = Field(default=45.0, gt=0)
    """A runner whose event loop does not turn for so long is killed and replaced; sooner than its leases expire."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    external: bool = False
    """Other processes start the runners, and join the run by its name: `Trainer(role="runner")`, `raylight runner`."""


class StoreConfig(Config):
    """The run's store."""

    lease_seconds: float = Field(default=60.0, gt=0)
    """How long an attempt may go without a sign of life of itself or its runner before it goes back to the queue."""
    max_queued: int = Field(default=10_000, ge=1)
    """Rollouts that wait at once; whoever enqueues more waits too."""
    path: str | None = None
    """The store's file, on a local disk of the driver's machine. None: `store.db` in the run directory."""


class LoraConfig(Config):
    """A LoRA adapter, https://arxiv.org/abs/2106.09685."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    """Names of the modules that are adapted; "all-linear" is all but the output layer."""
    exclude_modules: str | list[str] | None = None


class LearnerConfig(Config):
    """The group of LearnerActors."""

    n: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, gt=0)
    num_threads: int | None = Field(default=None, ge=1)
    """Threads that compute on the CPU; None: as many as `num_cpus`, at least one."""
    num_gpus: float = Field(default=0, ge=0)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout_s: float = Field(default=60.0, gt=0)
    start_timeout_s: float = Field(default=300.0, gt=0)
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of every call to the ranks; past it their stacks are dumped into the log, and the gang is restarted."""
    max_restarts: int = Field(default=2, ge=0)
    """How often the ranks are started anew, all together, after one of them died or hung."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of computation; parameters and optimizer are held in float32 where they are trained."""
    lora: LoraConfig | None = None
    """Train an adapter of these settings instead of the whole model."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass; a larger batch is split, never dropped."""
    max_row_tokens: int | None = Field(default=None, ge=2)
    """Longest trajectory that is trained. None: `max_tokens_per_micro_batch`."""
    long_rows: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a longer one: an error, left out, or its tokens past the limit are. Either is counted in the metrics."""
    packed: bool = False
    """Rows of a micro-batch one after the other instead of padded to the longest."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    param_offload: bool = False
    """Keep parameters in the host's memory while the learners rest."""
    optimizer_offload: bool = False
    """The same for the optimizer's state."""
    torch_compile: bool = False
    ulysses: int = Field(default=1, ge=1)
    """Ranks that share each sequence (Ulysses sequence parallelism, https://arxiv.org/abs/2309.14509); needs `packed`, a GPU and
    flash attention."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """auto: flash_attention_2 where it is installed and there is a GPU, else sdpa."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ulysses > 1 and not (
            self.packed and self.num_gpus and self.attention in ("auto", "flash_attention_2")
        ):
            raise ValueError("ulysses > 1 is silently wrong without packed rows, a GPU and flash_attention_2")
        if self.num_gpus > 1 or (self.n > 1 and 0 < self.num_gpus <= 0.5):
            raise ValueError(
                f"num_gpus={self.num_gpus:g} for each of n={self.n}: a rank computes on one GPU, and shares it with no other rank "
                "(more than half of one leaves room for an engine only)"
            )
        if self.n % self.ulysses:
            raise ValueError(
                f"n={self.n} ranks cannot be divided into sequence-parallel groups of ulysses={self.ulysses}"
            )
        if self.max_row_tokens is not None and self.max_row_tokens > self.max_tokens_per_micro_batch:
            raise ValueError(
                f"max_row_tokens={self.max_row_tokens} is more than max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}"
            )
        return self

    @property
    def row_limit(self) -> int:
        """Tokens of the longest trajectory that is trained."""
        return self.max_row_tokens or self.max_tokens_per_micro_batch


class CheckpointConfig(Config):
    """Training states, from which a run that was killed goes on: model, optimizer, schedule, random numbers, place in the data."""

    every: int = Field(default=10, ge=0)
    """Steps between two states; 0 saves one at the end only. The steps since the last are taken again from the store's rollouts."""
    keep: int = Field(default=2, ge=1)
    """States that are kept; older ones are removed."""
    path: str | None = None
    """A folder that the first learner and the driver can reach, or a URL of fsspec (s3://..., gs://...). None: `state` in the run
    directory."""
