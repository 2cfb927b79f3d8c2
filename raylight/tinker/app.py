"""HTTP routes of the Tinker API."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from raylight._utils.bounds import MAX_BODY
from raylight.http.errors import RequestError
from raylight.http.request import OTHER_HOST, is_own_host, read_body, read_request
from raylight.tinker import requests as bodies
from raylight.tinker.checkpoints import CheckpointPath, CheckpointRecord, Kind
from raylight.tinker.models import TenantModel
from raylight.tinker.requests import ModelBody, TinkerBody, WeightsInfo
from raylight.tinker.service import TinkerService
from raylight.tinker.wire import PROTOBUF
from raylight.types import JsonObject

MAX_PAGE = 1000
KIND_NAMES: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}


class ServerRecords:
    """Answers about the state of a service."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes of the answers."""
        runs = f"{PREFIX}/training_runs"
        checkpoint = f"{runs}/{{model_id}}/checkpoints/{{kind}}/{{name}}"
        return [
            Route(runs, partial(_answer, self._training_runs)),
            Route(f"{runs}/{{model_id}}", partial(_answer, self._training_run)),
            Route(f"{runs}/{{model_id}}/checkpoints", partial(_answer, self._checkpoints_of_run)),
            Route(checkpoint, partial(_answer, self._delete), methods=["DELETE"]),
            Route(f"{PREFIX}/checkpoints", partial(_answer, self._checkpoints)),
            Route(f"{PREFIX}/sessions", partial(_answer, self._sessions)),
            Route(f"{PREFIX}/sessions/{{session_id}}", partial(_answer, self._session)),
            Route(f"{PREFIX}/samplers/{{sampler_id}}", partial(_answer, self._sampler)),
        ]

    def capabilities(self) -> JsonObject:
        """Return the models that can be trained and sampled from."""
        settings = self._service.settings
        model = {"model_name": settings.base_model, "max_context_length": settings.max_model_len}
        return {"supported_models": [model]}

    def model_info(self, body: ModelBody) -> JsonObject:
        """Return what a model in training is."""
        model, settings = self._service.models.get(body.model_id), self._service.settings
        data = {"model_name": settings.base_model, "tokenizer_id": settings.base_model}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.model_id,
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": settings.base_model,
        }

    def weights_info(self, body: WeightsInfo) -> JsonObject:
        """Return what a client needs to continue from a checkpoint."""
        record = self._service.checkpoints.record(CheckpointPath.parse(body.tinker_path))
        return {
            "base_model": record.base_model,
            "is_lora": True,
            "lora_rank": record.lora["rank"],
            **{name: record.lora[name] for name in ("train_unembed", "train_mlp", "train_attn")},
        }

    def _training_runs(self, request: Request) -> JsonObject:
        runs = [self._describe_run(model) for model in self._service.models.find()]
        page, cursor = _page(request, runs)
        return {"training_runs": page, "cursor": cursor}

    def _training_run(self, request: Request) -> JsonObject:
        return self._describe_run(self._service.models.get(request.path_params["model_id"]))

    def _checkpoints_of_run(self, request: Request) -> JsonObject:
        model_id = CheckpointPath.of(request.path_params["model_id"], "weights", "any").model_id
        return {"checkpoints": [_describe(r) for r in self._service.checkpoints.list(model_id)]}

    def _checkpoints(self, request: Request) -> JsonObject:
        page, cursor = _page(request, [_describe(r) for r in self._service.checkpoints.list()])
        return {"checkpoints": page, "cursor": cursor}

    def _delete(self, request: Request) -> None:
        model_id, kind, name = (request.path_params[part] for part in ("model_id", "kind", "name"))
        path = CheckpointPath.parse(f"tinker://{model_id}/{kind}/{name}")
        self._service.checkpoints.record(path)
        self._service.checkpoints.delete(path)

    def _sessions(self, request: Request) -> JsonObject:
        return {"sessions": _page(request, self._service.sessions.ids)[0]}

    def _session(self, request: Request) -> JsonObject:
        session_id = request.path_params["session_id"]
        self._service.sessions.check(session_id)
        models = self._service.models.find(lambda model: model.session_id == session_id)
        return {
            "training_run_ids": [model.model_id for model in models],
            "sampler_ids": self._service.samplers.ids_of(session_id),
        }

    def _sampler(self, request: Request) -> JsonObject:
        sampler_id = request.path_params["sampler_id"]
        path = self._service.samplers.get(sampler_id).path
        return {
            "sampler_id": sampler_id,
            "base_model": self._service.settings.base_model,
            "model_path": path,
        }

    def _describe_run(self, model: TenantModel) -> JsonObject:
        records = self._service.checkpoints.list(model.model_id)
        last = {CheckpointPath.parse(record.path).kind: _describe(record) for record in records}
        return {
            "training_run_id": model.model_id,
            "base_model": self._service.settings.base_model,
            "model_owner": "raylight",
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "last_request_time": _iso(model.last_request_at),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": model.user_metadata,
        }


