"""Hooks: arguments, order, and errors, which fail the rollout only if the hook is strict."""

import asyncio
import logging
from typing import Any

import cloudpickle
import pytest
from unit_helpers import Odd, Unprintable, make_rollout

from raylight.agent.hooks import HOOK_ARGUMENTS, Hook, HookDispatcher, LoggingHook
from raylight.errors import HookError
from raylight.semconv import reward_attributes
from raylight.types import Span

AVAILABLE: dict[str, Any] = {"agent": "A", "runner": "R", "tracer": "T", "rollout": "O"}


async def call_all(hooks: HookDispatcher) -> None:
    for event, names in HOOK_ARGUMENTS.items():
        await hooks.call(event, **{name: {**AVAILABLE, "spans": ["S"]}[name] for name in names})


class Seen:
    def __init__(self) -> None:
        self.seen: list[Any] = []


class Subsets(Seen):
    """A hook that is not a subclass of Hook, with all kinds of methods and signatures."""

    def on_rollout_start(self) -> None:
        self.seen.append(())

    async def on_trace_start(self, rollout: Any, *, agent: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append((rollout, agent))

    def on_trace_end(self, *rest: Any, spans: Any, mine: int = 7, **others: Any) -> None:
        self.seen.append((rest, spans, mine, sorted(others)))

    def on_rollout_end(self, spans: Any, unknown: Any = None) -> Any:
        async def later() -> None:
            self.seen.append((spans, unknown))

        return later()


async def test_a_method_gets_the_arguments_that_it_names() -> None:
    hook = Subsets()
    await call_all(HookDispatcher([hook]))
    assert hook.seen == [
        (),
        ("O", "A"),
        ((), ["S"], 7, ["agent", "rollout", "runner", "tracer"]),
        (["S"], None),
    ]


class Lightning(Hook, Seen):
    """A hook with the signatures of agent-lightning 0.3."""

    def __init__(self) -> None:
        Seen.__init__(self)

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(("trace_start", agent, runner, tracer, rollout))

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:  # type: ignore[override]
        self.seen.append(("trace_end", agent, runner, tracer, rollout))

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:  # type: ignore[override]
        self.seen.append(("start", agent, runner, rollout))

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:  # type: ignore[override]
        self.seen.append(("end", agent, runner, rollout, spans))


async def test_agent_lightnings_signatures_work() -> None:
    hook = Lightning()
    await call_all(HookDispatcher(hook))
    assert hook.seen == [
        ("start", "A", "R", "O"),
        ("trace_start", "A", "R", "T", "O"),
        ("trace_end", "A", "R", "T", "O"),
        ("end", "A", "R", "O", ["S"]),
    ]


async def test_a_hook_that_overrides_one_method_is_called_for_that_event_only() -> None:
    class One(Hook):
        def on_trace_end(self, *, rollout: Any) -> None:  # type: ignore[override]
            raise AssertionError("called")

    hooks = HookDispatcher([One()])
    assert hooks
    await hooks.call("on_rollout_start", **AVAILABLE)
    assert not HookDispatcher([Hook()])
    assert not HookDispatcher()
    assert not HookDispatcher(None)
    await call_all(HookDispatcher([Hook()]))


# failure


def failing(strict: bool, log: list[str], name: str, error: BaseException | None = None) -> Hook:
    class Failing(Hook):
        def on_trace_end(self, *, rollout: Any) -> None:  # type: ignore[override]
            log.append(name)
            if error is not None:
                raise error

    Failing.__name__ = name
    hook = Failing()
    hook.strict = strict
    return hook


async def test_a_failing_hook_is_logged_by_name_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    hooks = HookDispatcher([failing(False, log, "Bad", ValueError("no")), failing(False, log, "Good")])
    with caplog.at_level(logging.ERROR, "raylight"):
        await hooks.call("on_trace_end", **AVAILABLE, spans=[])
    assert log == ["Bad", "Good"]
    (record,) = caplog.records
    assert "Bad.on_trace_end" in record.message
    assert str(record.exc_info[1]) == "no"


async def test_strict_hooks_fail_after_all_were_called() -> None:
    log: list[str] = []
    one = failing(True, log, "One", ValueError("first"))
    two = failing(True, log, "Two", SystemExit(3))
    hooks = HookDispatcher([one, two, failing(False, log, "Three")])
    both = r"One.on_trace_end: ValueError: first; Two.on_trace_end: SystemExit: 3"
    with pytest.raises(HookError, match=both) as caught:
        await hooks.call("on_trace_end", **AVAILABLE, spans=[])
    assert log == ["One", "Two", "Three"]
    assert isinstance(caught.value.__cause__, ValueError)
    assert cloudpickle.loads(cloudpickle.dumps(caught.value)).args == caught.value.args


async def test_a_cancelled_rollout_is_not_a_failing_hook(caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Event()

    class Slow(Hook):
        async def on_trace_end(self, *, rollout: Any) -> None:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()

    calling = asyncio.create_task(HookDispatcher([Slow()]).call("on_trace_end", **AVAILABLE, spans=[]))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert caplog.messages == []


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), KeyboardInterrupt(), Odd(), Unprintable()], ids=repr
)
async def test_whatever_a_hook_raises_is_its_own_failure(error: BaseException) -> None:
    """A CancelledError that the hook caused itself, in its own task, counts as its error."""
    log: list[str] = []
    await HookDispatcher([failing(False, log, "Lax", error)]).call("on_trace_end", **AVAILABLE, spans=[])
    strict = HookDispatcher([failing(True, log, "Strict", error)])
    with pytest.raises(HookError, match=f"Strict.on_trace_end: {type(error).__name__}"):
        await strict.call("on_trace_end", **AVAILABLE, spans=[])
    assert log == ["Lax", "Strict"]


