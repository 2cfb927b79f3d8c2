"""Starlette application of the engine `transformers`: OpenAI's chat and completions routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from raylight.engines.transformers.chat import begin_chat
from raylight.engines.transformers.completions import begin_completion
from raylight.engines.transformers.prompt import encode, read_prompt
from raylight.engines.transformers.reply import Reply, resolve_adapter, sse
from raylight.engines.transformers.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from raylight.http.errors import RequestError, error_response
from raylight.http.request import json_request, until_disconnect
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine

Begin = Callable[["TransformersEngine", Any], Awaitable[Reply]]


def build_app(engine: TransformersEngine) -> Starlette:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _sampling_route(engine, begin_chat), methods=["POST"]),
            Route("/v1/completions", _sampling_route(engine, begin_completion), methods=["POST"]),
            Route("/tokenize", _route(engine, _tokenize), methods=["POST"]),
            Route("/detokenize", _route(engine, _detokenize), methods=["POST"]),
            Route("/v1/models", _models_route(engine)),
            Route("/v1/models/{name:path}", _models_route(engine)),
        ],
        exception_handlers={RequestError: _error_response},
    )
    app.router.redirect_slashes = False
    return app


class ReplyStream(StreamingResponse):
    """A reply as server-sent events.

    Its choices are closed with it, even if the client disconnects before the first event.
    """

    def __init__(self, reply: Reply) -> None:
        super().__init__(
            sse(reply.events()), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reply.choices:
            await super().__call__(scope, receive, send)


def _sampling_route(engine: TransformersEngine, begin: Begin) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        reply = await begin(engine, await _body(request))
        if reply.streams:
            return ReplyStream(reply)
        with reply.choices:
            return JSONResponse(await _cancel_on_disconnect(request, reply.body()))

    return respond


def _route(
    engine: TransformersEngine, compute: Callable[[TransformersEngine, Any], Awaitable[JsonObject]]
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return JSONResponse(await compute(engine, await _body(request)))

    return respond


async def _tokenize(engine: TransformersEngine, body: object) -> JsonObject:
    if isinstance(body, dict) and "messages" in body:
        chat = TokenizeChatRequest.read(body)
        tokens = (await read_prompt(engine, chat)).ids
        model, with_strings = chat.model, chat.return_token_strs
    else:
        plain = TokenizeRequest.read(body)
        tokens = encode(engine, plain.prompt, plain.add_special_tokens)
        model, with_strings = plain.model, plain.return_token_strs
    resolve_adapter(engine, model)
    strings = engine.tokenizer.convert_ids_to_tokens(tokens) if with_strings else None
    return {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


async def _detokenize(engine: TransformersEngine, body: object) -> JsonObject:
    request = DetokenizeRequest.read(body)
    resolve_adapter(engine, request.model)
    if any(not 0 <= token < engine.vocab_size for token in request.tokens):
        raise RequestError(f"tokens: ids must be between 0 and {engine.vocab_size - 1}")
    return {"prompt": engine.tokenizer.decode(request.tokens)}


def _models_route(engine: TransformersEngine) -> Callable[[Request], Awaitable[Response]]:
    def card(name: str, parent: str | None) -> JsonObject:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "raylight",
            "parent": parent,
            "max_model_len": engine.max_model_len,
        }

    async def respond(request: Request) -> Response:
        cards = {engine.model: card(engine.model, None)} | {
            name: card(name, engine.model) for name in engine.adapters if name != engine.model
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": list(cards.values())})
        resolve_adapter(engine, name)
        return JSONResponse(cards[name])

    return respond


async def _body(request: Request) -> object:
    return (await json_request(request.scope, request.receive)).fields


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _cancel_on_disconnect(request: Request, work: Awaitable[object]) -> object:
    """Await `work`; cancel it when the client disconnects, so that nothing is sampled without a reader."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("the client closed the connection", 499, "client_disconnected")
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()  # no effect on a finished task
        await asyncio.wait([task, disconnect])
