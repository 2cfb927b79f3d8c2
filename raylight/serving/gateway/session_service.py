"""Sessions over HTTP: how agents outside the run begin, keep and end rollouts.

| request | effect |
|---|---|
| `POST /v1/sessions` | begins a session with a task; the answer has a base URL and a key for its calls |
| `GET /v1/sessions/ID` | its state |
| `POST /v1/sessions/ID/heartbeat` | keeps it open, as each of its calls does |
| `POST /v1/sessions/ID/reward` | ends it with a reward, or with the reason why it failed |
| `DELETE /v1/sessions/ID` | cancels it |

All of them take the server's key. A session's own key opens its calls only.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.responses import JSONResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.agent.attempt_keys import KeyUse, attempt_key, attempt_path
from raylight.errors import InvalidTransitionError, RaylightError, RewardError, StoreLostError, UnknownIdError
from raylight.http.errors import RequestError
from raylight.http.request import read_request
from raylight.semconv import ANNOTATION, MESSAGE, MESSAGE_BODY, reward_attributes
from raylight.serving.gateway.routes import Route
from raylight.store.client import Session, StoreClient
from raylight.traces.reward_spans import named_rewards
from raylight.types import ATTEMPT_FINISHED, Attempt, AttemptStatus, Failure, JsonObject, Span

NO_PLACE = (
    "the run has no place for another session now: as many are open as its staleness, or the number of open "
    "sessions, allows. Try again when others have ended"
)
MAX_REWARDS, MAX_NAME = 100, 200
"""Most named rewards of a session, and the length of the longest name. Each name becomes a metric."""
GIVEN_UP = frozenset({"abandoned", "timeout"})
"""States of a session that the run has given up. A reward that comes later is counted and not trained on."""
_HOST = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SessionRequest(_Body):
    """Body of `POST /v1/sessions`."""

    task: object
    """The task, for the records and for the sessions of its group; any JSON value."""
    group: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of a group of sessions with the same task, whose rewards are compared."""


class RewardRequest(_Body):
    """Body of `POST /v1/sessions/ID/reward`: one of `reward` and `failed`."""

    reward: Any = None
    """A number, or an object of named numbers, of which the first one is trained on."""
    failed: (
        Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000)] | None
    ) = None
    """Reason why the agent failed: the session ends without a reward."""
    message: str | None = Field(default=None, max_length=100_000)
    """A last message, for the records."""


@dataclass(frozen=True)
class SessionRules:
    """Rules that all sessions of a run have in common."""

    group_size: int = 1
    """Sessions of a group; 1: the algorithm compares no groups."""


