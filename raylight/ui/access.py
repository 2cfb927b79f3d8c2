"""Access to the pages: the key, the names of the host, and the policy that browsers hold pages to."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.http.host_names import is_own_host

COOKIE = "raylight-ui-"
"""Beginning of the cookie's name. Its port follows, because browsers send cookies to all ports of a host."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {  # of every answer; files are asked for again, as another version of raylight may serve others
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class AccessGuard:
    """Middleware that admits visitors, and adds the policy to every answer.

    With a key, a visitor needs it: in the address of the first page (`?key=`), then in a cookie, or in the
    header `Authorization: Bearer KEY`. Without one, the page must be addressed by a name of the host, against
    DNS rebinding.

    Args:
        key: the key; None for none.
        hosts: names of the host, in addition to those of loopback.
    """

    def __init__(self, app: ASGIApp, key: str | None = None, hosts: Collection[str] = ()) -> None:
        self._app, self._key = app, key
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal_for(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_policy)

    def _refusal_for(self, scope: Scope) -> Response | None:
        """Return the answer to a visitor who is not admitted yet; None for one who is."""
        headers = Headers(scope=scope)
        if self._key is None:
            if is_own_host(scope["headers"], self._hosts):
                return None
            return _refusal(
                "this address is not one of the server's; open the one that `raylight ui` has printed"
            )
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if "key" in query and not scope["path"].startswith("/api/"):
            return self._exchange_key(scope, query)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        cookie = cookie_parser(headers.get("cookie", "")).get(_cookie_name(scope), "")
        if self._is_key(token.strip() if scheme.lower() == "bearer" else cookie):
            return None
        return _refusal("a key is needed; open the address with `?key=` that `raylight ui` has printed")

    def _exchange_key(self, scope: Scope, query: dict[str, list[str]]) -> Response:
        """Exchange the key in an address for a cookie, so that the key does not stay in the address."""
        if not self._is_key(query.pop("key")[0]):
            return _refusal("the key is wrong; open the address that `raylight ui` has printed")
        rest = urlencode(query, doseq=True)
        local = "/" + scope["path"].lstrip("/\\")  # `//name` would be another host
        response = RedirectResponse(f"{local}?{rest}" if rest else local, 303)
        response.set_cookie(_cookie_name(scope), self._key or "", httponly=True, samesite="strict")
        return response

    def _is_key(self, given: str) -> bool:
        return bool(self._key and given) and hmac.compare_digest(given.encode(), (self._key or "").encode())


def _cookie_name(scope: Scope) -> str:
    return f"{COOKIE}{(scope.get('server') or ('', ''))[1]}"


def _refusal(message: str) -> Response:
    return JSONResponse({"error": message}, 401, {"WWW-Authenticate": "Bearer"})
