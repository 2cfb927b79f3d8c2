"""Every way to write a base URL reaches the route; the error for any other path lists the routes."""

import openai
import pytest
from dialect_helpers import Say
from gateway_helpers import KEY, MINE, SECRET, Replica, Site
from sdk_clients import CLIENTS, chat, client_params

from raylight.engines.capture_context import AttemptScope

BASES = ["{0}", "{0}/", "{0}/v1", "{0}/v1/", "{0}/v1//", "{0}/v1/v1"]
"""Base URLs; 0 is the address of an attempt."""
ROOTS = ["/v1" + MINE, MINE]


@pytest.fixture
def replica(served: tuple[Replica, str]) -> Replica:
    served[0].says[:] = [Say("hello")]
    served[0].attempts.clear()
    return served[0]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("client", client_params(CLIENTS))
def test_a_client_reaches_its_route(
    replica: Replica, address: str, client: str, base: str, root: str
) -> None:
    assert CLIENTS[client](base.format(address + root)) == "hello"
    assert replica.attempts == [AttemptScope("ro-1", "at-1")]


@pytest.mark.parametrize("base", BASES)
def test_a_server_without_attempts_is_reached_too(replica: Replica, address: str, base: str) -> None:
    assert chat(base.format(address), key=SECRET) == "hello"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat", "/api", "/openai/v1"])
def test_a_base_url_that_leads_nowhere_is_told_the_routes(address: str, path: str) -> None:
    with pytest.raises(openai.NotFoundError, match=r"Invalid URL \(POST .*/v1/messages/count_tok") as caught:
        chat(address + MINE + path)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat//completions", "/messages"]
)
async def test_slashes_and_versions_are_read_once_for_all_layers(site: Site, path: str) -> None:
    assert (await site.post(MINE + path)).status_code == 200
    assert site.inner.seen[0][0] == ("/v1/messages" if path == "/messages" else "/v1/chat/completions")


@pytest.mark.parametrize(("path", "expected"), [("/health/", 200), ("/v1/health", 200), ("/metrics/", 401)])
async def test_routes_beside_v1(path: str, expected: int) -> None:
    assert (await Site().get(path, key=None)).status_code == expected
    assert (await Site().get(MINE + path, key=KEY)).status_code == 404
