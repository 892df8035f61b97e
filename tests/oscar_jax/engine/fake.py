"""A device without a model: rows, pages and tails that hold tokens, read back as the real kernels would.

The next token is a hash of everything a query sees, so whatever is wrong in memory changes the output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from oscar_jax.engine.allocator import Allocator
from oscar_jax.engine.invariants import check
from oscar_jax.engine.request import Output, Request
from oscar_jax.engine.scheduler import LAST, DeviceCall, RowCall, Scheduler, Shapes
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=2, recent=4, group=2, page=4)
VOCABULARY = 5
SHAPES = Shapes.of(4, prefill_rows=2, chunks=(4, 9), drafts=2)


def choice(tokens: list[int], index: int, sampling: object) -> int:
    """The model: the token after these. Short memory repeats itself, so that drafted tokens are often right."""
    seed = hash((tuple(tokens[-2:]), len(tokens) // 16, sum(tokens) % 2 if sampling else 0, index if sampling else 0))
    return random.Random(seed).randrange(VOCABULARY)


def alone(request: Request) -> list[int]:
    """What a request gives."""
    tokens = list(request.prompt)
    while True:
        generated = len(tokens) - len(request.prompt)
        tokens.append(choice(tokens, generated, request.sampling))
        if request.finish(tokens[len(request.prompt) :]):
            return tokens[len(request.prompt) :]


class FakeExecutor:
    """Memory of the device in `parts`, as `Executor` describes it.

    Attributes:
        calls: shapes of the calls so far.
        events: "start" and "read" with the number of the call, in their order.
    """

    def __init__(self, shapes: Shapes, tiers: Tiers = TIERS, *, parts: int = 1):
        self.shapes, self.tiers = shapes, tiers
        self.ring = tiers.ring(shapes.take_back + 2)
        self.rows: list[dict[int, int]] = [{} for _ in range(shapes.rows * parts)]
        self.pages: dict[tuple[int, int, int], int] = {}
        self.tails: dict[tuple[int, int], dict[int, int]] = {}
        self.last: list[int | None] = [None] * (shapes.rows * parts)
        self.calls: list[tuple[int, int]] = []
        self.events: list[tuple[str, int]] = []

    def restore(self, row: int, slot: int) -> None:
        self.rows[row] = dict(self.tails[self._part(row), slot])

    def keep(self, row: int, slot: int) -> None:
        self.tails[self._part(row), slot] = dict(self.rows[row])

    def copy_page(self, row: int, source: int, target: int) -> None:
        part = self._part(row)
        for offset in range(self.tiers.page):
            self.pages[part, target, offset] = self.pages.get((part, source, offset), -1)

    def _part(self, row: int) -> int:
        return row // self.shapes.rows

    def start(self, call: DeviceCall) -> Callable[[], list[list[int]]]:
        assert (call.batch, call.width, call.every) in self.shapes.calls()
        assert max(Counter(self._part(row.row) for row in call.rows).values()) <= call.batch
        assert len({row.row for row in call.rows}) == len(call.rows)
        number = len(self.calls)
        self.calls.append((call.batch, call.width))
        self.events.append(("start", number))
        chosen = [self._feed(row, call) for row in call.rows]

        def drawn() -> list[list[int]]:
            self.events.append(("read", number))
            return chosen

        return drawn

    def _feed(self, row: RowCall, call: DeviceCall) -> list[int]:
        assert 1 <= len(row.tokens) <= call.width
        assert row.draws <= (len(row.tokens) if call.every else 1)
        chosen = []
        for place, token in enumerate(row.tokens):
            position = row.start + place
            if token == LAST:
                known = self.last[row.row]
                assert known is not None  # drawn in a call before
                assert call.width == 1
                token = known
            for j in range(self.tiers.history_end(position - 1), self.tiers.history_end(position)):
                page, offset = divmod(j - self.tiers.sink, self.tiers.page)
                self.pages[self._part(row.row), row.pages[page], offset] = self._plain(row.row, j)
            key = position if position < self.tiers.sink else self.tiers.sink + position % self.ring
            self.rows[row.row][key] = token
            if place >= len(row.tokens) - row.draws:
                index = row.index + place - (len(row.tokens) - row.draws)
                chosen.append(choice(self._seen(row, position), index, row.sampling))
        self.last[row.row] = chosen[-1] if chosen and not call.every else None
        return chosen

    def _plain(self, row: int, position: int) -> int:
        key = position if position < self.tiers.sink else self.tiers.sink + position % self.ring
        return self.rows[row].get(key, -1)

    def _seen(self, row: RowCall, position: int) -> list[int]:
        sink, end = self.tiers.sink, self.tiers.history_end(position)
        history = range(sink, min(end, position + 1))
        places = [divmod(j - sink, self.tiers.page) for j in history]
        return [
            *(self._plain(row.row, j) for j in range(min(sink, position + 1))),
            *(self.pages[self._part(row.row), row.pages[page], offset] for page, offset in places),
            *(self._plain(row.row, j) for j in range(max(sink, end), position + 1)),
        ]


class Bench:
    """A scheduler over the fake device, with the allocators' invariants checked after every step.

    Attributes:
        outputs: every `Output` so far.
    """

    def __init__(self, *, pages=24, tails=6, shapes=SHAPES, max_length=64, parts=1, **options):
        self.allocators = [Allocator(TIERS, pages=pages, tails=tails, take_back=shapes.take_back) for _ in range(parts)]
        self.executor = FakeExecutor(shapes, parts=parts)
        self.scheduler = Scheduler(self.allocators, self.executor, shapes, max_length=max_length, **options)
        self.outputs: list[Output] = []

    def step(self) -> list[Output]:
        outputs = self.scheduler.step()
        for allocator in self.allocators:
            check(allocator)
        self.outputs += outputs
        return outputs

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left."""
        while not self.scheduler.idle:
            self.step()
            steps -= 1
            assert steps, "still not done"

    def tokens(self, request: int) -> list[int]:
        return [token for output in self.outputs if output.request == request for token in output.tokens]

    def finish(self, request: int) -> str | None:
        (finish,) = [output.finish for output in self.outputs if output.request == request and output.finish]
        return finish
