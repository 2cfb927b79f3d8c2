"""The OpenAI chat-completions dialect: request and answer as data, without HTTP."""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raylight.aio import together
from raylight.semconv import CHAT_SPAN, INPUT_MESSAGES, OUTPUT_MESSAGES, REQUEST_MODEL, RESPONSE_ID
from raylight.serving.capture import CallInfo, CapturingEngine
from raylight.serving.engine import RequestError, Sampled, SamplingParams

StopWord = Annotated[str, Field(min_length=1)]


class ChatMessage(BaseModel):
    """A message of plain text; whatever else a template may use of it is kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class ChatRequest(BaseModel):
    """What this dialect understands. A field that it does not know is refused, never ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop: StopWord | list[StopWord] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - 128)
    n: int | None = Field(default=None, ge=1, le=128)
    logprobs: bool | None = None
    stream: Literal[False] | None = None
    user: str | None = None

    @classmethod
    def read(cls, body: Any) -> ChatRequest:
        """Check a decoded JSON body.

        Raises:
            RequestError: with every field that does not fit.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
            raise RequestError("this engine does not support the request: " + "; ".join(problems)) from None

    def params(self, engine: CapturingEngine) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens or engine.max_model_len,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
        )


async def complete_chat(engine: CapturingEngine, body: Any) -> dict[str, Any]:
    """Answer one chat-completions request.

    Raises:
        RequestError: the request is malformed, asks for another model, or for what the engine cannot do.
    """
    request = ChatRequest.read(body)
    if request.model != engine.model:
        raise RequestError(f"the model {request.model!r} does not exist; this endpoint serves {engine.model!r}", 404)
    try:
        prompt_ids = engine.tokenizer.apply_chat_template(
            [m.model_dump() for m in request.messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise RequestError(f"the chat template refused the messages: {error}") from error
    params, answer_id = request.params(engine), uuid.uuid4().hex
    calls = [_call(engine, request, i, answer_id) for i in range(request.n or 1)]
    results = await together(*(engine.generate(prompt_ids, _nth(params, i), call) for i, call in enumerate(calls)))
    return _answer(engine, request, answer_id, prompt_ids, results)


def _call(engine: CapturingEngine, request: ChatRequest, index: int, answer_id: str) -> CallInfo:
    """What the span of the n-th choice shows. The call of the first choice has the answer's own id."""

    def attributes(sampled: Sampled) -> dict[str, Any]:
        return {
            REQUEST_MODEL: request.model,
            RESPONSE_ID: f"chatcmpl-{answer_id}",
            INPUT_MESSAGES: json.dumps([message.model_dump() for message in request.messages]),
            OUTPUT_MESSAGES: json.dumps([_choice(engine, request, index, sampled)["message"]]),
        }

    return CallInfo(CHAT_SPAN, attributes) if index else CallInfo(CHAT_SPAN, attributes, answer_id)


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """Several choices of one seeded request differ, and are reproducible all the same."""
    return params if params.seed is None else SamplingParams(**{**vars(params), "seed": params.seed + index})


def _answer(
    engine: CapturingEngine, request: ChatRequest, answer_id: str, prompt_ids: list[int], results: list[Sampled]
) -> dict[str, Any]:
    sampled_tokens = sum(len(r.output_ids) for r in results)
    return {
        "id": f"chatcmpl-{answer_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": engine.model,
        "choices": [_choice(engine, request, i, result) for i, result in enumerate(results)],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": sampled_tokens,
            "total_tokens": len(prompt_ids) + sampled_tokens,
        },
    }


def _choice(engine: CapturingEngine, request: ChatRequest, index: int, sampled: Sampled) -> dict[str, Any]:
    text = engine.tokenizer.decode(sampled.output_ids, skip_special_tokens=True)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    cut = min((text.index(word) for word in stops if word in text), default=len(text))
    logprobs = None
    if request.logprobs:
        words = [engine.tokenizer.decode([token]) for token in sampled.output_ids]
        logprobs = {
            "content": [
                {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
                for word, logprob in zip(words, sampled.logprobs, strict=True)
            ],
            "refusal": None,
        }
    return {
        "index": index,
        "message": {"role": "assistant", "content": text[:cut]},
        "finish_reason": sampled.finish_reason,
        "logprobs": logprobs,
    }
