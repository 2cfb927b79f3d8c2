"""Fuzzing of a server: mutated requests, and canaries between them whose answers never change."""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
from engine_server import DEADLINE_S, MODEL, SECRET, EngineServer
from mutations import (
    CHAT,
    COMPLETIONS,
    HI,
    MESSAGES,
    RESPONSES,
    SAMPLING_PATHS,
    TRACES,
    FuzzCase,
    Mutator,
)
from wire import WireAnswer, send

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.engines.protocol import Engine
from raylight.types import AttemptedRollout

CONCURRENT = 16
CANARY_EVERY = 40
"""Requests for each canary."""
PER_ATTEMPT = 1000
"""Requests of an attempt, after which its records are compared with its answers."""
DELIBERATE = {
    503: ("requests are waiting already", "no room for more calls", "the store did not answer"),
    504: (),
}
"""Statuses of 500 and more that are not failures, with the texts of their errors."""
SERVER_FAILURES = ('"server_error"', '"api_error"', '"code":500', '"code": 500')
"""Text of a stream's event if the server failed while it streamed."""
CALL_ID = re.compile(r'"id": ?"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32})"')
CANARIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "max_tokens": 12, "temperature": 0}),
    (CHAT, {"messages": HI, "max_tokens": 12, "seed": 7, "n": 2, "stream": True}),
    (COMPLETIONS, {"prompt": "once", "max_tokens": 12, "seed": 8, "n": 2}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 16, "temperature": 0}),
    (MESSAGES, {"messages": HI, "max_tokens": 12, "temperature": 0}),
]
VOLATILE = re.compile(r'"(?:id|item_id|created|created_at|message_id|request_id)": ?(?:"[^"]*"|\d+)')
"""Parts of an answer that differ each time."""


class FuzzFailure(AssertionError):
    """A request with a wrong answer, or a server that lost something."""


@dataclass
class FuzzCounts:
    """Answers by route and status, and by kind of mutation."""

    by_route: Counter[tuple[str, int]] = field(default_factory=Counter)
    by_kind: Counter[tuple[str, int]] = field(default_factory=Counter)
    canaries: int = 0
    calls: int = 0
    """Answers that were compared with the store's records."""
    seconds: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    """Resident memory of this process, client included, after each attempt."""

    def table(self) -> str:
        """Return the counts by route and status as a table."""
        statuses = sorted({status for _, status in self.by_route})
        names = ["left" if status == -1 else "closed" if status == 0 else str(status) for status in statuses]
        lines = [f"{'route':30}" + "".join(f"{name:>8}" for name in names)]
        for route in sorted({route for route, _ in self.by_route}):
            counts = "".join(f"{self.by_route[route, status]:8}" for status in statuses)
            lines.append(f"{route:30}{counts}")
        total = sum(self.by_route.values())
        by_status = Counter[int]()
        for (_, status), number in self.by_route.items():
            by_status[status] += number
        totals = "".join(f"{by_status[status]:8}" for status in statuses)
        rss = f"{self.rss_mb[0]:.0f} to {self.rss_mb[-1]:.0f} MB" if self.rss_mb else "not measured"
        return "\n".join(
            [
                *lines,
                f"{'all':30}{totals}",
                f"{total} requests in {self.seconds:.0f} s, {self.canaries} canaries, "
                f"{self.calls} answers found in the store, resident memory {rss}",
            ]
        )


class FuzzServer(EngineServer):
    """Server of a small context, so that an answer without a limit is short."""

    async def _engine(self, path: str) -> Engine:
        if self.kind != "transformers":
            return await super()._engine(path)
        from raylight.engines.transformers.engine import TransformersEngine

        return TransformersEngine(path, MODEL, slots=CONCURRENT + 4, max_model_len=256)


class Target:
    """Server without a store that this process can read: one that listens elsewhere.

    Args:
        key: the server's key.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self.host, self.port, self.key = host, port, key
        self.prefix, self.attempt_key = "", key

    async def begin(self) -> None:
        """Start an attempt."""

    async def check_records(self, answered: list[str]) -> None:
        """Compare the answered calls with the records."""


class StoreTarget(Target):
    """Server in this process, with its store."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__("127.0.0.1", server.port, SECRET)
        self._server = server
        self._rollout: AttemptedRollout | None = None

    async def _call(self, work: Any) -> Any:
        return await asyncio.to_thread(self._server.call, work)

    async def begin(self) -> None:
        self._rollout = await self._call(self._server.store.start_rollout("fuzz"))
        ids = self._rollout.rollout_id, self._rollout.attempt.attempt_id
        self.prefix, self.attempt_key = attempt_path(*ids), attempt_key(SECRET, *ids)

    async def check_records(self, answered: list[str]) -> None:
        """Check that the store has each answered call once, and that no call is lost or left open."""
        assert self._rollout is not None
        store, stats = self._server.store, self._server.recorder.stats
        await self._call(self._settle())
        await self._call(store.finish_attempt(self._rollout, "succeeded"))
        (finished,) = await self._call(store.collect([self._rollout.rollout_id]))
        recorded = Counter(generation.key.call_id for generation in finished.generations)
        if missing := [call for call in answered if call not in recorded]:
            raise FuzzFailure(f"{len(missing)} answered calls are not recorded: {missing[:5]}")
        if twice := [call for call, count in recorded.items() if count > 1]:
            raise FuzzFailure(f"calls recorded more than once: {twice[:5]}")
        if stats.lost:
            raise FuzzFailure(f"the recorder lost {stats.lost} announcements or records")

    async def _settle(self) -> None:
        """Wait until every announced call is closed and stored."""
        recorder = self._server.recorder
        async with asyncio.timeout(DEADLINE_S):
            await recorder._empty.wait_for(
                lambda: recorder.stats.unsent == 0 and recorder.stats.opened == recorder.stats.closed,
                DEADLINE_S,
            )


