"""Random operations on an `Allocator`, checked after each one: `python -m oscar_jax.engine.drive --operations N`.

A shadow of the device's memory says for every row which token after which others it holds, so that a page given away
too early, a missing copy or a wrong tail shows at the first read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oscar_jax.engine.allocator import Allocator, PageCopy
from oscar_jax.engine.invariants import BrokenInvariant, check
from oscar_jax.engine.pool import OutOfPages

if TYPE_CHECKING:  # that module imports jax
    from pallas_kernels.tiers import Tiers


class Shadow:
    """What pages and tails hold: for a row the tokens up to it, for a tail those of its boundary."""

    def __init__(self, tiers: Tiers):
        self.tiers = tiers
        self.rows: dict[tuple[int, int], int] = {}
        self.tails: dict[int, int] = {}

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages."""
        for source, target in copies:
            for row in range(self.tiers.page):
                self.rows[target, row] = self.rows.get((source, row), -1)

    def write(self, tokens: list[int], pages: list[int], stored: int) -> None:
        """Demotes what a sequence of `stored` tokens must demote to have these tokens."""
        begin, end = self.tiers.history_tokens(stored), self.tiers.history_tokens(len(tokens))
        for index in range(begin, end):
            page, row = divmod(index, self.tiers.page)
            self.rows[pages[page], row] = self._identity(tokens, index)

    def read(self, tokens: list[int], pages: list[int]) -> None:
        """Verifies that a sequence's pages hold its own tokens.

        Raises:
            BrokenInvariant: a row holds another token, or one after other tokens.
        """
        for index in range(self.tiers.history_tokens(len(tokens))):
            page, row = divmod(index, self.tiers.page)
            if self.rows.get((pages[page], row)) != self._identity(tokens, index):
                raise BrokenInvariant(f"page {pages[page]}, row {row} does not hold token {self.tiers.sink + index}.")

    def _identity(self, tokens: list[int], index: int) -> int:
        # The last few tokens and the first ones tell the driver's sequences apart; whole prefixes would take too long.
        position = self.tiers.sink + index
        return hash((position, *tokens[: min(4, position)], *tokens[max(0, position - 12) : position + 1]))


