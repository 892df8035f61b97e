"""Page ids with two kinds of owners: sequences that use a page, and prefixes that keep it for later."""

from __future__ import annotations


class OutOfPages(RuntimeError):
    """A pool has too few pages that are free or can be reclaimed; nothing has changed."""


class Pool:
    """Reference-counted page ids `0 .. size - 1`.

    A page is *free* without owners, *in use* with a sequence among them, and *idle* if only prefixes keep it. Every
    method either does all it says or raises and changes nothing.

    Attributes:
        uses: sequences that use each page.
        keeps: prefixes that keep each page.
        free: ids without owners, the next one to be given last.
        idle: number of idle pages.
    """

    def __init__(self, size: int):
        if size < 0:
            raise ValueError(f"size={size}: expected at least 0 pages.")
        self.uses, self.keeps = [0] * size, [0] * size
        self.free = list(range(size - 1, -1, -1))
        self.idle = 0

    @property
    def size(self) -> int:
        return len(self.uses)

    def acquire(self) -> int:
        """A free page, now used by one sequence.

        Raises:
            OutOfPages: none is free.
        """
        if not self.free:
            raise OutOfPages(f"none of {self.size} pages is free: end a sequence or evict a prefix first.")
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def use(self, page: int) -> None:
        """One more sequence uses a page that has an owner."""
        self._check_owned(page)
        self.idle -= not self.uses[page]
        self.uses[page] += 1

    def release(self, page: int) -> None:
        """One sequence fewer uses a page.

        Raises:
            ValueError: no such page, or no sequence uses it (a double free).
        """
        self._check_id(page)
        if not self.uses[page]:
            raise ValueError(f"page {page} is used by no sequence: expected one that is; it was released before.")
        self.uses[page] -= 1
        if not self.uses[page]:
            if self.keeps[page]:
                self.idle += 1
            else:
                self.free.append(page)

    def keep(self, page: int) -> None:
        """One more prefix keeps a page that has an owner."""
        self._check_owned(page)
        self.keeps[page] += 1

    def drop(self, page: int) -> None:
        """One prefix fewer keeps a page.

        Raises:
            ValueError: no such page, or no prefix keeps it.
        """
        self._check_id(page)
        if not self.keeps[page]:
            raise ValueError(f"page {page} is kept by no prefix: expected one that is; it was dropped before.")
        self.keeps[page] -= 1
        if not self.uses[page] and not self.keeps[page]:
            self.idle -= 1
            self.free.append(page)

    def shared(self, page: int) -> bool:
        """Whether a page has more than one owner, so that none may write it."""
        return self.uses[page] + self.keeps[page] > 1

    def _check_id(self, page: int) -> None:
        if not 0 <= page < self.size:
            raise ValueError(f"page {page} is not of this pool: expected 0 to {self.size - 1}.")

    def _check_owned(self, page: int) -> None:
        self._check_id(page)
        if not self.uses[page] and not self.keeps[page]:
            raise ValueError(f"page {page} is free: expected one with an owner; acquire it first.")