class FuzzRun:
    """Sends the requests of a seed to a server.

    Args:
        only: number of the only request to send, without canaries.
    """

    def __init__(self, target: Target, seed: int, count: int, only: int | None = None) -> None:
        self._target, self._seed, self._count = target, seed, count
        self._mutator = Mutator(seed)
        self._numbers = iter([only] if only is not None else range(count))
        self._expected: list[str] = []
        self._answered: list[str] = []
        self.counts = FuzzCounts()
        self.failures: list[str] = []

    async def run(self) -> FuzzCounts:
        """Send everything, in attempts of `PER_ATTEMPT` requests.

        Raises:
            FuzzFailure: it shows each wrong answer, with the command that repeats its request.
        """
        started = time.monotonic()
        await self._target.begin()
        self._expected = [await self._canary(index) for index in range(len(CANARIES))]
        left = True
        while left and len(self.failures) < 20:
            results = await asyncio.gather(
                *(self._work(PER_ATTEMPT // CONCURRENT) for _ in range(CONCURRENT))
            )
            left = any(results)
            await self._target.check_records(self._answered)
            self.counts.calls += len(self._answered)
            self._answered = []
            self.counts.rss_mb.append(psutil.Process().memory_info().rss / 2**20)
            self.counts.seconds = time.monotonic() - started
            if left:
                await self._target.begin()
        if self.failures:
            raise FuzzFailure("\n\n".join(self.failures))
        return self.counts

    async def _work(self, most: int) -> bool:
        """Send up to `most` requests; returns False if none is left."""
        for _ in range(most):
            number = next(self._numbers, None)
            if number is None:
                return False
            case = self._mutator.case(number)
            await self._send(number, case)
            if number % CANARY_EVERY == 0:
                index = number // CANARY_EVERY % len(CANARIES)
                if (seen := await self._canary(index)) != self._expected[index]:
                    self._fail(number, case, f"the canary {CANARIES[index]} changed its answer: {seen:.500}")
        return True

    async def _send(self, number: int, case: FuzzCase) -> None:
        target = self._target
        prefix, key = (target.prefix, target.attempt_key) if case.in_attempt else ("", target.key)
        try:
            answer = await send(target.host, target.port, prefix, key, case)
        except Exception as error:
            self._fail(number, case, f"no answer: {error!r}")
            return
        status = -1 if answer is None else answer.status
        self.counts.by_route[case.route, status] += 1
        self.counts.by_kind[case.kind, status] += 1
        if answer is not None and (problem := find_problem(case, answer)):
            self._fail(number, case, f"{problem}: {answer.status} {answer.text[:1000]}")
        elif answer is not None and answer.status == 200 and case.in_attempt:
            path = case.target.partition("?")[0].rstrip("/")
            if path in SAMPLING_PATHS and (match := CALL_ID.search(answer.text)):
                self._answered.append(match[1])

    async def _canary(self, index: int) -> str:
        path, body = CANARIES[index]
        case = FuzzCase("canary", path, path, json.dumps({"model": MODEL} | body).encode())
        target = self._target
        answer = await send(target.host, target.port, target.prefix, target.attempt_key, case)
        self.counts.canaries += 1
        if answer is None or answer.status != 200:
            return f"no answer: {answer}"
        if match := CALL_ID.search(answer.text):
            self._answered.append(match[1])
        return stable_text(answer)

    def _fail(self, number: int, case: FuzzCase, problem: str) -> None:
        command = f"python tests/fuzz --seed {self._seed} --only {number}"
        self.failures.append(
            f"{problem}\n  {case.kind}: {case.method} {case.target:.200} {case.headers} {case.sending}\n"
            f"  body: {case.content[:2000]!r}\n  repeat: {command}"
        )


def stable_text(answer: WireAnswer) -> str:
    """Return the text of an answer without ids and times. A stream's texts are joined, by choice."""
    if "event-stream" not in answer.headers.get("content-type", ""):
        return VOLATILE.sub("", answer.text)
    texts: Counter[int] = Counter()
    joined: dict[int, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += 1
                text = choice["delta"].get("content") or ""
                joined[choice["index"]] = joined.get(choice["index"], "") + text
    return json.dumps(sorted(joined.items()))


def find_problem(case: FuzzCase, answer: WireAnswer) -> str | None:
    """Return what is wrong with an answer; None if nothing is."""
    status, text = answer.status, answer.text
    if status == 0:
        return None if case.broken_http else "the connection was closed without an answer"
    if status >= 500:
        is_deliberate = any(allowed in text for allowed in DELIBERATE.get(status, ()))
        return None if is_deliberate else "a failure of the server"
    if status < 400:
        return "a failure in the stream" if any(one in text for one in SERVER_FAILURES) else None
    if case.method == "HEAD":
        return None
    if "x-request-id" not in answer.headers and case.broken_http:
        return None  # the HTTP server rejects it before the gateway
    if case.target == TRACES and status not in (401, 404, 405):
        return None if text else "an error without a message"
    return None if _has_error_shape(case, text) else "an error in the wrong shape"


def _has_error_shape(case: FuzzCase, text: str) -> bool:
    """Return True if an error has a message, in the shape of its dialect."""
    try:
        body = json.loads(text)
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return False
    if case.route == "other":  # a mutated path may belong to either dialect
        return bool(error.get("message"))
    if case.route.startswith(MESSAGES):
        return body.get("type") == "error" and bool(error.get("type")) and bool(error.get("message"))
    return (
        error.keys() == {"message", "type", "param", "code"}
        and bool(error["message"])
        and bool(error["type"])
    )
