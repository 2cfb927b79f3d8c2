"""Typed settings of the engines, runners, store, learners and training states."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from raylight._utils.bounds import (
    MAX_BODY,
    MAX_CONCURRENT,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_IMAGE_PIXELS,
    MAX_PROCESSES,
    MAX_SECONDS,
)
from raylight._utils.ray_resources import CustomResources
from raylight.base_config import Config
from raylight.types import JsonObject
from raylight.types.request_fields import PROTECTED


def cpu_threads(config: EngineConfig | LearnerConfig) -> int:
    """Return the number of threads with which an engine or a learner computes on a CPU."""
    return config.num_threads or max(1, int(config.num_cpus))


MODEL_NAME = "policy"
"""The name under which a run serves its model."""


class EngineConfig(Config):
    """The serving deployment."""

    kind: str = "auto"
    """"transformers", "vllm", "upstream", or the dotted name of an engine class, "package.module:Engine".
    "auto" is upstream if a `url` is given, vllm if replicas have a GPU and the nodes with GPUs have it, else
    transformers."""
    args: JsonObject = Field(default_factory=dict)
    """Further arguments of the engine: any engine argument of vLLM; `tool_parser`, `reasoning` and
    `max_new_tokens` of transformers; keyword arguments of an engine class."""
    url: str | None = None
    """Base URL of an OpenAI-compatible upstream, such as https://api.example.com/v1."""
    api_key: SecretStr | None = None
    """API key of the upstream. Agents never receive it."""
    upstream_model: str | None = None
    """Name of the model at the upstream. None: the name under which raylight serves it."""
    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Serve replicas, each with one engine."""
    max_replicas: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Upper limit of Serve's autoscaling by load. None: `replicas`, until `raylight scale` changes it."""
    target_ongoing_requests: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Concurrent requests of each replica that autoscaling aims at. None: `max_concurrent`."""
    drain_timeout_s: float = Field(default=60.0, ge=0, le=MAX_SECONDS)
    """Seconds for which a replica that is taken away, by `raylight scale`, autoscaling or because its node
    drains, may finish its requests. Then agents' clients send them again, to another replica."""
    num_cpus: float = Field(default=0.5, ge=0, le=MAX_PROCESSES)
    """CPUs that Ray reserves for a replica. Half a core suffices in the synchronous loop, where engines and
    learners never compute at the same time."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Threads that compute on the CPU. None: as many as `num_cpus`, at least one. If neither is set, engine
    and learners of a model above ten million parameters each use all cores, or share them with
    `max_staleness`."""
    num_gpus: float = Field(default=0, ge=0, le=MAX_PROCESSES)
    """GPUs that Ray reserves for a replica, and for each worker of vLLM. At most 1, unless `kind` is your own
    class. If not set: a GPU, or a part of one, if the cluster has GPUs."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a replica, and for each worker of vLLM, such as
    {"engine_node": 1}: only nodes that have them, by `ray start --resources`, run replicas."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and computation. If not set: bfloat16 on a GPU."""
    max_model_len: int = Field(default=2048, ge=8, le=MAX_COUNT)
    """Longest prompt plus response, in tokens; the model's own limit applies if it is lower. If not set: that
    limit on a GPU, up to 16384 tokens and a learner's longest row."""
    max_concurrent: int = Field(default=128, ge=1, le=MAX_CONCURRENT)
    """Sequences that a replica decodes at the same time. If not set: with vLLM on a GPU as many as a step
    has rollouts, up to 1024."""
    max_waiting: int = Field(default=4096, ge=1, le=MAX_CONCURRENT)
    """Requests that a replica queues; further ones are answered with status 503."""
    max_adapters: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """LoRA adapters that vLLM can serve in addition to the model. The transformers engine has no such
    limit."""
    update_mode: Literal["keep", "wait", "abort"] = "keep"
    """Treatment of requests in flight when new weights arrive. keep: they continue with the new weights, and
    each token records its weight version. wait: the update waits for them. abort: they end."""
    token_in: bool = True
    """Build a conversation's next prompt from the tokens sampled so far plus the rendered new turns, so that
    re-rendering the conversation cannot change earlier tokens."""
    tolerate_rewrites: bool = True
    """Continue a conversation in tokens too if the agent sends it back with other white space, with text
    appended to an answer, or with tool calls written as text. False: answers must have the same text and the
    same calls."""
    weight_transfer: str = "auto"
    """Transport of new weights: "gloo" through host memory; "nccl", "ipc" (engines and learners on the same
    GPUs) or "sharded_rdt" of vLLM between GPUs; or the dotted name of a transport. "auto" is gloo unless vLLM
    and the learners have GPUs, then ipc if each worker shares its GPU with a learner,
    nccl if no process shares one, else gloo."""
    min_replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Replicas that must have received new weights. With fewer, the run waits for replacements of the lost
    ones, up to `start_timeout_s`, and then ends."""
    sleep_while_learning: bool = False
    """Free the device's memory while the learners compute; for engines and learners that share a GPU."""
    max_body_bytes: int = Field(default=MAX_BODY, ge=1024, le=2**31)
    """Maximum size of a request body, in bytes."""
    fetch_images: bool = False
    """Fetch the images of http and https URLs in requests, from public addresses only. False: agents send
    their images in the request, as data URLs."""
    max_image_bytes: int = Field(default=20 * 2**20, ge=1024, le=2**30)
    """Maximum size of an image's file, in bytes."""
    max_image_pixels: int = Field(default=8000 * 8000, ge=1, le=MAX_IMAGE_PIXELS)
    """Maximum width times height of an image. A small file may have very many pixels."""
    max_images: int = Field(default=1500, ge=0, le=MAX_COUNT)
    """Maximum number of images in a request; 0 refuses images. A run with a teacher in engines, which reads
    tokens alone, sets it to 0."""
    ignore_fields: list[str] = Field(default_factory=list)
    """Request fields that are dropped before anything reads them, such as ["web_search_options"], by their
    names in the agent's dialect. "text.unheard" is a field within another one; a list on the way stands for
    each of its entries. Fields that shape what is sampled or recorded cannot be dropped."""
    host: str | None = None
    """Address that HTTP listens on. None: loopback on a cluster that the run started, all interfaces on one
    that other machines can join."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """HTTP port. None: 8000, or any free port if 8000 is in use."""
    start_timeout_s: float = Field(default=180.0, gt=0, le=MAX_SECONDS)
    """Seconds without progress after which the start of the replicas has failed."""

    @field_validator("ignore_fields")
    @classmethod
    def _check_ignored_fields(cls, names: list[str]) -> list[str]:
        for name in names:
            if not all(name.split(".")):
                raise ValueError(
                    f"{name!r} is not a field name; write a field as 'name', or as 'outer.inner'"
                )
            if name.rpartition(".")[2] in PROTECTED:
                raise ValueError(
                    f"{name!r} cannot be dropped: it shapes what is sampled or recorded, so that the answer "
                    "would be to another request; change the agent's request instead"
                )
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")
        if self.target_ongoing_requests is not None and not self.autoscales:
            raise ValueError(
                f"target_ongoing_requests={self.target_ongoing_requests:g} has no effect without "
                "autoscaling; set max_replicas to more than replicas"
            )
        if self.min_replicas > self.replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is more than replicas={self.replicas}")
        if self.kind == "upstream" and self.url is None:
            raise ValueError(
                "kind is 'upstream' and url is missing; give the base URL of an OpenAI-compatible endpoint"
            )
        if self.kind in ("transformers", "vllm") and self.url is not None:
            raise ValueError(f"url is set, but kind is {self.kind!r}; only an upstream engine has a url")
        if self.num_gpus > 1 and self.kind in ("auto", "transformers", "vllm"):
            raise ValueError(
                f"num_gpus={self.num_gpus:g}: a replica of transformers and each worker of vLLM compute on "
                "one GPU; give 1 or less, and args={'tensor_parallel_size': ...} for one engine on several"
            )
        return self

    @property
    def autoscales(self) -> bool:
        """True if Serve changes the number of replicas by load."""
        return self.max_replicas is not None and self.max_replicas > self.replicas


class ScoringConfig(Config):
    """A fixed model that no run trains, in separate Serve replicas."""

    model: str
    """Folder of a Hugging Face model, or its name in the local cache."""
    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Serve replicas, each with one engine. Rows to score are divided among them."""
    num_cpus: float = Field(default=0.5, ge=0, le=MAX_PROCESSES)
    """CPUs that Ray reserves for a replica."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Threads that compute on the CPU. None: as many as `num_cpus`, at least one."""
    num_gpus: float = Field(default=0, ge=0, le=1)
    """GPUs that Ray reserves for a replica, and for each worker of vLLM. They are this model's alone: the
    defaults of learners and engines are for the others."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a replica, and for each worker of vLLM."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and computation. If not set: bfloat16 on a GPU."""
    start_timeout_s: float = Field(default=180.0, gt=0, le=MAX_SECONDS)
    """Seconds without progress after which the start of the replicas has failed."""
    timeout_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """Seconds within which a request must be answered, the replacement of lost replicas included."""

    def engine(self) -> EngineConfig:
        """Return the settings of its engine."""
        own = set(EngineConfig.model_fields) - {"max_model_len"}
        return EngineConfig(**self.model_dump(exclude_unset=True, include=own))


