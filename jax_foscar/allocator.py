"""Which pages of a pool are free: kept on the host, beside the programs that read and write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .format import _integer


class OutOfPages(RuntimeError):  # noqa: N818
    """``PageAllocator.allocate`` was asked for more pages than are free."""


class PageAllocator:
    """Hands out the page ids of one pool and counts the rows that hold each.

    A page is free again once as many ``free`` as ``allocate`` and ``fork`` have named it. A call that raises changes
    nothing. A cache of several pools takes an allocator for each: ids are relative to the row's own pool.

    Args:
      num_pages: pages of the pool, as ``KVCache.create_paged`` was given.
    """

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * _integer("num_pages", num_pages, 1)
        self._free = list(range(num_pages))[::-1]  # a stack: what was freed last is handed out first

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return len(self._free)

    def references(self, page_id: int) -> int:
        """How many rows hold a page; 0 if it is free.

        Raises:
          ValueError: there is no such page.
        """
        return self._references[self._known(page_id)]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages.

        Raises:
          OutOfPages: fewer are free; none is taken.
        """
        count = _integer("count", count, 0)
        if count > self.num_free:
            raise OutOfPages(
                f"count={count} pages were asked for, but {self.num_free} of {self.num_pages} are free: free those of "
                "finished rows, or create the cache with a larger num_pages"
            )
        ids = [self._free.pop() for _ in range(count)]
        for page_id in ids:
            self._references[page_id] = 1
        return ids

    def fork(self, ids: Iterable[int]) -> list[int]:
        """Counts one more row that holds each of ``ids``, and returns them: the shared pages of a fork or a prefix.

        Raises:
          ValueError: an id is unknown, or free.
        """
        ids = [self._known(page_id) for page_id in ids]
        for page_id in ids:
            if not self._references[page_id]:
                raise ValueError(f"ids: page {page_id} is free and cannot be shared; allocate it first")
        for page_id in ids:
            self._references[page_id] += 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Gives back one reference to each of ``ids``; pages that no row holds any more are free.

        Raises:
          ValueError: an id is unknown, or named more often than it is held (a double free).
        """
        given = Counter(self._known(page_id) for page_id in ids)
        for page_id, times in given.items():
            held = self._references[page_id]
            if times > held:
                raise ValueError(
                    f"ids: page {page_id} is freed {times} times, but held {held} times; free once what "
                    "allocate and fork returned"
                )
        for page_id, times in given.items():
            self._references[page_id] -= times
            if not self._references[page_id]:
                self._free.append(page_id)

    def _known(self, page_id: int) -> int:
        number = _integer("ids", page_id, -(2**63))
        if not 0 <= number < self.num_pages:
            raise ValueError(f"ids: page {number} is not in [0, {self.num_pages}); leave the table's padding out")
        return number

    def __repr__(self) -> str:
        return f"PageAllocator({self.num_pages} pages, {self.num_free} free)"
