"""Which rows of the batch do what in the next step: continuous batching over an `Allocator`. Plain Python.

Every step feeds all sequences that decode (one token each, or one and drafted ones) and a chunk of a few prompts.
Prompts never hold up decoding by more than a chunk. Requests are taken in the order of `arrival * chunk + tokens`,
arrival counted in steps: a short one overtakes long ones that came shortly before, but no request is overtaken by
those that come after it has waited as many steps as it has chunks. When pages run out, the request that would have
been taken last gives up its row; it keeps its place in the order and goes on later with the token it was at.

The device need not wait for the host: where every sequence that runs goes on with the token that is being drawn, or
ends for its length, the decode call of the next step is started before the tokens of this one are read. All else is
done when and as it would be without: a sequence that turns out to have ended (or is cancelled, or preempted) before is
kept and released as if it had not been fed again, and what was drawn for it is dropped.

The device may have several parts, each with rows, pages and tails of its own and an `Allocator` for them. They take
from one queue, and a call feeds rows of all parts. A request stays with a part while it has a row.
"""

from __future__ import annotations

import dataclasses
import heapq
import numbers
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from oscar_jax.engine.allocator import Allocator
from oscar_jax.engine.drafts import Drafter
from oscar_jax.engine.pool import OutOfPages
from oscar_jax.engine.request import Output, Progress, Request

