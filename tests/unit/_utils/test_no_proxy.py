"""Exceptions from the proxy: merging them with the user's, and how clients read them."""

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import aiohttp.helpers
import httpx
import httpx2
import pytest
import requests.utils
import yarl
from counting_proxy import OUTSIDE, PROXY_VARIABLES, CountingProxy, OutsideHandler, counting_proxy

from raylight._utils.no_proxy import LOOPBACK, bypass_proxies, is_loopback, no_proxy_variables

OURS = ",".join(LOOPBACK)


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({}, f"{OURS},h", f"{OURS},h"),
        ({"NO_PROXY": "a"}, f"a,{OURS},h", f"a,{OURS},h"),
        ({"no_proxy": ".a, b,"}, f".a, b,{OURS},h", f".a, b,{OURS},h"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, f"a,{OURS},h", f"b,{OURS},h"),
        ({"NO_PROXY": None, "no_proxy": ""}, f"{OURS},h", f"{OURS},h"),
        ({"NO_PROXY": f"H LocalHost,{OURS}"}, f"H LocalHost,{OURS}", f"H LocalHost,{OURS}"),
        ({"NO_PROXY": "10.0.0.0/8"}, f"10.0.0.0/8,{OURS},h", f"10.0.0.0/8,{OURS},h"),
        ({"NO_PROXY": " * "}, "*", "*"),
        ({"NO_PROXY": "*", "no_proxy": "a"}, "*", f"a,{OURS},h"),
        ({"NO_PROXY": "*,a"}, f"*,a,{OURS},h", f"*,a,{OURS},h"),
    ],
)
def test_what_the_user_set_stays(given: dict[str, str | None], upper: str, lower: str) -> None:
    assert no_proxy_variables(iter(["h", None, "h"]), given) == {"NO_PROXY": upper, "no_proxy": lower}


def test_variables_that_are_set_again_stay_the_same() -> None:
    once = no_proxy_variables(["h"], {"NO_PROXY": "a b"})
    assert no_proxy_variables(["h"], once) == once


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "LOCALHOST", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(f"http://{host}:8000/v1")


@pytest.mark.parametrize("url", ["http://0.0.0.0/", "http://10.0.0.1/", "http://localhost.example", "", "x"])
def test_other_hosts(url: str) -> None:
    assert not is_loopback(url)


def httpx_reader(library: Any) -> Callable[[str], bool]:
    client = library.Client(verify=False)
    return lambda url: client._transport_for_url(library.URL(url)) is client._transport


def aiohttp_is_direct(url: str) -> bool:
    try:
        aiohttp.helpers.get_env_proxy_for_url(yarl.URL(url))
    except LookupError:
        return True
    return False


READERS: dict[str, Callable[[], Callable[[str], bool]]] = {
    "httpx": lambda: httpx_reader(httpx),
    "httpx2": lambda: httpx_reader(httpx2),
    "requests": lambda: lambda url: not requests.utils.get_environ_proxies(url),
    "urllib": lambda: lambda url: bool(urllib.request.proxy_bypass(urlsplit(url).netloc)),
    "aiohttp": lambda: aiohttp_is_direct,
}
"""Functions that make, from the environment, a function of a URL that returns True without a proxy."""
HOSTS = ["10.0.0.5", "head-node", "gpu.example.com", "fd00::5"]


@pytest.mark.parametrize("reader", READERS)
def test_clients_read_all_forms_of_hosts(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name, value in no_proxy_variables(HOSTS, {}).items():
        monkeypatch.setenv(name, value)
    is_direct = READERS[reader]()
    for host in [*LOOPBACK, *HOSTS]:
        if not (":" in host and reader == "urllib"):  # it reads only a form at which httpx fails
            assert is_direct(f"http://{f'[{host}]' if ':' in host else host}:8000/v1"), host
    for host in [OUTSIDE, "127.0.0.2", "10.0.0.50", "example.com", "[fd00::50]"]:
        assert not is_direct(f"http://{host}:8000/v1"), host


@pytest.fixture(scope="module")
def proxy() -> Iterator[CountingProxy]:
    with counting_proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OutsideHandler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(proxy: CountingProxy, gateway: str) -> None:
    environment = os.environ | proxy.variables
    environment |= no_proxy_variables(HOSTS, environment)
    for url, seen in ((gateway, 0), (f"http://{OUTSIDE}/", 1)):
        before = len(proxy.seen)
        subprocess.run(["curl", "-sSf", url], env=environment, check=True, capture_output=True, timeout=60)
        assert len(proxy.seen) - before == seen


def test_the_process_and_its_children_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.setenv("NO_PROXY", "a")
    monkeypatch.delenv("no_proxy", raising=False)
    bypass_proxies(["h"])
    code = "import os; print(os.environ['NO_PROXY'], os.environ['no_proxy'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [f"a,{OURS},h"] * 2


def test_proxies_of_the_operating_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"http": "http://system"})
    bypass_proxies(["h"])
    assert "NO_PROXY" not in os.environ
