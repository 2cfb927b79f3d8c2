"""Answers to questions about a server, its models in training, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from raylight.http.errors import RequestError
from raylight.tinker.checkpoints import CheckpointPath, CheckpointRecord, Kind
from raylight.tinker.models import TenantModel
from raylight.tinker.requests import ModelBody, WeightsInfo
from raylight.tinker.service import TinkerService

MAX_PAGE = 1000
KIND_NAMES: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}


class ServerRecords:
    """Answers about the state of a service."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def routes(self, prefix: str, route: Callable[[Callable[[Request], Any]], Any]) -> list[Route]:
        """Return the routes of the answers.

        Args:
            route: makes an endpoint of a function from a request to the fields of its answer.
        """
        runs = f"{prefix}/training_runs"
        checkpoint = f"{runs}/{{model_id}}/checkpoints/{{kind}}/{{name}}"
        return [
            Route(runs, route(self._training_runs)),
            Route(f"{runs}/{{model_id}}", route(self._training_run)),
            Route(f"{runs}/{{model_id}}/checkpoints", route(self._checkpoints_of_run)),
            Route(checkpoint, route(self._delete), methods=["DELETE"]),
            Route(f"{prefix}/checkpoints", route(self._checkpoints)),
            Route(f"{prefix}/sessions", route(self._sessions)),
            Route(f"{prefix}/sessions/{{session_id}}", route(self._session)),
            Route(f"{prefix}/samplers/{{sampler_id}}", route(self._sampler)),
        ]

    def capabilities(self) -> dict[str, Any]:
        """Return the models that can be trained and sampled from."""
        settings = self._service.settings
        model = {"model_name": settings.base_model, "max_context_length": settings.max_model_len}
        return {"supported_models": [model]}

    def model_info(self, body: ModelBody) -> dict[str, Any]:
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

    def weights_info(self, body: WeightsInfo) -> dict[str, Any]:
        """Return what a client needs to continue from a checkpoint."""
        record = self._service.checkpoints.record(CheckpointPath.parse(body.tinker_path))
        return {
            "base_model": record.base_model,
            "is_lora": True,
            "lora_rank": record.lora["rank"],
            **{name: record.lora[name] for name in ("train_unembed", "train_mlp", "train_attn")},
        }

    def _training_runs(self, request: Request) -> dict[str, Any]:
        runs = [self._describe_run(model) for model in self._service.models.find()]
        page, cursor = _page(request, runs)
        return {"training_runs": page, "cursor": cursor}

    def _training_run(self, request: Request) -> dict[str, Any]:
        return self._describe_run(self._service.models.get(request.path_params["model_id"]))

    def _checkpoints_of_run(self, request: Request) -> dict[str, Any]:
        model_id = CheckpointPath.of(request.path_params["model_id"], "weights", "any").model_id
        return {"checkpoints": [_describe(r) for r in self._service.checkpoints.list(model_id)]}

    def _checkpoints(self, request: Request) -> dict[str, Any]:
        page, cursor = _page(request, [_describe(r) for r in self._service.checkpoints.list()])
        return {"checkpoints": page, "cursor": cursor}

    def _delete(self, request: Request) -> None:
        model_id, kind, name = (request.path_params[part] for part in ("model_id", "kind", "name"))
        path = CheckpointPath.parse(f"tinker://{model_id}/{kind}/{name}")
        self._service.checkpoints.record(path)
        self._service.checkpoints.delete(path)

    def _sessions(self, request: Request) -> dict[str, Any]:
        return {"sessions": _page(request, self._service.sessions.ids)[0]}

    def _session(self, request: Request) -> dict[str, Any]:
        session_id = request.path_params["session_id"]
        self._service.sessions.check(session_id)
        models = self._service.models.find(lambda model: model.session_id == session_id)
        return {
            "training_run_ids": [model.model_id for model in models],
            "sampler_ids": self._service.samplers.ids_of(session_id),
        }

    def _sampler(self, request: Request) -> dict[str, Any]:
        sampler_id = request.path_params["sampler_id"]
        path = self._service.samplers.get(sampler_id).path
        return {
            "sampler_id": sampler_id,
            "base_model": self._service.settings.base_model,
            "model_path": path,
        }

    def _describe_run(self, model: TenantModel) -> dict[str, Any]:
        records = self._service.checkpoints.list(model.model_id)
        last = {_kind(record): _describe(record) for record in records}
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


def _kind(record: CheckpointRecord) -> Kind:
    return CheckpointPath.parse(record.path).kind


def _describe(record: CheckpointRecord) -> dict[str, Any]:
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


def _page(request: Request, items: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """Return the part of a list that a request asks for, and its place in the list.

    Raises:
        RequestError: `limit` or `offset` is no such number.
    """
    try:
        limit = int(request.query_params.get("limit", "20"))
        offset = int(request.query_params.get("offset", "0"))
    except ValueError:
        raise RequestError("limit, offset: give whole numbers") from None
    if offset < 0 or not 1 <= limit <= MAX_PAGE:
        raise RequestError(f"limit, offset: give a limit from 1 to {MAX_PAGE}, and an offset from 0 on")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
