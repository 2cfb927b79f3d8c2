"""Admission of clients, and the policy that every answer has."""

from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from raylight.ui.app import COOKIE, POLICY, AccessGuard, _prepare

KEY = "a-key"


async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("page")


def client(key: str | None, base: str = "http://127.0.0.1:7860") -> httpx.AsyncClient:
    app = AccessGuard(Starlette(routes=[Route("/{rest:path}", page)]), key=key)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
async def test_names_of_loopback_need_no_key(name: str) -> None:
    async with client(None, f"http://{name}:7860") as http:
        answer = await http.get("/api/runs")
    assert answer.text == "page"
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe-inline" not in POLICY


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "[::2]", ""])
async def test_other_names_are_refused_without_a_key(name: str) -> None:
    async with client(None) as http:
        answer = await http.get("/", headers={"host": name})
    assert answer.status_code == 401
    assert "not one of the server's" in answer.json()["error"]
    assert answer.headers["content-security-policy"] == POLICY


async def test_the_key_in_an_address_becomes_a_cookie() -> None:
    async with client(KEY, "http://node-1:7860") as http:
        assert (await http.get("/api/runs")).status_code == 401
        entered = await http.get(f"/runs/a?tab=tokens&key={KEY}")
        assert (entered.status_code, entered.headers["location"]) == (303, "/runs/a?tab=tokens")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert (await http.get("/api/runs")).text == "page"  # the client has the cookie


@pytest.mark.parametrize("given", ["", "wrong", "a-ke", "ключ"])
async def test_a_wrong_key_is_refused(given: str) -> None:
    async with client(KEY) as http:
        assert (await http.get("/", params={"key": given})).status_code == 401
        assert (await http.get("/", headers={"cookie": f"{COOKIE}7860=wrong"})).status_code == 401


@pytest.mark.parametrize("other", ['a={"x":1}', "foo", "a=b c", "a[b]=1", "path=1", "a/b=1", "a@b=1"])
async def test_cookies_of_others_do_not_hide_the_key(other: str) -> None:
    async with client(KEY, "http://node-1:7860") as http:
        cookies = f"{other}; {COOKIE}7861=another; {COOKIE}7860={KEY}"
        assert (await http.get("/api/runs", headers={"cookie": cookies})).status_code == 200


@pytest.mark.parametrize("key", ["a b&c+d#e%41", "schl\u00fcssel", "\u043a\u043b\u044e\u0447", 'a;b"c\\d'])
async def test_the_printed_address_admits_with_any_key(key: str, tmp_path: Path) -> None:
    _, listener, address = _prepare([tmp_path], "127.0.0.1", None, key)
    listener.close()
    async with client(key) as http:
        assert (await http.get(f"/?{address.partition('?')[2]}")).status_code == 303
        assert (await http.get("/")).status_code == 200


async def test_no_key_is_not_an_empty_one() -> None:
    async with client("") as http:
        assert (await http.get("/api/runs")).status_code == 401


async def test_a_key_in_a_header() -> None:
    async with client(KEY) as http:
        assert (await http.get("/api/runs", headers={"authorization": f"Bearer {KEY}"})).status_code == 200


async def test_the_way_in_leads_to_no_other_host() -> None:
    async with client(KEY) as http:
        answer = await http.get(f"http://127.0.0.1:7860//evil.example/?key={KEY}")
    assert answer.headers["location"] == "/evil.example/"