class RunnerConfig(Config):
    """The pool of RunnerActors."""

    n: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Runners."""
    num_cpus: float = Field(default=0.1, ge=0, le=MAX_PROCESSES)
    """CPUs that Ray reserves for a runner."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a runner: only nodes that have them run runners."""
    max_concurrent: int = Field(default=64, ge=1, le=MAX_CONCURRENT)
    """Rollouts that one runner executes concurrently: asynchronous agents on its event loop, synchronous ones
    in as many threads. If not set: as many as a step has rollouts if the engines are on GPUs, up to 256."""
    max_restarts: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Deaths of runners in a row, without a rollout that succeeds in between, after which the run still goes
    on."""
    max_rollouts: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Rollouts after which a runner ends. None: no limit."""
    stuck_after_s: float = Field(default=45.0, gt=0, le=MAX_SECONDS)
    """Seconds for which a runner's event loop may be blocked before the runner is killed and replaced. Keep
    it below `StoreConfig.lease_s`."""
    placement_timeout_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Seconds within which the cluster must have resources for the runners."""
    start_timeout_s: float = Field(default=180.0, gt=0, le=MAX_SECONDS)
    """Seconds without progress after which the start of placed runners has failed. For external runners:
    seconds without any runner after which the run ends."""
    drain_timeout_s: float = Field(default=60.0, ge=0, le=MAX_SECONDS)
    """Seconds for which a runner that is taken away, by `raylight scale` or because its node drains, may
    finish the rollouts that it executes. Then they go back to the queue."""
    external: bool = False
    """True if other processes start the runners and join the run by its name: `Trainer(role="runner")`,
    `raylight runner`."""


class StoreConfig(Config):
    """The store of a run."""

    lease_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Seconds without a span of an attempt or a heartbeat of its runner after which the attempt is
    requeued."""
    max_queued: int = Field(default=10_000, ge=1, le=MAX_COUNT)
    """Capacity of the queue of rollouts. Enqueueing blocks while the queue is full."""
    path: str | None = None
    """File of the store, on a local disk of the driver's machine. None: `store.db` in the run directory."""