class SessionService:
    """Answers the requests above from the store.

    Args:
        secret: the server's key, from which the sessions' keys are derived.
        model: name of the served model.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: StoreClient,
        rules: SessionRules,
        secret: str,
        model: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._rules = store, rules
        self._secret, self._model, self._clock = secret, model, clock

    async def answer(
        self, method: str, session_id: str | None, action: str, fields: JsonObject, root: str
    ) -> tuple[int, JsonObject]:
        """Return the status and the body of an answer.

        Args:
            action: last part of the path after the session's id; empty for the session itself.
            fields: the request's body.
            root: URL of this server, as the client addresses it.

        Raises:
            RequestError: the request is rejected.
        """
        try:
            if session_id is None:
                return 201, await self._begin(_parse(SessionRequest, fields), root)
            if action == "reward":
                return 200, await self._reward(session_id, _parse(RewardRequest, fields))
            if action == "heartbeat":
                return 200, await self._describe(await self._store.renew_session(session_id))
            if method == "DELETE":
                return 200, await self._cancel(session_id)
            return 200, await self._describe(await self._store.get_session(session_id))
        except RaylightError as error:
            _reject(error)

    async def _begin(self, request: SessionRequest, root: str) -> JsonObject:
        compares = self._rules.group_size > 1
        if compares and request.group is None:
            raise RequestError(
                f"group is missing: the algorithm compares groups of {self._rules.group_size} sessions with "
                "the same task; name the group, or serve with an algorithm that needs none, such as "
                "ReinforcePlusPlus",
                param="group",
            )
        if not compares and request.group is not None:
            raise RequestError(
                "nothing reads group: the algorithm compares no groups; leave it out, or serve with one "
                "that does, such as GRPO",
                param="group",
            )
        session = await self._store.begin_session(request.task, request.group)
        if session is None:
            raise RequestError(NO_PLACE, 429, code="no_place")
        ids = session.state.rollout_id, session.session_id
        use: KeyUse = "train-budgets" if session.config.has_budgets else "train"
        return {
            "session_id": session.session_id,
            "base_url": f"{root}{attempt_path(*ids)}/v1",
            "api_key": attempt_key(self._secret, *ids, use),
            "model": self._model,
            "expires": session.expires,
            "lease_s": session.config.unresponsive_seconds,
        }

    async def _reward(self, session_id: str, request: RewardRequest) -> JsonObject:
        if (request.reward is None) == (request.failed is None):
            raise RequestError("give either reward or failed", param="reward")
        rewards = {} if request.reward is None else _read_rewards(request.reward)
        session = await self._store.get_session(session_id)
        if _attempt(session).status not in ATTEMPT_FINISHED or _status(session) in GIVEN_UP:
            await self._finish(session, rewards, request)
            session = await self._store.get_session(session_id)
        answer = await self._describe(session)
        if answer["status"] in GIVEN_UP:
            return answer | {"reward_used": False}
        is_same = list(answer["rewards"].items()) == list(rewards.items())  # the first one is trained on
        if answer["status"] != ("rewarded" if request.failed is None else "failed") or not is_same:
            of = answer["failure"] or answer["rewards"]
            detail = f" ({of})" if of else ""
            raise RequestError(
                f"the session has ended already: it is {answer['status']}{detail}; a reward is set once", 409
            )
        return answer

    async def _finish(self, session: Session, rewards: dict[str, float], request: RewardRequest) -> None:
        """End a session, once its calls are recorded."""
        spans = [self._span(session, MESSAGE, {MESSAGE_BODY: request.message})] if request.message else []
        if rewards:
            spans.append(self._span(session, ANNOTATION, dict(reward_attributes(rewards))))
        failure = None
        status: AttemptStatus = "succeeded"
        if request.failed is not None:
            status, failure = "failed", Failure(kind="agent", error=_one_line(request.failed))
        truncated = None
        if session.config.has_budgets:
            truncated = await self._store.find_truncation(session.state)
        await self._store.finish_attempt(session.state, status, failure, spans, truncated=truncated)

    async def _cancel(self, session_id: str) -> JsonObject:
        session = await self._store.get_session(session_id)
        if _attempt(session).status not in ATTEMPT_FINISHED:
            failure = Failure(kind="cancelled", error="Cancelled: the client cancelled the session")
            await self._store.finish_attempt(session.state, "failed", failure)
            session = await self._store.get_session(session_id)
        answer = await self._describe(session)
        if answer["status"] != "cancelled":
            raise RequestError(f"the session has ended already: it is {answer['status']}", 409)
        return answer

    async def _describe(self, session: Session) -> JsonObject:
        attempt = _attempt(session)
        status, rewards = _status(session), dict[str, float]()
        if status == "rewarded":
            (item,) = await self._store.collect([session.state.rollout_id])
            rewards = item.rewards
        return {
            "session_id": session.session_id,
            "status": status,
            "task": session.task,
            "rewards": rewards,
            "failure": attempt.failure.error if attempt.failure else None,
            "calls": session.calls,
            "sampled_tokens": session.sampled_tokens,
            "begun": attempt.start_time,
            "ended": attempt.end_time,
            "expires": None if attempt.status in ATTEMPT_FINISHED else session.expires,
        }

    def _span(self, session: Session, name: str, attributes: JsonObject) -> Span:
        """Return a span; one of the same name, of a repeated request, has the same id and is stored once."""
        now = self._clock()
        return Span.from_attributes(
            span_id=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            attributes=attributes,
            rollout_id=session.state.rollout_id,
            attempt_id=session.session_id,
            start_time=now,
            end_time=now,
        )


async def answer_request(
    service: SessionService | None,
    route: Route,
    scope: AsgiScope,
    inner: AsgiScope,
    receive: Receive,
    send: Send,
    max_body: int,
) -> None:
    """Answer a request whose route is one of sessions.

    Args:
        service: None: the server has no sessions.
        scope: of the request as sent.
        inner: its scope without keys.

    Raises:
        RequestError: the request is rejected.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    if service is None:
        raise RequestError("this server has no sessions; start one with `raylight serve --learn`", 404)
    has_body = scope["method"] == "POST" and route.action != "heartbeat"
    fields = (await read_request(inner, receive, max_body)).fields if has_body else {}
    root = root_url(scope["scheme"], dict(scope["headers"]), scope.get("root_path", ""))
    status, body = await service.answer(scope["method"], route.session_id, route.action, fields, root)
    await JSONResponse(body, status)(inner, receive, send)


def root_url(scheme: str, headers: dict[bytes, bytes], root_path: str) -> str:
    """Return the URL of this server as the client addresses it.

    Raises:
        RequestError: the request has no valid Host header.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if not _HOST.fullmatch(host):
        raise RequestError("the Host header is missing or wrong; send the address of this server")
    forwarded = headers.get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
    return f"{forwarded if forwarded in ('http', 'https') else scheme}://{host}{root_path.rstrip('/')}"


def _parse(kind: type[Any], fields: JsonObject) -> Any:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name, reason = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            reason = f"there is no such field; the fields are {', '.join(kind.model_fields)}"
        raise RequestError(f"{name:.100}: {reason}", param=f"{name:.100}") from None


def _read_rewards(reward: object) -> dict[str, float]:
    """Return rewards by name, the one that is trained on first."""
    rewards = named_rewards(reward)
    if len(rewards) > MAX_REWARDS or not all(0 < len(name) <= MAX_NAME for name in rewards):
        raise RequestError(
            f"give at most {MAX_REWARDS} named rewards, with names of 1 to {MAX_NAME} characters",
            param="reward",
        )
    return rewards


def _reject(error: RaylightError) -> NoReturn:
    """Raise the answer to an error of the store or of a check; others stay errors of the server."""
    if isinstance(error, UnknownIdError):
        raise RequestError(f"{error}; it may be of another run", 404) from None
    if isinstance(error, InvalidTransitionError):
        raise RequestError(str(error), 409) from None
    if isinstance(error, RewardError):
        raise RequestError(str(error), param="reward") from None
    if isinstance(error, StoreLostError):
        raise RequestError(str(error), 503) from None
    raise error


def _attempt(session: Session) -> Attempt:
    assert session.state.attempt is not None, "a session has an attempt"
    return session.state.attempt


def _status(session: Session) -> str:
    """Return the state of a session, as clients read it."""
    attempt = _attempt(session)
    if session.state.status == "cancelled":  # by the run
        return "cancelled"
    if attempt.status == "succeeded":
        return "rewarded"
    if attempt.status == "failed":
        kinds = {"cancelled": "cancelled", "unresponsive": "abandoned"}
        return kinds.get(attempt.failure.kind if attempt.failure else "", "failed")
    return {"unresponsive": "expired", "timeout": "timeout"}.get(attempt.status, "open")


def _one_line(text: str) -> str:
    return " ".join(text.split())
