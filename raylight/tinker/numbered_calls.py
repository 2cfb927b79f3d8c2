"""Calls that are executed once, however often they come."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class NumberedCalls:
    """Calls of an object's methods, one after another. A call that comes again is not executed again: it has
    the answer of its first time. The answer of the last call is kept.

    Args:
        target: the object.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._number = 0
        self._answer: Future[Any] = Future()

    def call(self, number: int, method: str, *args: Any) -> Any:
        """Call a method, and raise its error.

        Args:
            number: higher than those of earlier calls; that of the last call for the same call again.
        """
        if number < self._number:
            raise AssertionError(f"call {number} ({method}) came after call {self._number}")
        if number > self._number:
            self._number, self._answer = number, Future()  # the last answer is freed before the call
            try:
                self._answer.set_result(getattr(self._target, method)(*args))
            except BaseException as error:  # of any kind: it is the answer
                self._answer.set_exception(error)
        return self._answer.result()
