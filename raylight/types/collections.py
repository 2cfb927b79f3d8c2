"""Collections that users pass or receive: datasets and the results of queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, SupportsIndex, TypeVar

Task = TypeVar("Task", covariant=True)
Item = TypeVar("Item")


class Dataset(Protocol[Task]):
    """Protocol of datasets: a list, a `torch.utils.data.Dataset`, or any sequence of tasks. No class needs to
    inherit from it."""

    def __getitem__(self, index: SupportsIndex, /) -> Task: ...

    def __len__(self) -> int: ...


class PaginatedResult(list[Item]):
    """List of the results of a query, with the page that they are.

    Args:
        items: the results on the page.
        limit: maximum number of results that the query asked for; -1 for all.
        offset: number of results before the page.
        total: number of results on all pages. None: the page holds all of them.
    """

    def __init__(
        self, items: Iterable[Item] = (), *, limit: int = -1, offset: int = 0, total: int | None = None
    ) -> None:
        super().__init__(items)
        self.limit = limit
        self.offset = offset
        self.total = len(self) if total is None else total

    def __repr__(self) -> str:
        end = "" if self.limit == -1 else self.offset + self.limit
        first = "empty" if not self else f"[{self[0]!r}, ...]" if len(self) > 1 else f"[{self[0]!r}]"
        return f"<PaginatedResult ({self.offset}:{end} of {self.total}) {first}>"