class Driver:
    """An allocator, its shadow, and a stream of random operations.

    Attributes:
        counts: operations by name, and refusals.
    """

    def __init__(self, tiers: Tiers, *, seed: int, pages: int = 24, tails: int = 6, sequences: int = 6):
        self.allocator = Allocator(tiers, pages=pages, tails=tails, take_back=3)
        self.shadow = Shadow(tiers)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._limit = sequences
        self._ended: list[int] = []

    def step(self) -> None:
        """One operation, and every check."""
        live = self.allocator.sequences
        names, weights = ["begin", "grow", "reserve", "keep", "take_back", "end", "misuse"], [3, 12, 6, 3, 3, 2, 1]
        (name,) = self.random.choices(names, weights) if live else ["begin"]
        if name == "begin" and len(live) >= self._limit:
            name = "end"
        self.counts[name] += 1
        getattr(self, f"_{name}")(self.random.choice(live) if live else -1)
        check(self.allocator)

    def _begin(self, _: int) -> None:
        # Few different tokens and often the same beginnings, so that prefixes meet.
        family = self.random.randrange(3)
        tokens = [family] * self.random.randrange(1, 40)
        tokens += [self.random.randrange(2) for _ in range(self.random.randrange(8))]
        begun = self.allocator.begin(tokens)
        if begun.tail is not None:
            self._verify(self.shadow.tails[begun.tail] in (hash(tuple(tokens[: begun.length + n])) for n in (0, 1)))
        self._verify(self.allocator.tokens(begun.sequence) == tokens[: begun.length] and begun.length < len(tokens))
        self._read(begun.sequence)
        self._feed(begun.sequence, tokens[begun.length :])

    def _grow(self, sequence: int) -> None:
        self._feed(sequence, [self.random.randrange(2) for _ in range(self.random.choice((1, 1, 1, 2, 4, 11)))])

    def _feed(self, sequence: int, tokens: list[int]) -> None:
        stored = self.allocator.length(sequence)
        needed = self.allocator.needed(sequence, len(tokens))
        before = self._state() if needed > self.allocator.available else None
        try:
            copies = self.allocator.grow(sequence, tokens)
        except OutOfPages:
            self._verify(before == self._state())
            self.counts["out of pages"] += 1
            return
        self._verify(before is None)
        self.shadow.copy(copies)
        self.shadow.write(self.allocator.tokens(sequence), self.allocator.pages(sequence), stored)
        self._read(sequence)

    def _reserve(self, sequence: int) -> None:
        """Feeds a token ahead, which history shows nothing of: it is known later, or never."""
        before, tree = self._state(), list(self.allocator.tree.tails)
        tokens, pages = self.allocator.tokens(sequence), self.allocator.pages(sequence)
        if not self.allocator.reserve(sequence):
            self._verify(before == self._state())
            self.counts["not reserved"] += 1
            return
        held = self.allocator.pages(sequence)
        self._verify(held[: len(pages)] == pages and tree == list(self.allocator.tree.tails))
        self._verify(self.allocator.needed(sequence, 1) == 0)
        self.counts["page reserved"] += len(held) - len(pages)
        self.shadow.write([*tokens, 0], held, len(tokens))

    def _keep(self, sequence: int) -> None:
        slot = self.allocator.keep(sequence)
        if slot is not None:
            self.shadow.tails[slot] = hash(tuple(self.allocator.tokens(sequence)))

    def _take_back(self, sequence: int) -> None:
        try:
            self.allocator.take_back(sequence, self.random.randrange(4))
        except ValueError:
            self.counts["not taken back"] += 1

    def _end(self, sequence: int) -> None:
        self._read(sequence)
        self.allocator.end(sequence)
        self._ended.append(sequence)

    def _misuse(self, _: int) -> None:
        before, pool = self._state(), self.allocator.pool
        unknown = self._ended[-1] if self._ended else -1
        calls = [
            lambda: self.allocator.end(unknown),
            lambda: self.allocator.grow(unknown, [1]),
            lambda: self.allocator.reserve(unknown),
            lambda: self.allocator.keep(unknown),
            lambda: self.allocator.begin([]),
            lambda: pool.release(pool.size),
            lambda: pool.use(-1),
            *([lambda: pool.release(pool.free[0]), lambda: pool.drop(pool.free[0])] if pool.free else []),
        ]
        try:
            self.random.choice(calls)()
        except ValueError:
            self._verify(before == self._state())
        else:
            self._verify(False)

    def _state(self) -> object:
        allocator = self.allocator
        sequences = [(s, allocator.tokens(s), allocator.pages(s)) for s in allocator.sequences]
        pool, tree = allocator.pool, allocator.tree
        return sequences, list(pool.free), list(pool.uses), list(pool.keeps), list(tree.tails), list(tree.free_slots)

    def _read(self, sequence: int) -> None:
        self.shadow.read(self.allocator.tokens(sequence), self.allocator.pages(sequence))

    @staticmethod
    def _verify(holds: bool) -> None:
        if not holds:
            raise BrokenInvariant("an operation did not do what it says.")


def drive(operations: int, *, seed: int = 0) -> dict[str, object]:
    """Runs operations over a few tier sizes, then ends everything.

    Returns:
        Counts of operations and of the allocators' statistics, and `leaked_pages`.

    Raises:
        BrokenInvariant: at the first operation after which something is wrong.
    """
    from pallas_kernels.tiers import Tiers

    sizes = [Tiers(2, 4, 2, 4), Tiers(0, 1, 1, 1), Tiers(3, 5, 4, 4), Tiers(1, 6, 2, 8)]
    counts: Counter[str] = Counter()
    stats: Counter[str] = Counter()
    leaked, begun = 0, time.perf_counter()
    for index, tiers in enumerate(sizes):
        driver = Driver(tiers, seed=seed + index, pages=60 if tiers.page == 1 else 24)
        for _ in range(operations // len(sizes) + (index < operations % len(sizes))):
            driver.step()
        allocator = driver.allocator
        for sequence in allocator.sequences:
            allocator.end(sequence)
        allocator.forget()
        check(allocator)
        leaked += allocator.pool.size - len(allocator.pool.free)
        counts += driver.counts
        stats.update({k: v for k, v in dataclasses.asdict(allocator.stats()).items() if k in _REPORTED})
    return {
        "operations": operations,
        "seed": seed,
        "counts": dict(sorted(counts.items())),
        "stats": {name: stats[name] for name in _REPORTED},
        "leaked_pages": leaked,
        "seconds": round(time.perf_counter() - begun, 1),
    }


_REPORTED = ("tokens_asked", "tokens_hit", "hits", "evictions", "copies")


def main() -> int:
    """The command; prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m oscar_jax.engine.drive", description="Checked random operations.")
    parser.add_argument("--operations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(drive(args.operations, seed=args.seed), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
