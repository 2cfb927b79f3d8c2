"""Images of http URLs: limits of address, size and time, through redirects and changing names."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from image_helpers import image_file, make_image

from raylight.errors import ImageError
from raylight.images import urls
from raylight.images.image import ImageLimits
from raylight.images.urls import ImageFetcher, is_public

RED = make_image("red")
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def served(answers: dict[str, bytes], requests: list[str]) -> AsyncIterator[int]:
    """Serve raw answers by path, and note the requests."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(request)
        writer.write(answers[request.split()[1]])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def names(host: str, port: int) -> list[str]:
    """Resolve as a hostile server of names does."""
    return {"images.example": ["127.0.0.1"], "inside.example": ["10.0.0.1"]}.get(host, [host])


def fetcher(limits: ImageLimits | None = None) -> ImageFetcher:
    return ImageFetcher(limits or ImageLimits(), names, lambda address: address == "127.0.0.1")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "localhost", ""),
        *("64:ff9b:1::7f00:1", "fec0::1", "::127.0.0.1", "::ffff:0:127.0.0.1", "5f00::1", "4000::1"),
    ],
)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_a_public_address(address: str) -> None:
    assert is_public(address)


async def test_an_image_is_fetched_once_from_the_checked_address() -> None:
    requests: list[str] = []
    async with served({"/red?a=1": OK + RED.data}, requests) as port:
        one, url = fetcher(), f"http://images.example:{port}/red?a=1"
        assert await one.fetch(url) == RED
        assert await one.fetch(url) == RED
    (request,) = requests
    assert f"host: images.example:{port}\r\n" in request.lower()


async def test_a_redirect_is_followed_and_checked() -> None:
    requests: list[str] = []

    def moved(to: str) -> bytes:
        return f"HTTP/1.1 302 Found\r\nlocation: {to}\r\nconnection: close\r\n\r\n".encode()

    answers = {
        "/a": moved("/red"),
        "/inside": moved("http://inside.example/secret"),
        "/file": moved("file:///etc/passwd"),
        "/loop": moved("/loop"),
        "/red": OK + RED.data,
    }
    async with served(answers, requests) as port:
        base = f"http://images.example:{port}"
        assert await fetcher().fetch(f"{base}/a") == RED
        with pytest.raises(ImageError, match=r"inside\.example.*no public address"):
            await fetcher().fetch(f"{base}/inside")
        with pytest.raises(ImageError, match="not an image URL"):
            await fetcher().fetch(f"{base}/file")
        with pytest.raises(ImageError, match="redirects"):
            await fetcher().fetch(f"{base}/loop")


async def test_one_private_address_of_a_name_is_enough() -> None:
    async def both(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "127.0.0.1"]

    with pytest.raises(ImageError, match="no public address"):
        await ImageFetcher(resolve=both).fetch("http://images.example/a.png")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://127.0.0.1/a",
            "http://localhost/a",
            "http://[::1]/a",
            "http://0x7f000001/a",
            "http://2130706433/",
        ),
        *(
            "ftp://example.com/a",
            "file:///etc/passwd",
            "http://",
            "http://user@8.8.8.8/a",
            "http://a:99999/x",
        ),
        *("http://\ud800/", "x", "http://example.com/" + "a" * 5000, "http://[::1", "http://xn--/"),
    ],
)
async def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ImageError):
        await ImageFetcher().fetch(url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
        (OK + b"<html>", "not a PNG"),
        (OK + image_file(size=(500, 500), form="BMP"), "more than 10000 bytes"),
        (b"nonsense\r\n\r\n", "cannot be fetched"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://[\r\n\r\n", "no public address"),
    ],
)
async def test_a_bad_answer_is_refused(answer: bytes, words: str) -> None:
    async with served({"/": answer}, []) as port:
        with pytest.raises(ImageError, match=words):
            await fetcher(ImageLimits(max_bytes=10_000)).fetch(f"http://images.example:{port}/")


async def test_a_slow_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()  # for an open connection, a server of Python 3.12 does not end

    monkeypatch.setattr(urls, "TIMEOUT_S", 0.05)
    async with await asyncio.start_server(wait_for_the_end, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ImageError, match=r"within 0\.05 s"):
            await fetcher().fetch(f"http://images.example:{port}/")
