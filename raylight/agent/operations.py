"""`operation`: a function or a block of the agent's code as a span, with what went in and what came out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from raylight.agent.attributes import as_attributes, exception_attributes, exception_message, value_attributes
from raylight.agent.parent_span import (
    ParentSpan,
    current_parent,
    inside,
    parent_from_context,
    start_otel_span,
)
from raylight.errors import EmitError
from raylight.semconv import OPERATION, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT
from raylight.traces.context import current_trace
from raylight.types import Attributes, Span, SpanCoreFields, SpanEvent, TraceStatus

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

MAX_ITEMS = 1000
"""Items of a generator that are recorded as its output."""
Function = TypeVar("Function", bound=Callable[..., Any])


class Recording:
    """One run of an operation: its span while that is being made. It goes to the trace that was current when it began."""

    def __init__(self, attributes: Attributes, propagate: bool = True) -> None:
        self.attributes = dict(attributes)
        self._trace = current_trace() if propagate else None
        outer = current_parent()
        self._parent_id = outer.span_id if outer else None
        self._otel = start_otel_span(self._trace) if self._trace else None
        if self._otel is not None:
            self._place = parent_from_context(self._otel.get_span_context())
        else:
            self._place = ParentSpan(
                outer.trace_id if outer else self._trace.trace_id if self._trace else secrets.token_hex(16)
            )
        self._start = time.time()

    @property
    def kept(self) -> bool:
        """Whether an attempt takes the span."""
        return self._trace is not None

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Spans made in here hang below this one."""
        return inside(self._place, self._otel) if self.kept else contextlib.nullcontext()

    def end(self, error: BaseException | None = None) -> SpanCoreFields:
        """Close the span, with an exception that left the operation, and add it to the trace."""
        status = TraceStatus(status_code="OK")
        if error is not None:
            status = TraceStatus(
                status_code="ERROR", description=f"{type(error).__name__}: {exception_message(error)}"
            )
        core = SpanCoreFields(
            name=OPERATION,
            status=status,
            attributes=self.attributes,
            start_time=self._start,
            end_time=time.time(),
        )
        raised = None if error is None else exception_attributes(error)
        if self._otel is not None:
            _end_otel(self._otel, core, raised)
        elif self._trace is not None:
            events = (
                []
                if raised is None
                else [SpanEvent(name="exception", attributes=raised, timestamp=core.end_time)]
            )
            self._trace.add(
                Span.from_attributes(
                    name=OPERATION,
                    attributes=self.attributes,
                    status=status,
                    events=events,
                    start_time=core.start_time,
                    end_time=core.end_time,
                    trace_id=self._place.trace_id,
                    span_id=self._place.span_id,
                    parent_id=self._parent_id,
                )
            )
        return core