async def test_what_the_runner_does_not_give_is_the_runners_error() -> None:
    with pytest.raises(KeyError, match="rollout"):
        await HookDispatcher([failing(False, [], "H")]).call("on_trace_end", spans=[])
    with pytest.raises(KeyError, match="on_nothing"):
        await HookDispatcher().call("on_nothing")


# what is refused when it is made


class Unfillable(Hook):
    async def on_rollout_start(self, *, rollout: Any, spans: Any) -> None:  # type: ignore[override]
        """Take spans, which this event lacks."""


class Positional(Hook):
    def on_rollout_start(self, rollout: Any, /) -> None:  # type: ignore[override]
        """Take an argument by position only."""


class Misspelled(Hook):
    def on_rollout_ended(self, *, rollout: Any) -> None:
        """A misspelt event."""


class Nothing:
    on_trace_end = None


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Unfillable(), r"takes the unknown argument 'spans'.*agent, runner, tracer, rollout"),
        (Positional(), "by position only"),
        (Misspelled(), r"Misspelled.on_rollout_ended is never called; did you mean on_rollout_end"),
        (Nothing(), "Nothing is not a hook"),
        (LoggingHook, r"write LoggingHook\(\)"),
        (3, "int is not a hook"),
    ],
)
def test_what_could_not_be_called_is_refused(hook: Any, message: str) -> None:
    with pytest.raises(HookError, match=message):
        HookDispatcher([hook])


def test_other_methods_of_a_hook_are_its_own_business() -> None:
    class Busy(Hook):
        def on_my_event(self) -> None: ...

        def on_trace_end(self, **kwargs: Any) -> None: ...

    HookDispatcher([Busy()])


async def test_hooks_travel() -> None:
    hooks = cloudpickle.loads(cloudpickle.dumps(HookDispatcher([Subsets()])))
    await call_all(hooks)
    assert len(hooks._calls["on_trace_end"][0][0].seen) == 4


async def test_the_logging_hook_tells_beginning_and_end(caplog: pytest.LogCaptureFixture) -> None:
    rollout = make_rollout("ro-9", mode="train")
    spans = [Span.from_attributes(attributes=reward_attributes({"r": 0.25}), name="x")]
    hooks = HookDispatcher([LoggingHook()])
    given = AVAILABLE | {"rollout": rollout}
    with caplog.at_level(logging.INFO, "raylight"):
        await hooks.call("on_rollout_start", **given)
        await hooks.call("on_rollout_end", **given, spans=spans)
    assert caplog.messages == [
        "rollout ro-9, attempt at-1 begins, mode train",
        "rollout ro-9, attempt at-1 ends with 1 spans, reward 0.25",
    ]
    caplog.clear()
    await HookDispatcher([LoggingHook(level=logging.DEBUG)]).call("on_rollout_start", **given)
    assert caplog.messages == []
