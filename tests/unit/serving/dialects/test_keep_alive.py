"""Signs of life in silent streams, in each dialect and through the SDKs."""

import asyncio

import pytest
from app_clients import anthropic_client, openai_client
from asgi_helpers import response_body, start, stream_start
from dialect_helpers import Say
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.http.sse import SseReader, sse_bytes
from raylight.serving.dialects.translate import ANSWER_ID, COMMENT, KeepAliveSend, TranslationMiddleware

INTERVAL_S = 0.01
DEADLINE_S = 30


class SilentChat:
    """Chat application whose stream is silent after its first `pieces` until it is released."""

    def __init__(self, pieces: list[bytes], pause_after: int, answer_id: str = "") -> None:
        self.pieces = pieces
        self.start = stream_start()
        self.start["headers"].append((ANSWER_ID, answer_id.encode()))
        self.pause_after = pause_after
        self.released = asyncio.Event()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        await send(self.start)
        for index, piece in enumerate(self.pieces):
            if index == self.pause_after:
                await asyncio.wait_for(self.released.wait(), DEADLINE_S)
            await send(response_body(piece, more=True))
        await send(response_body())


class Client:
    """Client's `send`: it releases the application when it was silent for a while."""

    def __init__(self, chat: SilentChat, signs: int) -> None:
        self.messages: list[Message] = []
        self._chat, self._signs = chat, signs

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) == 1 + self._chat.pause_after + self._signs:
            self._chat.released.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def pieces_of(say: Say) -> list[bytes]:
    return [*(sse_bytes(chunk) for chunk in say.chunks(1)), b"data: [DONE]\n\n"]


async def test_a_silent_stream_gets_comments_between_its_events() -> None:
    chat = SilentChat(pieces_of(Say("hello")), 3)
    client = Client(chat, signs=2)
    async with KeepAliveSend(client, INTERVAL_S) as send:
        await chat({}, None, send)  # type: ignore[arg-type]
    assert client.body.count(COMMENT) >= 2
    assert client.body.replace(COMMENT, b"") == b"".join(chat.pieces)
    reader = SseReader()
    assert [event.data for event in reader.feed(client.body)][-1] == "[DONE]"
    assert not client.messages[-1].get("more_body")


@pytest.mark.parametrize("pieces", [[b"data: a\n", b"\n"], [b"data: a\r\n\r", b"\n"], [b"data: a\n\n", b""]])
async def test_pieces_may_be_cut_within_the_end_of_an_event(pieces: list[bytes]) -> None:
    chat = SilentChat([*pieces, b"data: b\n\n"], len(pieces))
    client = Client(chat, signs=1)
    async with KeepAliveSend(client, INTERVAL_S) as send:
        await chat({}, None, send)  # type: ignore[arg-type]
    assert COMMENT in client.body
    assert client.body.replace(COMMENT, b"") == b"".join(chat.pieces)


async def test_nothing_is_sent_within_an_event_or_to_an_answer_in_one_piece() -> None:
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    async with KeepAliveSend(keep, INTERVAL_S) as send:
        await send(stream_start())
        await send(response_body(b"data: half of", more=True))
        await asyncio.sleep(10 * INTERVAL_S)
    async with KeepAliveSend(keep, INTERVAL_S) as send:
        await send(start(content_type="application/json"))
        await asyncio.sleep(10 * INTERVAL_S)
    assert len(sent) == 3


async def test_an_application_that_fails_leaves_no_task() -> None:
    async def ignore(message: Message) -> None:
        pass

    async def fail() -> None:
        async with KeepAliveSend(ignore, INTERVAL_S) as send:
            await send(stream_start())
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await fail()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Released:
    """Application that is released once its answer has shown signs of life."""

    def __init__(self, chat: SilentChat, sign: bytes) -> None:
        self.body = b""
        self._app = TranslationMiddleware(chat, keep_alive_s=INTERVAL_S)
        self._chat, self._sign = chat, sign

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            self.body += message.get("body", b"")
            if self.body.count(self._sign) >= 2:
                self._chat.released.set()
            await send(message)

        await self._app(scope, receive, watch)


def silent(sign: bytes, pause_after: int = 3, answer_id: str = "") -> Released:
    """Return an application that is silent for a while, with the sign of life that it waits for."""
    return Released(SilentChat(pieces_of(Say("hello")), pause_after, answer_id), sign)


@pytest.mark.parametrize("pause_after", [0, 3])
async def test_the_sdk_of_chat_reads_a_stream_that_was_silent(pause_after: int) -> None:
    app = silent(COMMENT, pause_after)
    stream = await openai_client(app).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == "hello"


@pytest.mark.parametrize("pause_after", [0, 3])
async def test_the_sdk_of_messages_reads_a_stream_that_was_silent(pause_after: int) -> None:
    app = silent(b'event: ping\ndata: {"type":"ping"}\n\n', pause_after)
    async with anthropic_client(app).messages.stream(
        model="policy", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        assert (await stream.get_final_message()).content[0].text == "hello"  # type: ignore[union-attr]


@pytest.mark.parametrize(("pause_after", "sign"), [(0, COMMENT), (3, b"event: keepalive\n")])
async def test_the_sdk_of_responses_reads_a_stream_that_was_silent(pause_after: int, sign: bytes) -> None:
    app = silent(sign, pause_after)
    async with openai_client(app).responses.stream(model="policy", input="hi") as stream:
        numbers = [event.sequence_number async for event in stream if event.type != "keepalive"]
        assert (await stream.get_final_response()).output_text == "hello"
    assert numbers == sorted(numbers)


async def test_a_response_that_is_late_is_created_before_its_first_chunk() -> None:
    app = silent(b"event: keepalive\n", 0, "call-1")
    async with openai_client(app).responses.stream(model="policy", input="hi") as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "keepalive"]
    assert [event.type for event in events].count("response.created") == 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created = events[0].response  # type: ignore[union-attr]
    assert (created.id, created.model) == (response.id, response.model) == ("resp_call-1", "policy")
    assert created.created_at == response.created_at > 0
    assert response.output_text == "hello"
    assert COMMENT not in app.body