def _end_otel(span: OtelSpan, core: SpanCoreFields, raised: Attributes | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(core.attributes)
    if raised is not None:
        span.add_event("exception", raised)
    span.set_status(Status(StatusCode[core.status.status_code], core.status.description))
    span.end()


class Operation:
    """What `operation(...)` returns: a decorator, and a context manager for one block at a time."""

    def __init__(self, attributes: dict[str, Any], propagate: bool = True) -> None:
        self._attributes = as_attributes(attributes)
        self._propagate = propagate
        self._stack = contextlib.ExitStack()
        self._recording: Recording | None = None
        self._span: SpanCoreFields | None = None

    def __enter__(self) -> Operation:
        if self._recording is not None:
            raise EmitError(
                "this operation is being recorded already; make a new operation(...) for each block"
            )
        self._recording = Recording(self._attributes, self._propagate)
        self._stack.enter_context(self._recording.inside())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        self._span = self._open().end(error)
        self._recording = None

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record what goes in, by position or by name.

        Raises:
            EmitError: outside the block.
        """
        self._open().attributes.update(_inputs(args, kwargs))

    def set_output(self, output: Any) -> None:
        """Record what comes out.

        Raises:
            EmitError: outside the block.
        """
        self._open().attributes.update(value_attributes(OPERATION_OUTPUT, output))

    def span(self) -> SpanCoreFields:
        """What was recorded of the last block.

        Raises:
            EmitError: no block has ended yet.
        """
        if self._span is None:
            raise EmitError("the operation has no span before its block ends")
        return self._span

    def _open(self) -> Recording:
        if self._recording is None:
            raise EmitError(
                "an operation records only within its block: `with operation(...) as op: op.set_input(...)`"
            )
        return self._recording

    def __call__(self, function: Function) -> Function:
        """Record each call of a function, a coroutine function or a generator function.

        Raises:
            EmitError: it is no function.
        """
        if not callable(function):
            raise EmitError(
                f"operation decorates a function, not {type(function).__name__}; a name is given as operation(name=...), "
                "and on a method it goes below @classmethod and @property"
            )
        begin = functools.partial(_begin, self._attributes, self._propagate, function, _signature(function))
        for is_kind, wrap in _WRAPPERS:
            if is_kind(function):
                return functools.wraps(function)(wrap(function, begin))  # type: ignore[return-value]
        return functools.wraps(function)(_wrap_plain(function, begin))  # type: ignore[return-value]


@overload
def operation(
    fn: Function, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Function: ...


@overload
def operation(*, propagate: bool = True, name: str | None = None, **attributes: Any) -> Operation: ...


def operation(fn: Any = None, *, propagate: bool = True, name: str | None = None, **attributes: Any) -> Any:
    """Record a function or a block of code as a span of the rollout.

    Example:
        @operation
        def search(query: str) -> list[str]: ...

        @operation(name="search", source="wiki")
        async def search(query: str) -> list[str]: ...

        with operation(name="plan") as op:
            op.set_input(task=task)
            op.set_output(plan)

    Args:
        name: what `agentlightning.operation.name` says; the function's name if None.
        propagate: False records nothing in the rollout; `Operation.span` still tells what was recorded.
        attributes: further attributes of the span.

    Raises:
        EmitError: it decorates something that is no function.
    """
    made = Operation({**attributes, **({OPERATION_NAME: name} if name is not None else {})}, propagate)
    return made if fn is None else made(fn)


StartRecording = Callable[[tuple[Any, ...], dict[str, Any]], Recording | None]
"""Starts the recording of a call with its arguments; None where there is no attempt that it belongs to."""


def _begin(
    attributes: Attributes,
    propagate: bool,
    function: Any,
    signature: inspect.Signature | None,
    args: Any,
    kwargs: Any,
) -> Recording | None:
    if not propagate or current_trace() is None:
        return None
    named = {OPERATION_NAME: getattr(function, "__name__", type(function).__name__), **attributes}
    return Recording(named | _inputs(args, kwargs, signature))


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C may have none
        return None


def _inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature | None = None
) -> Attributes:
    """Arguments under `agentlightning.operation.input`: by name if the signature tells names, else `args.N`. `self` is left out."""
    named: dict[str, Any] = {f"args.{index}": value for index, value in enumerate(args)} | kwargs
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will say so
            bound = None
        if bound is not None:
            bound.apply_defaults()
            named = dict(bound.arguments)
            if next(iter(named), None) in ("self", "cls"):
                del named[next(iter(named))]
    flat: Attributes = {}
    for name, value in named.items():
        flat |= value_attributes(f"{OPERATION_INPUT}.{name}", value)
    return flat


@contextlib.contextmanager
def _ending(recording: Recording) -> Iterator[None]:
    """End the recording when the block ends, however it does."""
    try:
        yield
    except GeneratorExit:  # a consumer that stops early is no failure
        recording.end()
        raise
    except BaseException as error:
        recording.end(error)
        raise
    recording.end()


def _wrap_plain(function: Any, begin: StartRecording) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        recording = begin(args, kwargs)
        if recording is None:
            return function(*args, **kwargs)
        with _ending(recording), recording.inside():
            result = function(*args, **kwargs)
            recording.attributes.update(value_attributes(OPERATION_OUTPUT, result))
            return result

    return call


def _wrap_coroutine(function: Any, begin: StartRecording) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        recording = begin(args, kwargs)
        if recording is None:
            return await function(*args, **kwargs)
        with _ending(recording), recording.inside():
            result = await function(*args, **kwargs)
            recording.attributes.update(value_attributes(OPERATION_OUTPUT, result))
            return result

    return call


def _wrap_generator(function: Any, begin: StartRecording) -> Any:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        recording = begin(args, kwargs)
        generator = function(*args, **kwargs)
        if recording is None:
            return (yield from generator)
        items: list[Any] = []
        with _ending(recording):
            try:
                return (yield from _stepped(generator, recording, items))
            finally:
                recording.attributes.update(value_attributes(OPERATION_OUTPUT, items))

    return call


def _stepped(
    generator: Generator[Any, Any, Any], recording: Recording, items: list[Any]
) -> Generator[Any, Any, Any]:
    """Run a generator so that the recording is current while its own code runs, and not while the consumer's does."""
    resume: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            with recording.inside():
                item = resume()
        except StopIteration as stop:
            return stop.value
        if len(items) < MAX_ITEMS:
            items.append(item)
        try:
            resume = functools.partial(generator.send, (yield item))
        except GeneratorExit:
            with recording.inside():
                generator.close()
            raise
        except BaseException as thrown:
            resume = functools.partial(generator.throw, thrown)


def _wrap_async_generator(function: Any, begin: StartRecording) -> Any:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        recording = begin(args, kwargs) or Recording({}, propagate=False)
        generator = function(*args, **kwargs)
        items: list[Any] = []
        with _ending(recording):
            try:
                resume: Callable[[], Any] = functools.partial(anext, generator)
                while True:
                    try:
                        with recording.inside():
                            item = await resume()
                    except StopAsyncIteration:
                        return
                    if recording.kept and len(items) < MAX_ITEMS:
                        items.append(item)
                    try:
                        resume = functools.partial(generator.asend, (yield item))
                    except GeneratorExit:
                        with recording.inside():
                            await generator.aclose()
                        raise
                    except BaseException as thrown:
                        resume = functools.partial(generator.athrow, thrown)
            finally:
                recording.attributes.update(value_attributes(OPERATION_OUTPUT, items))

    return call


_WRAPPERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, StartRecording], Any]], ...] = (
    (inspect.iscoroutinefunction, _wrap_coroutine),
    (inspect.isasyncgenfunction, _wrap_async_generator),
    (inspect.isgeneratorfunction, _wrap_generator),
)
