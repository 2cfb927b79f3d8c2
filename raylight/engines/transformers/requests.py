"""Request models of the engine's routes. A field that is not declared here is rejected, never ignored,
except for labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raylight.engines.transformers.sampling import SamplingParams
from raylight.http.body import RequestModel
from raylight.http.errors import RequestError
from raylight.http.field_bounds import check_bounds
from raylight.types import JsonObject
from raylight.types.chat_messages import is_reasoning, reasoning_of
from raylight.types.request_fields import log_dropped

NO_BUDGETS = "this engine cannot enforce (or thinking.budget_tokens)"
MAX_TOP_LOGPROBS = 20
StopWord = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


class Body(RequestModel):
    """Base of request bodies. As in vLLM, a number may be given as text or with a fraction of zero."""

    model_config = ConfigDict(strict=False)

    @classmethod
    def read(cls, body: object) -> Self:
        """Validate a decoded JSON body.

        Raises:
            RequestError: names the invalid fields.
        """
        if isinstance(body, dict):
            check_bounds(body)
        return super().read(body)


class SampledStreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    name: str
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema requires the field json_schema, and no other type accepts it")
        return self


class SamplingBody(Body):
    """Fields that chat and completions have in common. `raylight.http.field_bounds` has their bounds."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: StopWord | list[StopWord] | None = None
    seed: int | None = None
    n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: SampledStreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None

    @property
    def stop_words(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """True if the stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_each_chunk(self) -> bool:
        """True if each chunk has the token counts so far; without `includes_usage` none has, as in vLLM."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        return self

    def params(
        self, max_tokens: int, vocab_size: int, top_logprobs: int, grammar: object = None
    ) -> SamplingParams:
        """Return the sampling parameters of the first choice.

        Raises:
            RequestError: fields contradict each other.
        """
        if grammar is not None and (self.ignore_eos or self.min_tokens):
            raise RequestError(
                "ignore_eos and min_tokens cannot be combined with an answer constrained to a schema"
            )
        if (self.min_tokens or 0) > max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is greater than max_tokens={max_tokens}")
        top_k = self.top_k or 0
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_value_or(self.temperature, 1.0),
            top_p=_value_or(self.top_p, 1.0),
            top_k=top_k if 0 < top_k < vocab_size else 0,  # more than all tokens: no limit
            stop=self.stop_words,
            seed=self.seed,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_value_or(self.repetition_penalty, 1.0),
            logit_bias=_bias(self.logit_bias or {}, vocab_size),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=_token_ids(self.stop_token_ids or [], vocab_size),
            top_logprobs=top_logprobs,
            grammar=grammar,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str
    detail: str | None = None
    """Accepted and without effect: the model's processor chooses the resolution."""


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(BaseModel):
    name: str
    arguments: Any = None


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
KINDS = frozenset({"text", "image_url"})


class HistoryCall(BaseModel):
    """A tool call in an earlier message."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message of text and images. Undeclared fields are kept, because a chat template may use them."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: list[HistoryCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _check_kinds(cls, content: object) -> object:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind not in KINDS:
                what = "audio" if kind == "input_audio" else f"{kind!r:.50}"
                raise ValueError(f"this engine accepts text and images, not {what}")
        return content

    @model_validator(mode="before")
    @classmethod
    def _move_reasoning(cls, message: Any) -> object:
        """Move blocks of thinking from the content of an answer to its reasoning."""
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(is_reasoning, content)):
            return message
        parts = [part for part in content if not is_reasoning(part)]
        return {**message, "content": parts, "reasoning_content": reasoning_of(message) or None}

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self


class ToolFunction(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class MessagesBody(Body):
    """Fields that are rendered into a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[FunctionTool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None

    @property
    def has_images(self) -> bool:
        """True if a message has an image."""
        parts = (part for m in self.messages if isinstance(m.content, list) for part in m.content)
        return any(isinstance(part, ImagePart) for part in parts)

    @model_validator(mode="after")
    def _check_final_message(self) -> MessagesBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message requires add_generation_prompt=false")
        return self


class TokenPrompt(Body):
    """A prompt as token ids, as vLLM accepts it in `kv_transfer_params`."""

    prompt_token_ids: TokenIds


class ChatRequest(SamplingBody, MessagesBody):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    kv_transfer_params: TokenPrompt | None = None
    thinking_token_budget: int | None = None
    """Accepted and not enforced."""
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.thinking_token_budget is not None:
            log_dropped("thinking_token_budget", NO_BUDGETS)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice requires tools")
        return self

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt as token ids, instead of rendered messages; None if the messages are to be rendered."""
        return self.kv_transfer_params.prompt_token_ids if self.kv_transfer_params else None

    def schemas(self) -> Mapping[str, object]:
        """Return tool name to the schema of its parameters."""
        return {
            tool.function.name: tool.function.parameters or {"type": "object"} for tool in self.tools or ()
        }


class CompletionRequest(SamplingBody):
    prompt: str | TokenIds | Texts | TokenLists
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(MessagesBody):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if invalid := [key for key in biases if int(key) >= vocab_size]:
        raise RequestError(f"logit_bias: keys are token ids below {vocab_size}, not {invalid[0]!r}")
    return tuple((int(key), bias) for key, bias in biases.items())


def _token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if invalid := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(f"stop_token_ids: token ids are below {vocab_size}, not {invalid[0]}")
    return tuple(ids)