def _describe(record: CheckpointRecord) -> JsonObject:
    path = CheckpointPath.parse(record.path)
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": KIND_NAMES[path.kind],
        "time": _iso(record.created_at),
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": False,
        "expires_at": None if record.expires_at is None else _iso(record.expires_at),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, items: Sequence[object]) -> tuple[Sequence[object], dict[str, int]]:
    """Return the part of a list that a request asks for, and its place in the list.

    Raises:
        RequestError: `limit` or `offset` is not a number in its range.
    """
    try:
        limit = int(request.query_params.get("limit", "20"))
        offset = int(request.query_params.get("offset", "0"))
    except ValueError:
        raise RequestError("limit, offset: give whole numbers") from None
    if offset < 0 or not 1 <= limit <= MAX_PAGE:
        raise RequestError(f"limit, offset: give a limit from 1 to {MAX_PAGE}, and an offset from 0 on")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


PREFIX = "/api/v1"
LONG_POLL_S = 30.0
"""Longest time in which a request waits for a result. The SDK gives up after 45 s."""
MAX_CHUNK = 128
"""Examples that the SDK sends in one request, so that models take turns."""
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_len": MAX_CHUNK}
"""Flags of the SDK. It sends the parts of a call in order, so that a rejected one does not hold up others."""
UNEMBED = "this server trains no LoRA of the output layer: train_unembed has no effect"


def build_app(service: TinkerService, key: str | None = None) -> Starlette:
    """Build the application.

    Args:
        key: key that clients must send. None: none, but requests must name loopback, against DNS rebinding.
    """
    records = ServerRecords(service)
    json_routes: dict[str, Callable[[Any], object]] = {
        "client/config": _reading(bodies.SdkVersion, lambda body: CLIENT_CONFIG),
        "client/dynamic_config": _reading(bodies.SdkVersion, lambda body: DYNAMIC_CONFIG),
        "create_session": _reading(bodies.CreateSession, lambda body: _open_session(service)),
        "session_heartbeat": _reading(bodies.SessionHeartbeat, lambda body: _renew(service, body)),
        "create_model": _reading(bodies.CreateModel, service.create_model),
        "get_info": _reading(bodies.ModelBody, records.model_info),
        "optim_step": _reading(bodies.OptimStep, service.optim_step),
        "save_weights": _reading(bodies.SaveWeights, service.save_weights),
        "save_weights_for_sampler": _reading(bodies.SaveWeightsForSampler, service.save_weights_for_sampler),
        "load_weights": _reading(bodies.LoadWeights, service.load_weights),
        "weights_info": _reading(bodies.WeightsInfo, records.weights_info),
        "create_sampling_session": _reading(
            bodies.CreateSamplingSession, lambda body: _create_sampler(service, body)
        ),
        "asample": _reading(bodies.SampleBody, lambda body: _sample(service, body)),
        "cancel_future": _reading(bodies.CancelFuture, lambda body: _cancel(service, body)),
        "telemetry": lambda fields: {"status": "accepted"},
    }
    routes = [
        Route(f"{PREFIX}/healthz", partial(_answer, lambda request: {"status": "ok"})),
        Route(f"{PREFIX}/get_server_capabilities", partial(_answer, lambda request: records.capabilities())),
        Route(f"{PREFIX}/forward_backward", partial(_forward_backward, service), methods=["POST"]),
        Route(f"{PREFIX}/retrieve_future", partial(_retrieve_future, service), methods=["POST"]),
        *(
            Route(f"{PREFIX}/{name}", partial(_answer_json, answer), methods=["POST"])
            for name, answer in json_routes.items()
        ),
        Route(
            f"{PREFIX}/sessions/{{session_id}}/finish", partial(_finish_session, service), methods=["POST"]
        ),
        *records.routes(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(AccessCheck, key=key)],
        exception_handlers={RequestError: _error_response},
    )
    app.router.redirect_slashes = False
    return app