LAST = -1
"""Among the tokens of a call: the one that the device drew last for that row, which the host does not know yet."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of all device calls, each one a compiled program; rows are those of each part of the device.

    Attributes:
        rows: sequences on the device at once.
        decode_batches: rows of a decode call, ascending; the last one is `rows`.
        prefill_batches: rows of a call with chunks of prompts, ascending.
        chunks: tokens of such a call, ascending.
        drafts: most drafted tokens a sequence and step.

    Raises:
        ValueError: a size out of range or order.
    """

    rows: int
    decode_batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    chunks: tuple[int, ...]
    drafts: int = 0

    def __post_init__(self):
        for name in ("decode_batches", "prefill_batches", "chunks"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{name}={sizes}: expected ascending sizes of at least 1.")
        if self.decode_batches[-1] != self.rows or self.prefill_batches[-1] > self.rows:
            raise ValueError(
                f"decode_batches={self.decode_batches}, prefill_batches={self.prefill_batches}: expected the first "
                f"to end with rows={self.rows}, and none larger."
            )
        if self.drafts < 0:
            raise ValueError(f"drafts={self.drafts}: expected at least 0.")

    @classmethod
    def of(cls, rows: int, *, prefill_rows: int | None = None, chunks: Sequence[int] = (32, 256), drafts: int = 0):
        """Batches in powers of four up to `rows`, and up to `prefill_rows` (default 4) for chunks of prompts."""
        powers = [4**n for n in range(16)]
        most = min(rows, 4 if prefill_rows is None else prefill_rows)
        batches = [(*(size for size in powers if size < last), last) for last in (rows, most)]
        return cls(rows, batches[0], batches[1], tuple(sorted(set(chunks))), drafts)

    @property
    def take_back(self) -> int:
        """Most stored tokens of a sequence that turn out to be wrong: drafted ones, or one that was fed ahead."""
        return max(1, self.drafts)

    def calls(self) -> list[tuple[int, int, bool]]:
        """Rows, tokens, and whether every position's choice is asked for, of every call there can be."""
        widths = sorted({1, 1 + self.drafts})
        decode = [(batch, width, width > 1) for batch in self.decode_batches for width in widths]
        return decode + [(batch, chunk, False) for batch in self.prefill_batches for chunk in self.chunks]


class RowCall(NamedTuple):
    """One row's part of a device call.

    Attributes:
        row: of the device's batch, `part * shapes.rows` and the part's own row.
        start: tokens stored before.
        tokens: to be stored; the only one may be `LAST`.
        pages: page ids of the sequence's history in its part's pool, those of the new tokens included.
        draws: after how many of the last tokens a next one is to be chosen.
        index: how many tokens have been generated before the first of those.
        sampling: of the request.
    """

    row: int
    start: int
    tokens: list[int]
    pages: list[int]
    draws: int
    index: int
    sampling: object


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """Rows fed together, padded to `batch` a part and `width` tokens; `every` asks for all positions' choices."""

    rows: list[RowCall]
    batch: int
    width: int
    every: bool


class Executor(Protocol):
    """The device. Calls take effect in their order; slots and pages are those of the row's part."""

    def restore(self, row: int, slot: int) -> None:
        """Copies a tail's plain tokens to a row."""
        ...

    def keep(self, row: int, slot: int) -> None:
        """Copies a row's plain tokens to a tail."""
        ...

    def copy_page(self, row: int, source: int, target: int) -> None:
        """Copies a page of history in all layers, of the part that the row is in."""
        ...

    def start(self, call: DeviceCall) -> Callable[[], list[list[int]]]:
        """Feeds tokens, without waiting, and returns what waits for the `draws` chosen next tokens of each row."""
        ...


class _Started(NamedTuple):
    """A call that the device is at: what waits for its tokens, and whose they are."""

    tokens: Callable[[], list[list[int]]]
    parts: list[Progress]


@dataclasses.dataclass
class Counts:
    """Since the start: requests by fate, preemptions, steps, and drafted tokens."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    steps: int = 0
    drafted: int = 0
    drafts_accepted: int = 0


class Scheduler:
    """Requests waiting and running.

    Attributes:
        counts: see `Counts`.
    """

    def __init__(
        self,
        allocators: Sequence[Allocator],
        executor: Executor,
        shapes: Shapes,
        *,
        max_length: int,
        tail_every: int = 4096,
        drafter: Callable[[], Drafter] | None = None,
        ahead: bool = True,
    ):
        """
        Args:
            allocators: one for each part of the device, empty and alike, with a page more than a sequence of
                `max_length` needs.
            executor: the device.
            shapes: of its calls.
            max_length: longest sequence in tokens.
            tail_every: a prefix is kept whenever a sequence has reached a multiple of so many tokens, beside the ends
                of prompts and requests.
            drafter: makes a guesser for each request; None feeds one token a step.
            ahead: without a drafter, start the next decode call before the tokens of this one are read.

        Raises:
            ValueError: too few pages, `tail_every` below 1, or a drafter without drafted tokens in `shapes`.
        """
        needed, pages = allocators[0].tiers.history_pages(max_length), allocators[0].pool.size
        if needed and pages < needed + 1:
            raise ValueError(f"pages={pages}: a sequence of max_length={max_length} needs {needed}, and one to copy.")
        if not isinstance(tail_every, numbers.Integral) or tail_every < 1:
            raise ValueError(f"tail_every={tail_every!r}: expected a whole number, at least 1.")
        if drafter is not None and not shapes.drafts:
            raise ValueError("drafter with drafts=0: expected room for drafted tokens in the shapes.")
        self.counts = Counts()
        self._allocators, self._executor, self._shapes = list(allocators), executor, shapes
        self._max_length, self._tail_every, self._drafter = max_length, tail_every, drafter
        self._waiting: list[tuple[tuple[int, int], Progress]] = []
        self._running: dict[int, Progress] = {}
        self._free_rows = [
            list(range(part * shapes.rows, (part + 1) * shapes.rows)) for part in range(len(self._allocators))
        ]
        self._cancelled: list[Output] = []
        self._may_start_ahead = ahead and drafter is None
        self._ahead: _Started | None = None  # the next step's decode call
        self._stepping = False

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do or to report."""
        return not (self._waiting or self._running or self._cancelled)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Adds a request and returns its id.

        Raises:
            ValueError: it could outgrow `max_length`.
        """
        total = len(request.prompt) + request.max_tokens
        if total > self._max_length:
            raise ValueError(
                f"prompt of {len(request.prompt)} tokens and max_tokens={request.max_tokens}: expected at most "
                f"max_length={self._max_length} together."
            )
        drafter = None if self._drafter is None else self._drafter()
        number = self.counts.submitted
        self.counts.submitted += 1
        order = self.counts.steps * self._shapes.chunks[-1] + len(request.prompt)
        progress = Progress(number, request, (order, number), list(request.prompt), drafter)
        heapq.heappush(self._waiting, (progress.priority, progress))
        return number

    def cancel(self, request: int) -> bool:
        """Ends a request now; False if it has ended already. The next `step` reports it."""
        for place, (_, progress) in enumerate(self._waiting):
            if progress.id == request:
                del self._waiting[place]
                heapq.heapify(self._waiting)
                break
        else:
            if request not in self._running:
                return False
            self._leave(self._running[request])
        self.counts.cancelled += 1
        self._cancelled.append(Output(request, [], "cancelled"))
        return True

    def step(self) -> list[Output]:
        """Takes waiting requests in, feeds every decoding sequence and some prompts, and returns what came out.

        Raises:
            RuntimeError: an earlier step was interrupted, after which nobody knows what the device holds.
        """
        if self._stepping:
            raise RuntimeError(
                "an earlier step has not ended (an error, an interrupt, or a call from within it): expected a new "
                "engine, and what had not ended submitted again with the tokens it has."
            )
        self._stepping = True
        outputs, self._cancelled = self._cancelled, []
        self._admit()
        started = self._start()
        self._ahead = self._start_ahead()
        drawn = [pair for tokens, parts in started for pair in zip(parts, tokens(), strict=True)]
        for progress, tokens in sorted(drawn, key=lambda pair: pair[0].priority):
            if progress.id in self._running:  # else fed ahead, and gone since
                outputs += self._store(progress, tokens)
        self.counts.steps += 1
        self._stepping = False
        return outputs

    def _admit(self) -> None:
        while self._waiting:
            progress = self._waiting[0][1]
            part = self._part_for(progress)
            if part is None:
                return
            heapq.heappop(self._waiting)
            begun = self._allocators[part].begin(progress.tokens)
            progress.row, progress.part = heapq.heappop(self._free_rows[part]), part
            progress.sequence, progress.kept = begun.sequence, 0
            self._running[progress.id] = progress
            if begun.tail is not None:
                progress.kept = begun.length
                self._executor.restore(progress.row, begun.tail)

    def _part_for(self, progress: Progress) -> int | None:
        """Of the parts with a row and pages for a request, the one where it needs fewest pages, then the emptiest."""
        fitting = []
        for part, allocator in enumerate(self._allocators):
            missing = allocator.missing(progress.tokens)
            if self._free_rows[part] and missing + self._promised(part) <= allocator.available:
                fitting.append((missing, -len(self._free_rows[part]), part))
        return min(fitting)[-1] if fitting else None

    def _promised(self, part: int) -> int:
        """Pages that a part's requests need for the tokens they have, at least one each: they would soon preempt.

        A page that is reserved for one is no longer available, so it counts as given.
        """
        if not self._allocators[part].pool.size:  # a plain cache
            return 0
        allocator = self._allocators[part]
        return sum(
            max(
                1 - allocator.reserved(other.sequence),
                allocator.needed(other.sequence, len(other.tokens) - allocator.length(other.sequence)),
            )
            for other in self._running.values()
            if other.part == part
        )

    def _start(self) -> list[_Started]:
        """Starts the calls of this step, if they were not started ahead."""
        ahead = [] if self._ahead is None else [self._ahead]
        fed = {progress.id for call in ahead for progress in call.parts} & self._running.keys()
        calls = [_Started(self._executor.start(call), parts) for call, parts in self._plan(fed)]
        return (ahead if fed else []) + calls

    def _start_ahead(self) -> _Started | None:
        """Starts the decode call of the next step, if nothing has to happen before that the host cannot know yet."""
        if not self._may_start_ahead:
            return None
        rows = []
        for progress in sorted(self._running.values(), key=lambda progress: progress.priority):
            allocator = self._allocators[progress.part]
            stored = allocator.length(progress.sequence)
            if stored < len(progress.tokens) or self._at_boundary(progress):  # a prompt, or something to keep
                return None
            generated = len(progress.tokens) + 1 - len(progress.request.prompt)
            if generated >= progress.request.max_tokens:
                continue
            if not allocator.reserve(progress.sequence):
                return None
            row = self._row_call(progress, stored, [LAST])._replace(draws=1, index=generated)
            rows.append((progress, row))
        if not rows:
            return None
        call, parts = self._call(rows, self._shapes.decode_batches, 1, every=False)
        return _Started(self._executor.start(call), parts)

    def _plan(self, fed: Collection[int]) -> list[tuple[DeviceCall, list[Progress]]]:
        """The calls of this step; their tokens have pages already, and those of requests `fed` are left out."""
        decode: list[tuple[Progress, RowCall]] = []
        prefill: list[tuple[Progress, RowCall]] = []
        prefills = [0] * len(self._allocators)
        for progress in sorted(self._running.values(), key=lambda progress: progress.priority):
            if progress.id not in self._running:  # preempted by one before it
                continue
            part = progress.part
            stored = self._allocators[part].length(progress.sequence)
            decodes = len(progress.tokens) - stored == 1
            if not decodes and prefills[part] == self._shapes.prefill_batches[-1]:
                continue
            tokens = self._next_tokens(progress, stored, decodes)
            if not self._grow(progress, tokens) or progress.id in fed:
                continue
            (decode if decodes else prefill).append((progress, self._row_call(progress, stored, tokens)))
            prefills[part] += not decodes
        calls = []
        if decode:
            drafted = any(len(row.tokens) > 1 for _, row in decode)
            width = 1 + self._shapes.drafts if drafted else 1
            calls.append(self._call(decode, self._shapes.decode_batches, width, every=drafted))
        if prefill:
            most = max(len(row.tokens) for _, row in prefill)
            width = _fitting(self._shapes.chunks, most)
            calls.append(self._call(prefill, self._shapes.prefill_batches, width, every=False))
        return calls

    def _next_tokens(self, progress: Progress, stored: int, decodes: bool) -> list[int]:
        if not decodes:
            to_tail = self._tail_every - stored % self._tail_every
            return progress.tokens[stored : stored + min(self._shapes.chunks[-1], to_tail)]
        generated = len(progress.tokens) - len(progress.request.prompt)
        most = min(self._shapes.drafts, progress.request.max_tokens - generated - 1)
        if progress.drafter is None or not generated or most < 1:
            return progress.tokens[stored:]
        drafts = [int(token) for token in progress.drafter.propose(progress.tokens, most)[:most]]
        self.counts.drafted += len(drafts)
        return progress.tokens[stored:] + drafts

    def _grow(self, progress: Progress, tokens: list[int]) -> bool:
        """Preempts until more tokens have their pages; False if the request itself had to go."""
        allocator = self._allocators[progress.part]
        while True:
            assert progress.row is not None  # it still runs
            try:
                copies = allocator.grow(progress.sequence, tokens)
            except OutOfPages:
                running = (other for other in self._running.values() if other.part == progress.part)
                victim = max(running, key=lambda other: other.priority)
                self._preempt(victim)
                if victim is progress:
                    return False
                continue
            for source, target in copies:
                self._executor.copy_page(progress.row, source, target)
            return True

    def _preempt(self, progress: Progress) -> None:
        self._keep(progress)
        self._leave(progress)
        heapq.heappush(self._waiting, (progress.priority, progress))
        self.counts.preemptions += 1

    def _leave(self, progress: Progress) -> None:
        assert progress.row is not None
        self._allocators[progress.part].end(progress.sequence)
        heapq.heappush(self._free_rows[progress.part], progress.row)
        progress.row, progress.part, progress.sequence = None, -1, -1
        del self._running[progress.id]

    def _keep(self, progress: Progress) -> None:
        assert progress.row is not None
        allocator = self._allocators[progress.part]
        progress.kept = allocator.length(progress.sequence)
        slot = allocator.keep(progress.sequence)
        if slot is not None:
            self._executor.keep(progress.row, slot)

    def _row_call(self, progress: Progress, stored: int, tokens: list[int]) -> RowCall:
        assert progress.row is not None
        prompt, left = len(progress.request.prompt), len(progress.tokens) - stored
        return RowCall(
            row=progress.row,
            start=stored,
            tokens=tokens,
            pages=self._allocators[progress.part].pages(progress.sequence),
            draws=max(0, len(tokens) - left + 1),
            index=len(progress.tokens) - prompt,
            sampling=progress.request.sampling,
        )

    def _call(
        self, parts: list[tuple[Progress, RowCall]], batches: Sequence[int], width: int, *, every: bool
    ) -> tuple[DeviceCall, list[Progress]]:
        most = max(Counter(progress.part for progress, _ in parts).values())
        call = DeviceCall([row for _, row in parts], _fitting(batches, most), width, every)
        return call, [progress for progress, _ in parts]

    def _store(self, progress: Progress, drawn: list[int]) -> list[Output]:
        """Takes the right ones of the drawn tokens, takes the wrong drafts back, and keeps what is to be kept."""
        allocator, sequence, length = self._allocators[progress.part], progress.sequence, len(progress.tokens)
        new: list[int] = []
        finish = None
        if drawn:
            fed = allocator.tokens(sequence, length)  # drafted tokens
            for place, token in enumerate(drawn):
                new.append(token)
                progress.tokens.append(token)
                finish = progress.request.finish(progress.tokens, len(progress.request.prompt))
                if finish or fed[place : place + 1] != [token]:
                    break
            if fed:
                allocator.take_back(sequence, len(fed) - (len(new) - 1))
                self.counts.drafts_accepted += len(new) - 1
        if finish or self._at_boundary(progress):
            self._keep(progress)
        if finish:
            self._leave(progress)
            self.counts.finished += 1
        return [Output(progress.id, new, finish)] if new else []

    def _at_boundary(self, progress: Progress) -> bool:
        """Whether the tokens stored are to be kept, wherever the request goes on."""
        stored = self._allocators[progress.part].length(progress.sequence)
        prompt_ends = stored == len(progress.request.prompt)
        return prompt_ends or stored // self._tail_every > progress.kept // self._tail_every


def _fitting(sizes: Sequence[int], least: int) -> int:
    return next(size for size in sizes if size >= least)
