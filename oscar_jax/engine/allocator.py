"""`Allocator`: which pages each sequence has, and which prefixes are shared. Plain Python, no device.

A serving loop tells it about every token and does on the device what it answers: `begin` names a tail to copy into a
sequence's plain tiers, `grow` names pages to copy before the tokens are fed, `keep` names a tail to copy the plain
tiers to. If these are done in the order of the calls, every sequence reads what it would read alone.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from oscar_jax.engine.pool import OutOfPages, Pool
from oscar_jax.engine.prefix_tree import Hash, PrefixTree, Tail
from oscar_jax.engine.request import token_ids

if TYPE_CHECKING:  # that module imports jax
    from pallas_kernels.tiers import Tiers


class Begun(NamedTuple):
    """A new sequence.

    Attributes:
        sequence: its id.
        length: tokens it has already, a prefix of those asked for and shorter than these.
        tail: slot to copy its plain tiers from, None for an empty sequence.
    """

    sequence: int
    length: int
    tail: int | None


class PageCopy(NamedTuple):
    """A page to be copied, in all layers, before a sequence is written."""

    source: int
    target: int


@dataclasses.dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    pages: list[int]
    floor: int  # tokens that cannot be taken back


@dataclasses.dataclass(frozen=True)
class AllocatorStats:
    """Counts since the start, and the present state, in pages, tails and tokens.

    Attributes:
        pages, pages_free, pages_idle, pages_shared: of the pool; idle ones are kept by prefixes alone, shared ones
            have several owners.
        tails, tails_kept: slots, and those that hold a tail.
        tokens_asked, tokens_hit: prompt tokens of all `begin` calls, and those found kept.
        hits: `begin` calls that found a prefix.
        evictions: tails evicted.
        copies: pages copied before a write.
    """

    pages: int
    pages_free: int
    pages_idle: int
    pages_shared: int
    tails: int
    tails_kept: int
    tokens_asked: int
    tokens_hit: int
    hits: int
    evictions: int
    copies: int


class Allocator:
    """Pages of sequences and prefixes. Every method does all it says, or raises and changes nothing.

    Attributes:
        tiers: who is in which tier.
        pool: the pages.
        tree: the kept prefixes.
    """

    def __init__(self, tiers: Tiers, *, pages: int, tails: int, take_back: int = 0, chain: Hash = hash):
        """
        Args:
            pages: of the history pool.
            tails: boundaries that can be kept at once.
            take_back: most tokens that are taken back. The device must be able to take back one more (it can with
                `step_tokens = take_back + 2`): the same prompt hits its own end, and feeds its last token again.
            chain: hash of blocks; another one is of use to tests only.

        Raises:
            ValueError: a count that is negative or no whole number.
        """
        for name, count in (("pages", pages), ("tails", tails), ("take_back", take_back)):
            if not isinstance(count, numbers.Integral) or count < 0:
                raise ValueError(f"{name}={count!r}: expected a whole number, at least 0.")
        self.tiers = tiers
        self.pool = Pool(pages)
        self.tree = PrefixTree(self.pool, tiers, slots=tails, chain=chain)
        self._take_back = take_back
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._asked = self._hit = self._hits = self._copies = 0

    @property
    def available(self) -> int:
        """Pages that are free or can be reclaimed."""
        return len(self.pool.free) + self.pool.idle

    @property
    def sequences(self) -> list[int]:
        """Ids of the sequences that have begun and not ended."""
        return list(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return len(self._get(sequence).tokens)

    def tokens(self, sequence: int, start: int = 0) -> list[int]:
        """Token ids of a sequence, from one of them on."""
        return self._get(sequence).tokens[start:]

    def pages(self, sequence: int) -> list[int]:
        """Page ids of a sequence's history, in order."""
        return list(self._get(sequence).pages)

    def missing(self, tokens: Sequence[int]) -> int:
        """Available pages that a new sequence of all these tokens takes, after what it shares."""
        total = self.tiers.history_pages(len(tokens))
        tail = self.tree.match(tokens)
        if tail is None:
            return total
        length, pages = self._shared(tail, tokens)
        copied = self.tiers.history_tokens(length) % self.tiers.page > 0
        return total - len(pages) + copied + sum(not self.pool.uses[page] for page in pages)

    def begin(self, tokens: Sequence[int]) -> Begun:
        """A new sequence that has as many of these tokens as a kept prefix gives, at least one fewer than all.

        Raises:
            ValueError: no tokens, or what is none.
        """
        tokens = token_ids("tokens", tokens)
        if not tokens:
            raise ValueError("tokens is empty: expected the sequence's tokens, at least one.")
        tail = self.tree.match(tokens)
        length, pages = 0, []
        if tail is not None:
            self.tree.touch(tail)
            length, pages = self._shared(tail, tokens)
            self._hits += 1
        for page in pages:
            self.pool.use(page)
        self._asked += len(tokens)
        self._hit += length
        sequence = self._next
        self._next += 1
        self._sequences[sequence] = _Sequence(list(tokens[:length]), pages, length)
        return Begun(sequence, length, None if tail is None else tail.slot)

    def needed(self, sequence: int, count: int) -> int:
        """Pages that `grow` takes for `count` more tokens."""
        return self._needed(self._get(sequence), count)[0]

    def reserve(self, sequence: int) -> bool:
        """Takes the page that the next token will need, before that is known.

        Nothing else changes: no prefix is evicted and no page copied. `grow` then uses the page, `take_back` and `end`
        release it.

        Returns:
            Whether the device may be fed the next token now; it must be able to take it back, if there is none.

        Raises:
            ValueError: no such sequence.
        """
        state = self._get(sequence)
        needed, copied = self._needed(state, 1)
        if copied is not None or needed > len(self.pool.free):
            return False
        state.pages += [self._acquire() for _ in range(needed)]
        return True

    def reserved(self, sequence: int) -> int:
        """Pages of a sequence, 0 or 1, that its tokens do not need yet."""
        state = self._get(sequence)
        return len(state.pages) - self.tiers.history_pages(len(state.tokens))

    def grow(self, sequence: int, tokens: Sequence[int]) -> list[PageCopy]:
        """Adds tokens, and pages for those that leave the recent window.

        Returns:
            Pages to copy, in order, before the tokens are fed: a page with other owners is never written.

        Raises:
            ValueError: no such sequence, or tokens that are none.
            OutOfPages: fewer pages are available than `needed`.
        """
        state, tokens = self._get(sequence), token_ids("tokens", tokens)
        needed, copied = self._needed(state, len(tokens))
        if not needed:
            state.tokens += tokens
            return []
        if needed > self.available:
            raise OutOfPages(
                f"sequence {sequence}: {len(tokens)} more tokens need {needed} pages, expected at most the "
                f"{self.available} available of {self.pool.size}; end or preempt another sequence."
            )
        copies = []
        if copied is not None:
            source = state.pages[copied]
            state.pages[copied] = self._acquire()
            self.pool.release(source)
            copies.append(PageCopy(source, state.pages[copied]))
        state.pages += [self._acquire() for _ in range(needed - len(copies))]
        state.tokens += tokens
        self._copies += len(copies)
        return copies

    def take_back(self, sequence: int, count: int) -> None:
        """Removes the last tokens, as after drafted tokens that were rejected.

        Raises:
            ValueError: no such sequence, or a count out of range or reaching behind what was shared or kept.
        """
        state = self._get(sequence)
        limit = min(self._take_back, len(state.tokens) - state.floor)
        if not 0 <= count <= limit:
            raise ValueError(f"count={count}: expected 0 to {limit} tokens of sequence {sequence}.")
        length = len(state.tokens) - count
        del state.tokens[length:]
        pages = self.tiers.history_pages(length)
        for page in state.pages[pages:]:
            self.pool.release(page)
        del state.pages[pages:]

    def keep(self, sequence: int) -> int | None:
        """Keeps the sequence's tokens as a prefix for later ones.

        Returns:
            The slot to copy its plain tiers to, or None if there is nothing to copy: it is kept already, no tails
            can be kept, or its hash is another prefix's.

        Raises:
            ValueError: no such sequence.
        """
        state = self._get(sequence)
        if not state.tokens:
            return None
        tail = self.tree.insert(state.tokens, state.pages)
        state.floor = len(state.tokens)
        return None if tail is None else tail.slot

    def end(self, sequence: int) -> None:
        """Forgets a sequence and releases its pages.

        Raises:
            ValueError: no such sequence (or it has ended before).
        """
        for page in self._get(sequence).pages:
            self.pool.release(page)
        del self._sequences[sequence]

    def forget(self) -> None:
        """Gives up all kept prefixes."""
        for tail in list(self.tree.tails):
            self.tree.evict(tail)

    def stats(self) -> AllocatorStats:
        """See `AllocatorStats`."""
        return AllocatorStats(
            pages=self.pool.size,
            pages_free=len(self.pool.free),
            pages_idle=self.pool.idle,
            pages_shared=sum(map(self.pool.shared, range(self.pool.size))),
            tails=self.tree.slots,
            tails_kept=len(self.tree.tails),
            tokens_asked=self._asked,
            tokens_hit=self._hit,
            hits=self._hits,
            evictions=self.tree.evictions,
            copies=self._copies,
        )

    def _get(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ValueError(f"sequence {sequence}: expected one that has begun and not ended.")
        return self._sequences[sequence]

    def _shared(self, tail: Tail, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Tokens and pages that a sequence of these tokens takes over."""
        length = min(tail.boundary, len(tokens) - 1)
        return length, tail.pages()[: self.tiers.history_pages(length)]

    def _needed(self, state: _Sequence, count: int) -> tuple[int, int | None]:
        """Pages needed, and the index of a page that must be copied first."""
        length = len(state.tokens)
        stored, wanted = self.tiers.history_tokens(length), self.tiers.history_tokens(length + count)
        if wanted == stored:
            return 0, None
        first = stored // self.tiers.page
        copied = first if first < len(state.pages) and self.pool.shared(state.pages[first]) else None
        return self.tiers.history_pages(length + count) - len(state.pages) + (copied is not None), copied

    def _acquire(self) -> int:
        if not self.pool.free:
            self.tree.reclaim()
        return self.pool.acquire()
