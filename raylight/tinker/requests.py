"""Bodies of the Tinker API's JSON requests. A field that is not declared here is rejected, never ignored."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raylight.http.errors import RequestError
from raylight.types import JsonObject

MAX_RANK = 1024
Count = Annotated[int, Field(ge=0, lt=2**31)]
SequenceId = Annotated[int, Field(ge=0, lt=2**62)]
Name = Annotated[str, Field(min_length=1, max_length=400)]


class TinkerBody(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    type: str = ""
    """Name of the request, which the route implies."""

    @classmethod
    def read(cls, fields: object) -> Self:
        """Validate a decoded JSON body.

        Raises:
            RequestError: 422, naming the first invalid field.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise RequestError(f"{place}: {first['msg']}", 422) from None


class SdkVersion(TinkerBody):
    sdk_version: str = ""


class CreateSession(TinkerBody):
    tags: list[str] = []
    user_metadata: JsonObject | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(TinkerBody):
    session_id: Name


class OptimizerSpec(TinkerBody):
    """The optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class LoraSpec(TinkerBody):
    """The adapter of a new model."""

    model_config = ConfigDict(frozen=True)
    rank: int = Field(ge=1, le=MAX_RANK)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    train_unembed: bool = True
    """Read and not followed: no adapter changes the output layer."""
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(TinkerBody):
    session_id: Name
    model_seq_id: SequenceId
    base_model: Name
    user_metadata: JsonObject | None = None
    lora_config: LoraSpec | None = None
    optimizer_config: OptimizerSpec | None = None


class ModelBody(TinkerBody):
    """A request about one model."""

    model_id: Name


class AdamParams(TinkerBody):
    """Settings of one step of AdamW."""

    model_config = ConfigDict(frozen=True)
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """0: no limit."""


class OptimStep(ModelBody):
    adam_params: AdamParams
    seq_id: SequenceId | None = None


class SaveWeights(ModelBody):
    path: Name | None = None
    seq_id: SequenceId | None = None
    ttl_seconds: int | None = Field(default=None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(ModelBody):
    path: Name | None = None
    sampling_session_seq_id: SequenceId | None = None
    seq_id: SequenceId | None = None
    ttl_seconds: int | None = Field(default=None, ge=1)
    kind: Literal["snapshot"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class LoadWeights(TinkerBody):
    """A checkpoint to load: onto the model `model_id`, or onto a new one of `session_id`."""

    path: Name
    optimizer: bool
    model_id: Name | None = None
    seq_id: SequenceId | None = None
    session_id: Name | None = None
    model_seq_id: SequenceId | None = None
    base_model: Name | None = None
    optimizer_config: OptimizerSpec | None = None
    user_metadata: JsonObject | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(TinkerBody):
    session_id: Name
    sampling_session_seq_id: SequenceId
    base_model: Name | None = None
    model_path: Name | None = None


class TextChunk(TinkerBody):
    tokens: list[int] = Field(max_length=2**20)
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(TinkerBody):
    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingOptions(TinkerBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | list[int] | None = None
    """Texts or tokens that end a response, besides the model's own tokens; an empty list disables these."""
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    prompt: ModelInput
    sampling_params: SamplingOptions
    num_samples: int = Field(default=1, ge=1, le=1024)
    base_model: Name | None = None
    model_path: Name | None = None
    sampling_session_id: Name | None = None
    seq_id: SequenceId | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_logprobs_last_n: None = None
    record_stability_info: bool | None = None


class RetrieveFuture(TinkerBody):
    request_id: Name
    allow_metadata_only: bool = False
    """Results are small, and always sent whole."""


class FinishSession(TinkerBody):
    reason: JsonObject | None = None
    detail: str | None = None


class CancelFuture(TinkerBody):
    request_id: Name


class WeightsInfo(TinkerBody):
    tinker_path: Name
