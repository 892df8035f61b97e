"""Sharing, copying before writes, eviction, refusals; the driver and a state machine for everything else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oscar_jax.engine.allocator import Allocator
from oscar_jax.engine.drive import Driver, drive
from oscar_jax.engine.invariants import BrokenInvariant, check
from oscar_jax.engine.pool import OutOfPages
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=2, recent=4, group=2, page=4)
PROMPT = list(range(100, 125))


def fed(allocator: Allocator, tokens: list[int]):
    """A sequence with all of these tokens, and what `begin` and `grow` said."""
    begun = allocator.begin(tokens)
    copies = allocator.grow(begun.sequence, tokens[begun.length :])
    return begun, copies


def new(pages=24, tails=4, **options) -> Allocator:
    return Allocator(TIERS, pages=pages, tails=tails, **options)


def test_host_side_modules_import_no_jax():
    names = ("allocator", "invariants", "drive", "scheduler", "drafts")
    program = "; ".join(f"import oscar_jax.engine.{name}" for name in names)
    program += "; import sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_pages_follow_the_history_and_nothing_else():
    allocator = new()
    sequence = allocator.begin(PROMPT).sequence
    for length in range(1, 26):
        allocator.grow(sequence, [length])
        assert len(allocator.pages(sequence)) == TIERS.history_pages(length)
        check(allocator)
    allocator.end(sequence)
    assert len(allocator.pool.free) == 24


def test_a_hit_ends_only_at_a_kept_boundary():
    allocator = new()
    first, _ = fed(allocator, PROMPT)
    assert fed(allocator, PROMPT)[0].tail is None
    slot = allocator.keep(first.sequence)
    allocator.grow(first.sequence, [1, 2, 3])
    begun, _ = fed(allocator, [*PROMPT, 1, 2, 3, 4])
    assert (begun.length, begun.tail) == (25, slot)
    assert allocator.begin(PROMPT[:24]).length == 0
    assert allocator.begin([*PROMPT[:24], 0, 0, 0]).length == 0
    full = TIERS.history_tokens(25) // TIERS.page
    assert allocator.pages(begun.sequence)[:full] == allocator.pages(first.sequence)[:full]


def test_the_same_prompt_hits_and_feeds_its_last_token_again():
    allocator = new()
    first, _ = fed(allocator, PROMPT)
    slot = allocator.keep(first.sequence)
    begun = allocator.begin(PROMPT)
    assert (begun.length, begun.tail) == (24, slot)
    assert allocator.pages(begun.sequence) == allocator.pages(first.sequence)[: TIERS.history_pages(24)]


def test_the_longest_kept_boundary_is_hit():
    allocator = new()
    sequence = allocator.begin(PROMPT).sequence
    slots = {}
    for length in range(1, 21):
        allocator.grow(sequence, PROMPT[length - 1 : length])
        if length in (3, 12, 20):
            slots[length] = allocator.keep(sequence)
    for asked, length, boundary in ((25, 20, 20), (21, 20, 20), (20, 19, 20), (19, 12, 12), (5, 3, 3)):
        begun = allocator.begin(PROMPT[:asked])
        assert (begun.length, begun.tail) == (length, slots[boundary])


def test_generated_tokens_are_shared_like_prompt_tokens():
    allocator = new()
    first, _ = fed(allocator, PROMPT[:5])
    for token in PROMPT[5:]:
        allocator.grow(first.sequence, [token])
    allocator.keep(first.sequence)
    allocator.end(first.sequence)
    assert allocator.begin([*PROMPT, 7]).length == 25


def test_fault_c1_a_page_still_read_is_not_given_away():
    """Two requests share a prefix, the first one ends, a third one takes every page that is left."""
    allocator = new(pages=8)
    first, _ = fed(allocator, PROMPT)
    allocator.keep(first.sequence)
    second, _ = fed(allocator, [*PROMPT, 1])
    allocator.end(first.sequence)
    shared = allocator.pages(second.sequence)
    third = allocator.begin([0]).sequence
    with pytest.raises(OutOfPages):
        allocator.grow(third, [0] * 60)
    while allocator.available:
        allocator.grow(third, [0])
    assert not set(shared) & set(allocator.pages(third))
    assert allocator.pages(second.sequence) == shared
    check(allocator)


def test_a_shared_page_is_copied_before_it_is_written():
    allocator = new()
    first, _ = fed(allocator, PROMPT[:10])  # four rows of page 0 and none of page 1
    allocator.grow(first.sequence, PROMPT[10:12])  # two rows of page 1
    allocator.keep(first.sequence)
    part = allocator.pages(first.sequence)[-1]
    begun, copies = fed(allocator, [*PROMPT[:12], 1, 2])
    assert copies == [(part, allocator.pages(begun.sequence)[1])]
    assert allocator.grow(first.sequence, [3, 4]) == [(part, allocator.pages(first.sequence)[1])]
    assert allocator.stats().copies == 2
    check(allocator)


def test_eviction_takes_the_least_recently_used_prefix_and_spares_what_is_in_use():
    allocator = new(pages=12, tails=4)
    prompts = [[n] * 16 for n in range(3)]  # three pages each
    for prompt in prompts:
        begun, _ = fed(allocator, prompt)
        allocator.keep(begun.sequence)
        allocator.end(begun.sequence)
    assert (len(allocator.pool.free), allocator.pool.idle) == (3, 9)
    user = allocator.begin([*prompts[0], 5])  # now the most recently used one, and in use
    fed(allocator, [9] * 24)  # five pages: the oldest prefix goes
    assert user.length == 16
    hits = [allocator.begin([*prompt, 5]).length for prompt in prompts]
    assert hits == [16, 0, 16]
    check(allocator)


def test_more_boundaries_than_tails_evict_the_oldest():
    allocator = new(tails=2)
    sequence = allocator.begin(PROMPT).sequence
    slots = []
    for length in range(1, 4):
        allocator.grow(sequence, PROMPT[length - 1 : length])
        slots.append(allocator.keep(sequence))
    assert slots[2] == slots[0] != slots[1]
    assert allocator.keep(sequence) is None
    assert [allocator.begin([*PROMPT[:kept], 9]).length for kept in (1, 2, 3)] == [0, 2, 3]
    without = new(tails=0)
    assert without.keep(fed(without, PROMPT)[0].sequence) is None


def test_a_reserved_page_is_used_by_the_next_token_or_given_back():
    allocator = new(pages=6)
    first, _ = fed(allocator, PROMPT[:13])  # a page and two rows of the next: the 16th needs another
    assert allocator.reserve(first.sequence)
    assert (allocator.reserved(first.sequence), len(allocator.pool.free)) == (0, 4)
    allocator.grow(first.sequence, PROMPT[13:15])
    for _ in range(2):
        assert allocator.reserve(first.sequence)
        check(allocator)
        assert (allocator.reserved(first.sequence), len(allocator.pool.free)) == (1, 3)
    pages = allocator.pages(first.sequence)
    assert allocator.needed(first.sequence, 1) == 0
    assert allocator.grow(first.sequence, PROMPT[15:16]) == []
    assert (allocator.pages(first.sequence), allocator.reserved(first.sequence)) == (pages, 0)
    allocator.grow(first.sequence, PROMPT[16:19])
    assert allocator.reserve(first.sequence)
    slot = allocator.keep(first.sequence)
    allocator.end(first.sequence)
    check(allocator)
    assert (len(allocator.pool.free), allocator.pool.idle) == (3, 3)  # the reserved one is not kept
    assert allocator.begin([*PROMPT[:19], 7])[1:] == (19, slot)


def test_nothing_is_reserved_by_evicting_or_copying():
    allocator = new(pages=6)
    begun, _ = fed(allocator, PROMPT[:16])
    allocator.keep(begun.sequence)
    allocator.end(begun.sequence)
    other, _ = fed(allocator, [9] * 15)
    third, _ = fed(allocator, [8] * 8)
    assert (len(allocator.pool.free), allocator.pool.idle) == (0, 3)
    assert not allocator.reserve(other.sequence)
    assert allocator.stats().evictions == 0
    assert allocator.reserve(third.sequence)  # needs none
    allocator.grow(third.sequence, [8])
    allocator.keep(third.sequence)
    assert not allocator.reserve(third.sequence)  # its page is a prefix's too
    assert allocator.stats().copies == 0


def test_equal_hashes_of_different_tokens_are_not_a_hit():
    allocator = new(chain=lambda block: 1)
    first, _ = fed(allocator, [1] * 12)
    assert allocator.keep(first.sequence) is not None
    other, _ = fed(allocator, [2] * 12)
    assert allocator.keep(other.sequence) is None
    assert allocator.begin([2] * 13).length == 0
    assert allocator.begin([1] * 13).length == 12
    check(allocator)


def test_refusals_change_nothing_and_say_why():
    allocator = new(pages=3, take_back=3)
    begun, _ = fed(allocator, PROMPT[:10])
    odd: list[Any] = [1, 2.5]
    before = (allocator.tokens(begun.sequence), allocator.pages(begun.sequence), allocator.available)
    for call, error, message in (
        (lambda: allocator.grow(begun.sequence, [1] * 40), OutOfPages, r"40 more tokens need 10 pages, .* the 2 avail"),
        (lambda: allocator.take_back(begun.sequence, 4), ValueError, r"count=4: expected 0 to 3"),
        (lambda: allocator.take_back(begun.sequence, -1), ValueError, r"count=-1: expected 0 to 3"),
        (lambda: allocator.reserve(77), ValueError, r"sequence 77: expected one that has begun"),
        (lambda: allocator.end(77), ValueError, r"sequence 77: expected one that has begun"),
        (lambda: allocator.begin([]), ValueError, r"tokens is empty"),
        (lambda: allocator.begin(odd), ValueError, r"tokens=\[1, 2.5\]: expected token ids, whole numbers"),
        (lambda: allocator.grow(begun.sequence, odd), ValueError, r"tokens=\[1, 2.5\]: expected token ids"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert before == (allocator.tokens(begun.sequence), allocator.pages(begun.sequence), allocator.available)
    allocator.keep(begun.sequence)
    with pytest.raises(ValueError, match=r"count=1: expected 0 to 0"):
        allocator.take_back(begun.sequence, 1)
    allocator.end(begun.sequence)
    with pytest.raises(ValueError, match=rf"sequence {begun.sequence}: expected"):
        allocator.end(begun.sequence)
    for name in ("pages", "tails", "take_back"):
        with pytest.raises(ValueError, match=rf"{name}=-1: expected a whole number, at least 0"):
            new(**{name: -1})


def test_the_checker_sees_each_kind_of_damage():
    def damaged(change):
        allocator = new()
        begun, _ = fed(allocator, PROMPT)
        allocator.keep(begun.sequence)
        fed(allocator, [*PROMPT, 1])
        check(allocator)
        change(allocator, allocator._sequences[begun.sequence])
        with pytest.raises(BrokenInvariant):
            check(allocator)

    damaged(lambda a, s: s.pages.pop())
    damaged(lambda a, s: s.pages.__setitem__(0, s.pages[1]))
    damaged(lambda a, s: a.pool.free.append(s.pages[0]))
    damaged(lambda a, s: a.pool.free.append(a.pool.free[0]))
    damaged(lambda a, s: a.pool.uses.__setitem__(s.pages[0], 1))
    damaged(lambda a, s: setattr(a.pool, "idle", 1))
    damaged(lambda a, s: a.tree.nodes.popitem())
    damaged(lambda a, s: a.tree.tails.popitem())
    damaged(lambda a, s: a.tree.free_slots.pop())
    damaged(lambda a, s: s.tokens.extend([1] * 9))


def test_fifty_thousand_random_operations_keep_every_invariant():
    result = drive(50_000, seed=1)
    assert result["leaked_pages"] == 0
    assert all(result["stats"].values())  # type: ignore[attr-defined]


def test_the_driver_notices_a_page_given_away_too_early(monkeypatch):
    monkeypatch.setattr(Allocator, "grow", _grow_without_copies(Allocator.grow))
    with pytest.raises(BrokenInvariant, match=r"does not hold token"):
        drive(20_000)


def _grow_without_copies(grow):
    def wrong(self, sequence, tokens):
        grow(self, sequence, tokens)
        return []

    return wrong


class Machine(RuleBasedStateMachine):
    """The driver's operations in the order that hypothesis thinks up, and the smallest failing one."""

    def __init__(self):
        super().__init__()
        self.driver = Driver(TIERS, seed=0, pages=9, tails=2)

    @property
    def live(self) -> list[int]:
        return self.driver.allocator.sequences

    @rule(family=st.integers(0, 1), length=st.integers(1, 24), last=st.integers(0, 1))
    def begin(self, family, length, last):
        tokens = [family] * length + [last]
        begun = self.driver.allocator.begin(tokens)
        self.driver._feed(begun.sequence, tokens[begun.length :])

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 9))
    def grow(self, pick, count):
        self.driver._feed(self.live[pick % len(self.live)], [0] * count)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), name=st.sampled_from(["reserve", "keep", "take_back", "end", "misuse"]))
    def other(self, pick, name):
        getattr(self.driver, f"_{name}")(self.live[pick % len(self.live)])

    @invariant()
    def holds(self):
        check(self.driver.allocator)
        for sequence in self.live:
            self.driver._read(sequence)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
