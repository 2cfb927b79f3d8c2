"""`operation`: records a function or a block of code as a span, with its input and output."""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from raylight.agent.attributes import as_attributes, exception_attributes, exception_message, value_attributes
from raylight.errors import EmitError, EmitTypeError
from raylight.semconv import OPERATION, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT
from raylight.traces.context import (
    ParentSpan,
    current_parent,
    current_trace,
    parent_from_context,
    start_otel_span,
    use_parent,
)
from raylight.types import Attributes, Event, Span, SpanCoreFields, TraceStatus

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

MAX_ITEMS = 1000
"""Maximum number of a generator's items that are recorded as its output."""
Call = Callable[..., Any]
Function = TypeVar("Function", bound=Call)


class OperationRun:
    """One execution of an operation, whose span goes to the trace that was current at the start."""

    def __init__(self, attributes: Attributes, propagate: bool = True) -> None:
        self.attributes = dict(attributes)
        self._trace = current_trace() if propagate else None
        outer = current_parent()
        self._parent_id = outer.span_id if outer else None
        self._otel = start_otel_span(self._trace) if self._trace else None
        if self._otel is not None:
            self._parent = parent_from_context(self._otel.get_span_context())
        else:
            self._parent = ParentSpan(
                outer.trace_id if outer else self._trace.trace_id if self._trace else secrets.token_hex(16)
            )
        self._start = time.time()

    @property
    def recorded(self) -> bool:
        """True if the span goes to the trace of an attempt."""
        return self._trace is not None

    def as_parent(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which new spans are children of this one."""
        return use_parent(self._parent, self._otel) if self.recorded else contextlib.nullcontext()

    def end(self, error: BaseException | None = None) -> SpanCoreFields:
        """End the span, with the exception that left the operation if any, and add it to the trace."""
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
                else [Event(name="exception", attributes=raised, timestamp=core.end_time)]
            )
            self._trace.add(
                Span.from_attributes(
                    name=OPERATION,
                    attributes=self.attributes,
                    status=status,
                    events=events,
                    start_time=core.start_time,
                    end_time=core.end_time,
                    trace_id=self._parent.trace_id,
                    span_id=self._parent.span_id,
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
    """Result of `operation(...)`: a decorator, and a context manager for one block at a time."""

    def __init__(self, attributes: dict[str, object], propagate: bool = True) -> None:
        self._attributes = as_attributes(attributes)
        self._propagate = propagate
        self._stack = contextlib.ExitStack()
        self._run: OperationRun | None = None
        self._span: SpanCoreFields | None = None

    def __enter__(self) -> Operation:
        if self._run is not None:
            raise EmitError(
                "this operation is already recording a block; create a new operation(...) for each block"
            )
        self._run = OperationRun(self._attributes, self._propagate)
        self._stack.enter_context(self._run.as_parent())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        self._span = self._open().end(error)
        self._run = None

    def set_input(self, *args: object, **kwargs: object) -> None:
        """Record the input, by position or by name.

        Raises:
            EmitError: the call is outside the block.
        """
        self._open().attributes.update(_inputs(args, kwargs))

    def set_output(self, output: object) -> None:
        """Record the output.

        Raises:
            EmitError: the call is outside the block.
        """
        self._open().attributes.update(value_attributes(OPERATION_OUTPUT, output))

    def span(self) -> SpanCoreFields:
        """Return the span of the last block.

        Raises:
            EmitError: no block has ended yet.
        """
        if self._span is None:
            raise EmitError("the operation has no span until its block ends; call span() after the block")
        return self._span

    def _open(self) -> OperationRun:
        if self._run is None:
            raise EmitError(
                "input and output can only be set within the block: `with operation(...) as op: "
                "op.set_input(...)`"
            )
        return self._run

    def __call__(self, function: Function) -> Function:
        """Record each call of a function, a coroutine function or a generator function.

        Raises:
            EmitTypeError: `function` is not callable.
        """
        if not callable(function):
            raise EmitTypeError(
                f"operation decorates a function, not {type(function).__name__}; pass a name as "
                "operation(name=...), and put it below @classmethod and @property"
            )
        begin = functools.partial(_begin, self._attributes, self._propagate, function, _signature(function))
        for is_kind, wrap in _WRAPPERS:
            if is_kind(function):
                return functools.wraps(function)(wrap(function, begin))  # type: ignore[return-value]
        return functools.wraps(function)(_wrap_plain(function, begin))  # type: ignore[return-value]


@overload
def operation(
    fn: Function, *, propagate: bool = True, name: str | None = None, **attributes: object
) -> Function: ...


@overload
def operation(*, propagate: bool = True, name: str | None = None, **attributes: Any) -> Operation: ...


def operation(
    fn: Call | None = None, *, propagate: bool = True, name: str | None = None, **attributes: object
) -> object:
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
        name: value of the attribute `agentlightning.operation.name`. None: the function's name.
        propagate: False records nothing in the rollout; `Operation.span` still returns the span.
        attributes: further attributes of the span.

    Raises:
        EmitTypeError: it decorates something that is not a function.
        EmitError: `attributes` has the attribute of `name` too.
    """
    if name is not None and OPERATION_NAME in attributes:
        raise EmitError(f"operation got both name= and the attribute {OPERATION_NAME}; give one of them")
    result = Operation({**attributes, **({OPERATION_NAME: name} if name is not None else {})}, propagate)
    return result if fn is None else result(fn)


StartRun = Callable[[tuple[object, ...], dict[str, object]], OperationRun | None]
"""Function that starts the run of a call with these arguments; it returns None outside an attempt."""


def _begin(
    attributes: Attributes,
    propagate: bool,
    function: Call,
    signature: inspect.Signature | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> OperationRun | None:
    if not propagate or current_trace() is None:
        return None
    named = {OPERATION_NAME: getattr(function, "__name__", type(function).__name__), **attributes}
    return OperationRun(named | _inputs(args, kwargs, signature))


def _signature(function: Call) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C may have none
        return None


def _inputs(
    args: tuple[object, ...], kwargs: dict[str, object], signature: inspect.Signature | None = None
) -> Attributes:
    """Return the attributes of a call's arguments, by name or else as `args.N`, without `self` and `cls`."""
    named: dict[str, object] = {f"args.{index}": value for index, value in enumerate(args)} | kwargs
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will raise it
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
def _ending(run: OperationRun) -> Iterator[None]:
    try:
        yield
    except GeneratorExit:  # a consumer that stops early is not a failure
        run.end()
        raise
    except BaseException as error:
        run.end(error)
        raise
    run.end()


def _wrap_plain(function: Call, begin: StartRun) -> Call:
    def call(*args: object, **kwargs: object) -> object:
        run = begin(args, kwargs)
        if run is None:
            return function(*args, **kwargs)
        with _ending(run), run.as_parent():
            result = function(*args, **kwargs)
            run.attributes.update(value_attributes(OPERATION_OUTPUT, result))
            return result

    return call


def _wrap_coroutine(function: Call, begin: StartRun) -> Call:
    async def call(*args: object, **kwargs: object) -> object:
        run = begin(args, kwargs)
        if run is None:
            return await function(*args, **kwargs)
        with _ending(run), run.as_parent():
            result = await function(*args, **kwargs)
            run.attributes.update(value_attributes(OPERATION_OUTPUT, result))
            return result

    return call


def _wrap_generator(function: Call, begin: StartRun) -> Call:
    def call(*args: object, **kwargs: object) -> Generator[object, object, object]:
        run = begin(args, kwargs)
        generator = function(*args, **kwargs)
        if run is None:
            return (yield from generator)
        items: list[object] = []
        with _ending(run):
            try:
                return (yield from _iterate(generator, run, items))
            finally:
                run.attributes.update(value_attributes(OPERATION_OUTPUT, items))

    return call


def _iterate(
    generator: Generator[object, object, object], run: OperationRun, items: list[object]
) -> Generator[object, object, object]:
    """Iterate a generator, with its span as parent only while the generator's own code runs."""
    resume: Callable[[], object] = functools.partial(next, generator)
    while True:
        try:
            with run.as_parent():
                item = resume()
        except StopIteration as stop:
            return stop.value
        if len(items) < MAX_ITEMS:
            items.append(item)
        try:
            resume = functools.partial(generator.send, (yield item))
        except GeneratorExit:
            with run.as_parent():
                generator.close()
            raise
        except BaseException as thrown:
            resume = functools.partial(generator.throw, thrown)


def _wrap_async_generator(function: Call, begin: StartRun) -> Call:
    async def call(*args: object, **kwargs: object) -> AsyncGenerator[object, object]:
        run = begin(args, kwargs) or OperationRun({}, propagate=False)
        generator = function(*args, **kwargs)
        items: list[object] = []
        with _ending(run):
            try:
                resume: Callable[[], Awaitable[object]] = functools.partial(anext, generator)
                while True:
                    try:
                        with run.as_parent():
                            item = await resume()
                    except StopAsyncIteration:
                        return
                    if run.recorded and len(items) < MAX_ITEMS:
                        items.append(item)
                    try:
                        resume = functools.partial(generator.asend, (yield item))
                    except GeneratorExit:
                        with run.as_parent():
                            await generator.aclose()
                        raise
                    except BaseException as thrown:
                        resume = functools.partial(generator.athrow, thrown)
            finally:
                run.attributes.update(value_attributes(OPERATION_OUTPUT, items))

    return call


_WRAPPERS: tuple[tuple[Callable[[object], bool], Callable[[Call, StartRun], Call]], ...] = (
    (inspect.iscoroutinefunction, _wrap_coroutine),
    (inspect.isasyncgenfunction, _wrap_async_generator),
    (inspect.isgeneratorfunction, _wrap_generator),
)
