"""Middleware that drops the request fields of `EngineConfig.ignore_fields`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.http.request import JsonRequest, json_request
from raylight.types.request_fields import drop_field, log_dropped


class IgnoredFields:
    """Drops named fields from requests before any other layer reads them, in every dialect.

    The first request with a field is logged; each one is counted.

    Args:
        names: fields as `EngineConfig.ignore_fields` names them.
        count: called with a field's name for each request from which it was dropped.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], count: Callable[[str], None]) -> None:
        self._app = app
        self._paths = {name: name.split(".") for name in names}
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = (await json_request(scope, receive)).with_receive(receive)
        fields = request.fields
        for name, path in self._paths.items():
            kept = drop_field(fields, path)
            if kept is not fields:
                fields = kept
                self._count(name)
                log_dropped(name, "engine.ignore_fields names")
        if fields is not request.fields:
            request = JsonRequest(fields, receive)
        await self._app(request.put_into(scope), request, send)