class SessionConfig(Config):
    """Sessions of agents outside the run, which `raylight serve --learn` opens."""

    max_open: int = Field(default=64, ge=1, le=MAX_CONCURRENT)
    """Sessions that may be open at a time, and expired ones that wait for a late reward."""


class LoraConfig(Config):
    """A LoRA adapter (https://arxiv.org/abs/2106.09685)."""

    rank: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Rank of the update matrices."""
    alpha: float = Field(default=16.0, gt=0, le=MAX_FACTOR)
    """Scale of the update: it is multiplied by `alpha / rank`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """Names of the adapted modules. "all-linear": every linear layer except the output layer and, in a
    mixture of experts, except experts, shared experts and routers."""
    exclude_modules: str | list[str] | None = None
    """Names of modules that are left out of `target_modules`."""
    target_parameters: list[str] = Field(default_factory=list)
    """Ends of the names of packed experts that are adapted too, parameters of shape (experts, rows, columns),
    such as ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]. Each expert has separate matrices. peft's
    setting of this name; it allows no `dropout`, and no engine serves such an adapter."""
    serve: Literal["adapter", "merged"] = "adapter"
    """adapter: the engines serve the model with the adapter, and receive the adapter only. merged: they
    receive the whole model, into which the adapter is merged, for an engine that cannot serve it; if not set,
    with `target_parameters`."""

    @model_validator(mode="before")
    @classmethod
    def _merge_parameters(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("target_parameters"):
            return {"serve": "merged"} | values
        return values

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if self.target_parameters and self.dropout:
            raise ValueError(
                f"dropout={self.dropout:g} cannot be applied to target_parameters, whose update is added to "
                "the weights; remove one of them"
            )
        if self.target_parameters and self.serve == "adapter":
            raise ValueError(
                "serve='adapter': no engine serves an adapter of target_parameters; set serve='merged'"
            )
        return self


class LearnerConfig(Config):
    """The learners: what trains the policy."""

    kind: Literal["ranks", "local", "simulated"] = "ranks"
    """ranks: a group of LearnerActors. local: the driver's process trains the only copy of the model, from
    which it also samples, on a small GPU or a CPU. simulated: nothing is trained, updates and publications
    only take time, to test rollouts under load."""
    step_s: float = Field(default=1.0, ge=0, le=MAX_SECONDS)
    """Seconds of an update of the simulated learner."""
    sync_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)
    """Seconds of a publication of the simulated learner."""
    device: str = "auto"
    """Torch device of the local learner; auto: cuda if there is a GPU, else cpu."""
    memory_limit_gb: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Limit of the local learner's estimated peak memory in 10^9 bytes, with its engine; None: the free
    memory of the device."""
    n: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Learner ranks."""
    num_cpus: float = Field(default=0.5, gt=0, le=MAX_PROCESSES)
    """CPUs that Ray reserves for a rank."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Threads that compute on the CPU; see `EngineConfig.num_threads`. If not set: on a GPU half of the CPUs
    that the node has for each GPU, up to 8."""
    num_gpus: float = Field(default=0, ge=0, le=MAX_PROCESSES)
    """GPUs that Ray reserves for a rank, at most 1. A fraction leaves room for an engine on the same GPU. If
    not set: a GPU, or a part of one, if the cluster has GPUs."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a rank: only nodes that have them run ranks."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Strategy of Ray's placement group for the ranks."""
    placement_timeout_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Seconds within which the cluster must place the ranks."""
    start_timeout_s: float = Field(default=300.0, gt=0, le=MAX_SECONDS)
    """Seconds within which the ranks must be ready."""
    collective_timeout_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """Seconds for which the ranks may make no progress: the limit of a micro-batch, and of the wait of one
    rank for another. A whole update may take longer. When it passes, the stacks of the ranks are logged and
    all ranks are restarted."""
    max_restarts: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Restarts of all ranks together, after one of them died or hung, before the run ends."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of computation. Trained parameters and optimizer state are always float32. If not set:
    bfloat16 on a GPU."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter with these settings instead of the whole model."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Coefficient of the loss that balances the load of a mixture's experts (Switch Transformers,
    https://arxiv.org/abs/2101.03961), as transformers computes it: over all layers together, and over the
    tokens of all rows. It is added to the loss of a policy or of supervised training; 0 leaves it out."""
    router_replay: bool = False
    """Send each token to the experts that the engine's routers chose for it, in all passes of the policy and
    of the initial model (R3, https://arxiv.org/abs/2510.11370). For mixtures of experts, whose routes the
    engine records with the tokens."""
    train_vision: bool = False
    """Train the vision part of a model too: its tower, and the projector of its features. It is frozen by
    default; then the features of an image are computed once an update. Full models only; an
    adapter adapts the language part."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1, le=MAX_COUNT)
    """Maximum number of tokens of one forward and backward pass. A larger batch is split; nothing is
    dropped."""
    max_row_tokens: int | None = Field(default=None, ge=2, le=MAX_COUNT)
    """Maximum length of a training row (a trajectory), in tokens. None: `max_tokens_per_micro_batch`."""
    long_rows: Literal["error", "drop", "truncate"] = "error"
    """Treatment of longer rows: raise an error, drop them, or cut off the tokens beyond the limit. The
    metrics count dropped and truncated rows."""
    packed: bool = False
    """Concatenate the rows of a micro-batch instead of padding them to the longest. If not set: True on a GPU
    in bfloat16, if all layers of the model separate rows without a mask."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them. If not set: True on a GPU."""
    param_offload: bool = False
    """Keep parameters in host memory while the learners are idle."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory while the learners are idle."""
    torch_compile: bool = False
    """Compile the model with `torch.compile`."""
    fsdp_size: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Ranks among which parameters, gradients and optimizer state are sharded; groups of so many ranks have
    copies (HSDP). With the GPUs of a node as its size, only gradients travel between nodes. None: all
    ranks."""
    no_sync: bool = False
    """Reduce gradients once per optimizer step instead of once per micro-batch. Less communication, but each
    rank then holds the gradient of the whole model in float32."""
    ulysses: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Ranks that share each sequence (Ulysses sequence parallelism, https://arxiv.org/abs/2309.14509). More
    than one needs `packed`, and `attention` to be auto."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation. auto: for packed rows torch's attention of rows of any lengths, which needs
    no mask, if the model allows it; else sdpa."""

    @model_validator(mode="after")
    def _check_read(self) -> Self:
        read = READ_BY_KIND.get(self.kind)
        unread = [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
            and (name in SIMULATED_TIMES | LOCAL_SETTINGS if read is None else name not in read)
        ]
        if unread:
            raise ValueError(f"nothing reads {', '.join(unread)} with kind={self.kind!r}; leave it out")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ulysses > 1 and not (self.packed and self.attention == "auto"):
            raise ValueError(
                f"ulysses={self.ulysses} gives silently wrong results without packed rows, or with a "
                "custom attention implementation; set packed=True, and leave out attention"
            )
        if self.train_vision and self.lora is not None:
            raise ValueError(
                "an adapter (learner.lora) adapts the language part alone; leave out train_vision, or lora"
            )
        if self.ulysses > 1 and self.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef:g} cannot be computed by ranks that share "
                "a sequence; set ulysses=1, or leave it out"
            )
        if self.router_replay and (self.torch_compile or self.ulysses > 1):
            raise ValueError(
                "router_replay cannot be computed with torch_compile, or by ranks that share a sequence; "
                "leave out torch_compile and ulysses, or router_replay"
            )
        if self.num_gpus > 1 or (self.n > 1 and 0 < self.num_gpus <= 0.5):
            raise ValueError(
                f"num_gpus={self.num_gpus:g} for each of n={self.n} ranks: a rank computes on one GPU and "
                "shares it with no other rank; give 1, or more than 0.5 to leave room for an engine"
            )
        if self.n % self.ulysses:
            raise ValueError(
                f"n={self.n} ranks cannot be divided into sequence-parallel groups of ulysses={self.ulysses}"
            )
        if self.fsdp_size is not None and self.n % self.fsdp_size:
            raise ValueError(
                f"n={self.n} ranks cannot be divided into groups of fsdp_size={self.fsdp_size} that share a "
                "model; give a divisor of n"
            )
        if self.max_row_tokens is not None and self.max_row_tokens > self.max_tokens_per_micro_batch:
            raise ValueError(
                f"max_row_tokens={self.max_row_tokens} is more than "
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}"
            )
        return self

    @property
    def row_limit(self) -> int:
        """Maximum number of tokens of a training row."""
        return self.max_row_tokens or self.max_tokens_per_micro_batch