class AccessCheck:
    """ASGI middleware that rejects requests without the server's key, in the SDK's header or as a bearer.

    Without a key it rejects requests that name another host than loopback.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error_of(scope) if scope["type"] == "http" else None
        await (self._app if error is None else _error(error))(scope, receive, send)

    def _error_of(self, scope: Scope) -> RequestError | None:
        if self._key is None:
            return None if is_own_host(scope["headers"]) else RequestError(OTHER_HOST, 403)
        headers = dict(scope["headers"])
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if hmac.compare_digest(sent, self._key.encode()):
            return None
        return RequestError("the API key is missing or wrong; set TINKER_API_KEY to the server's key", 401)


def _reading(kind: type[TinkerBody], answer: Callable[[Any], object]) -> Callable[[JsonObject], object]:
    """Return a function of a decoded body that checks it first."""
    return lambda fields: answer(kind.read(fields))


async def _answer_json(answer: Callable[[JsonObject], object], request: Request) -> Response:
    body = await read_request(request.scope, request.receive, MAX_BODY)
    return JSONResponse(answer(body.fields))


async def _answer(answer: Callable[[Request], object], request: Request) -> Response:
    found = answer(request)
    return Response(status_code=204) if found is None else JSONResponse(found)


async def _forward_backward(service: TinkerService, request: Request) -> Response:
    if request.headers.get("content-type", "") != PROTOBUF:
        raise RequestError(f"the content type must be {PROTOBUF}, as the SDK sends it", 415)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not supported", 415)
    return JSONResponse(service.forward_backward(await read_body(request.receive, MAX_BODY)))


async def _retrieve_future(service: TinkerService, request: Request) -> Response:
    body = await read_request(request.scope, request.receive, MAX_BODY)
    request_id = bodies.RetrieveFuture.read(body.fields).request_id
    answer = await service.promises.wait(request_id, LONG_POLL_S)
    if answer is None:
        pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return JSONResponse(pending, 408)
    return Response(answer.content, media_type=answer.media_type)


async def _finish_session(service: TinkerService, request: Request) -> Response:
    body = await read_request(request.scope, request.receive, MAX_BODY)
    bodies.FinishSession.read(body.fields)
    service.sessions.finish(request.path_params["session_id"])
    return Response(status_code=204)


def _sample(service: TinkerService, body: bodies.SampleBody) -> JsonObject:
    request_id = service.samplers.sample(body)
    sequences = [f"{request_id}:{number}" for number in range(body.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": sequences}


def _cancel(service: TinkerService, body: bodies.CancelFuture) -> JsonObject:
    if body.request_id in service.samplers:
        service.promises.cancel(body.request_id)
    return {}


def _open_session(service: TinkerService) -> JsonObject:
    message, substitute = UNEMBED, service.settings.stable_reinforce
    if substitute is not None:
        message += f"; it trains requests for stable_reinforce with {substitute}"
    return {"type": "create_session", "session_id": service.sessions.open(), "info_message": message}


def _renew(service: TinkerService, body: bodies.SessionHeartbeat) -> JsonObject:
    service.sessions.renew(body.session_id)
    return {"type": "session_heartbeat"}


def _create_sampler(service: TinkerService, body: bodies.CreateSamplingSession) -> JsonObject:
    service.sessions.check(body.session_id)
    sampler_id = service.samplers.create(body)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error)


def _error(error: RequestError) -> JSONResponse:
    """Return an error answer in the form of the SDK's failed results."""
    category = "server" if error.status >= 500 else "user"
    return JSONResponse({"error": error.message, "category": category}, error.status)
