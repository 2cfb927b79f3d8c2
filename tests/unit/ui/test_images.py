"""Images on the pages: their files, and nothing else, with a type that no browser runs."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest
from image_helpers import image_file, make_image
from recorded_run import record_image_run

from raylight.images.messages import recorded_url
from raylight.ui.app import build_app

RED = make_image("red")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    await record_image_run(tmp_path / "runs" / "run", RED)
    app = build_app([tmp_path / "runs"])
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def test_an_image_is_served_with_its_type(http: httpx.AsyncClient) -> None:
    answer = await http.get(f"/api/runs/run/images/{RED.sha256}")
    assert (answer.status_code, answer.content) == (200, RED.data)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name", ["0" * 64, "..%2F..%2Fstore.db", "..%2fstore.db", RED.sha256.upper(), RED.sha256 + "%00", "%0a"]
)
async def test_other_names_are_not_found(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/api/runs/run/images/{name}")
    assert answer.status_code == 404


async def test_another_file_under_a_digest_is_not_served(http: httpx.AsyncClient, tmp_path: Path) -> None:
    """A stranger's run may have a page or a link in place of an image."""
    folder = tmp_path / "runs" / "run" / "store-images"
    (folder / ("a" * 64)).write_bytes(b"<html><script>alert(1)</script>")
    (folder / ("b" * 64)).symlink_to("/etc/hostname")
    os.mkfifo(folder / ("c" * 64))
    for name in "abc":
        answer = await http.get(f"/api/runs/run/images/{name * 64}")
        assert answer.status_code == 404


async def test_the_conversation_names_it_and_the_request_has_it(http: httpx.AsyncClient) -> None:
    rollout = "/api/runs/run/rollouts/abcd1234-train-0-0"
    (call,) = (await http.get(rollout)).json()["calls"]
    assert call["messages"][0]["content"][1]["image_url"]["url"] == recorded_url(RED.sha256)
    request = (await http.get(f"{rollout}/calls/call-0/request")).json()
    assert request["body"]["messages"][0]["content"][1]["image_url"]["url"] == RED.data_url
    assert RED.data_url in request["curl"]
    assert image_file().hex() not in (await http.get(f"{rollout}/raw")).text