ROW_SETTINGS = frozenset({"kind", "max_tokens_per_micro_batch", "max_row_tokens", "long_rows"})
"""Settings that every kind of learner reads."""
SIMULATED_TIMES = frozenset({"step_s", "sync_s"})
LOCAL_SETTINGS = frozenset({"device", "memory_limit_gb"})
READ_BY_KIND = {
    "local": ROW_SETTINGS
    | LOCAL_SETTINGS
    | {"num_threads", "dtype", "lora", "gradient_checkpointing"}
    | {"router_aux_loss_coef", "train_vision"},
    "simulated": ROW_SETTINGS | SIMULATED_TIMES,
}
"""Settings that a kind of learner reads; the ranks read all but the simulated learner's."""


class CheckpointConfig(Config):
    """Training states, from which a killed run resumes.

    A state holds the model, the optimizer, the learning-rate schedule, the random states and the position in
    the data.
    """

    every: int = Field(default=10, ge=0, le=MAX_COUNT)
    """Steps between two states; 0 saves one at the end only. A resumed run replays the steps since the last
    state from the rollouts in the store."""
    keep: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Number of states to keep; older ones are deleted."""
    path: str | None = None
    """Folder that every learner and the driver can reach, or an fsspec URL (s3://..., gs://...). None:
    `state` in the run directory."""
    write_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_SECONDS)
    """Seconds within which the storage must take a state. States are written in the background; the next one
    waits for the last one."""
