"""Continuous batching on a fake device: every output is that of the request alone, whatever happens around it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from oscar_jax.engine.allocator import Allocator
from oscar_jax.engine.drafts import PromptLookup
from oscar_jax.engine.request import Request
from oscar_jax.engine.scheduler import Scheduler, Shapes
from tests.oscar_jax.engine.fake import SHAPES, TIERS, Bench, FakeExecutor, alone


def random_request(rng: random.Random, *, longest: int = 40) -> Request:
    """Of one of a few families with the same beginning, half of them sampled, some with stop rules."""
    prompt = [rng.randrange(2)] * rng.randrange(1, longest) + [rng.randrange(3) for _ in range(rng.randrange(5))]
    return Request(
        prompt,
        max_tokens=rng.randrange(1, 20),
        sampling=rng.choice([None, 7]),  # type: ignore[arg-type]  # the fake model only asks whether there is one
        stop_tokens=rng.choice([(), (4,)]),
        stop_sequences=rng.choice([(), [(1, 2)]]),
    )


@pytest.mark.parametrize("drafter", [None, PromptLookup])
@pytest.mark.parametrize(("pages", "parts"), [(17, 1), (24, 1), (80, 1), (17, 3)])
@pytest.mark.parametrize("tails", [0, 2, 12])
def test_outputs_equal_those_alone_through_preemption_cancels_and_hits(drafter, pages, parts, tails):
    rng = random.Random(f"{pages} {tails}")
    bench = Bench(pages=pages, tails=tails, parts=parts, drafter=drafter, tail_every=16)
    requests, cancelled, seen = {}, set(), set()
    while len(requests) < 80 or not bench.scheduler.idle:
        if len(requests) < 80 and rng.random() < 0.4:
            request = random_request(rng)
            if seen and rng.random() < 0.3:  # another turn of a conversation
                earlier = rng.choice(sorted(seen))
                text = [*requests[earlier].prompt, *bench.tokens(earlier), 1]
                request = Request(text[:40], max_tokens=9)
            requests[bench.scheduler.submit(request)] = request
        if requests.keys() - seen and rng.random() < 0.1:
            victim = rng.choice(sorted(requests.keys() - seen))
            if bench.scheduler.cancel(victim):
                cancelled.add(victim)
                seen.add(victim)
        seen |= {output.request for output in bench.step() if output.finish in ("stop", "length")}
    for number, request in requests.items():
        expected, got = alone(request), bench.tokens(number)
        if number in cancelled:
            assert got == expected[: len(got)]
            assert bench.finish(number) == "cancelled"
        else:
            assert got == expected
            assert bench.finish(number) == request.finish(expected)
    counts = bench.scheduler.counts
    assert (counts.submitted, counts.cancelled) == (80, len(cancelled))
    assert counts.finished == 80 - len(cancelled)
    assert all(allocator.sequences == [] for allocator in bench.allocators)
    assert all(allocator.available == pages for allocator in bench.allocators)
    assert counts.preemptions or pages * parts > 17
    assert not counts.preemptions or pages < 80
    assert cancelled
    assert any(allocator.stats().hits for allocator in bench.allocators) == (tails > 0)
    assert (counts.drafts_accepted > 0) == (drafter is not None)


def test_the_next_call_is_started_before_the_tokens_of_this_one_are_read():
    bench = Bench()
    numbers = [bench.scheduler.submit(Request([n] * 4, max_tokens=5)) for n in range(2)]
    bench.step()  # both prompts, which are kept before they go on
    assert bench.executor.events == [("start", 0), ("read", 0)]
    bench.executor.events.clear()
    bench.run()
    assert bench.executor.events == [
        ("start", 1), ("start", 2), ("read", 1), ("start", 3), ("read", 2), ("start", 4), ("read", 3), ("read", 4),
    ]  # fmt: skip
    assert [bench.finish(number) for number in numbers] == ["length"] * 2


@pytest.mark.parametrize(("pages", "parts"), [(17, 1), (24, 1), (80, 1), (17, 3)])
@pytest.mark.parametrize("tails", [0, 2, 12])
def test_every_step_gives_and_keeps_what_it_does_if_none_is_started_ahead(pages, parts, tails):
    """Stops, cancels, preemptions, hits; and rings with no room but for the one token that may be taken back."""
    rng = random.Random(f"{pages} {parts} {tails}")
    shapes = Shapes.of(4, prefill_rows=2, chunks=(4, 9))
    benches = [
        Bench(pages=pages, tails=tails, parts=parts, shapes=shapes, tail_every=16, ahead=ahead)
        for ahead in (False, True)
    ]
    requests: list[Request] = []
    ahead = dropped = 0
    while len(requests) < 200 or not benches[0].scheduler.idle:
        for _ in range(rng.choice((0, 0, 0, 0, 0, 3)) if len(requests) < 200 else 0):
            request = random_request(rng)
            if requests and rng.random() < 0.4:  # again, just what was stored of it, or on from there
                earlier = rng.randrange(len(requests))
                tokens = benches[0].tokens(earlier)
                text = [*requests[earlier].prompt, *rng.choice(([], tokens[:-1], [*tokens, 1]))]
                request = Request(text[:40], max_tokens=9, stop_tokens=(3,))
            requests.append(request)
            assert len({bench.scheduler.submit(request) for bench in benches}) == 1
        if requests and rng.random() < 0.1:
            victim = rng.randrange(max(0, len(requests) - 6), len(requests))
            assert len({bench.scheduler.cancel(victim) for bench in benches}) == 1
        first, second = (sorted(bench.step(), key=lambda output: output.request) for bench in benches)
        assert first == second
        assert state(benches[0]) == state(benches[1])
        call = benches[1].scheduler._ahead
        if call is not None:
            ahead += 1
            dropped += not all(progress.id in benches[1].scheduler._running for progress in call.parts)
    for number, request in enumerate(requests):
        if benches[1].finish(number) != "cancelled":
            assert benches[1].tokens(number) == alone(request)
    counts = benches[1].scheduler.counts
    assert ahead > 30
    assert dropped
    assert counts.cancelled
    assert counts.preemptions or pages > 17


def test_what_a_stop_token_leaves_is_hit_although_one_more_was_fed():
    """At every place in groups and pages; asked for again as it is, the last token stored is fed again."""
    sampled: Any = 7  # the fake model then looks at all tokens
    for length in range(1, 30):
        prompt = [random.Random(length + n).randrange(5) for n in range(length)]
        new = alone(Request(prompt, max_tokens=12, sampling=sampled))
        for token in set(new):
            bench = Bench(shapes=Shapes.of(4, prefill_rows=2, chunks=(4, 9)))
            number = bench.scheduler.submit(Request(prompt, max_tokens=13, sampling=sampled, stop_tokens=[token]))
            bench.run()
            stopped = bench.tokens(number)
            assert stopped == new[: new.index(token) + 1]
            for again in (stopped[:-1], stopped):
                request = Request([*prompt, *again], max_tokens=3, sampling=sampled)
                number = bench.scheduler.submit(request)
                bench.run()
                assert bench.tokens(number) == alone(request)
            assert bench.allocators[0].stats().tokens_hit >= len(prompt) + len(stopped) - 2


def state(bench: Bench) -> list[object]:
    """Of the scheduler and its allocators, page ids and reserved pages aside."""
    found: list[object] = [dataclasses.asdict(bench.scheduler.counts), bench.scheduler.running]
    for allocator in bench.allocators:
        reserved = sum(map(allocator.reserved, allocator.sequences))
        stats = allocator.stats()
        stats = dataclasses.replace(stats, pages_free=stats.pages_free + reserved)
        kept = []
        for tail in allocator.tree.tails:
            node, text = tail.node, tail.rest
            while node.parent is not None:
                node, text = node.parent, node.tokens + text
            kept.append(text)
        found += [stats, kept, sorted(map(allocator.tokens, allocator.sequences))]
    return found


def test_a_preempted_request_goes_on_with_the_token_it_was_at():
    bench = Bench(pages=17, tails=4)
    requests = [Request([n] * 30, max_tokens=30) for n in range(4)]
    numbers = [bench.scheduler.submit(request) for request in requests]
    bench.run()
    assert bench.scheduler.counts.preemptions
    assert [bench.tokens(number) for number in numbers] == [alone(request) for request in requests]


def test_without_room_for_a_second_request_it_waits():
    bench = Bench(pages=17, tails=0, max_length=64)
    first, second = (bench.scheduler.submit(Request([n] * 50, max_tokens=3)) for n in range(2))
    bench.step()
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 1)
    bench.run()
    assert bench.scheduler.counts.preemptions == 0
    assert [output.request for output in bench.outputs if output.finish] == [first, second]


def test_sequences_that_need_no_pages_run_together():
    bench = Bench(pages=0, tails=0, max_length=6)
    for n in range(4):
        bench.scheduler.submit(Request([n], max_tokens=3))
    bench.step()
    bench.step()
    assert bench.scheduler.running == 4


@pytest.mark.parametrize("drafter", [None, PromptLookup])
def test_prefixes_of_every_length_are_hit_up_to_every_other(drafter):
    """Sinks, the first full window, groups and pages all end somewhere below 34 tokens."""
    text = [random.Random(3).randrange(5) for _ in range(40)]
    for kept in range(1, 30):
        for asked in range(1, 34):
            bench = Bench(tails=4, drafter=drafter, tail_every=16)
            parting = [*text[: min(kept, asked)], 4, 4, 4]
            for prompt in (text[:kept], text[:asked], parting):
                number = bench.scheduler.submit(request := Request(prompt, max_tokens=3))
                bench.run()
                assert bench.tokens(number) == alone(request)


def test_a_stop_token_ends_a_request_at_once_whatever_was_drafted():
    prompt = [1, 2, 3] * 5
    first = alone(Request(prompt, max_tokens=12))
    for token in first:
        bench = Bench(drafter=PromptLookup)
        request = Request(prompt, max_tokens=12, stop_tokens=[token], stop_sequences=[[9] * 40])
        number = bench.scheduler.submit(request)
        bench.run()
        assert bench.tokens(number) == first[: first.index(token) + 1]
        assert bench.finish(number) == "stop"
        again = bench.scheduler.submit(Request([*prompt, *bench.tokens(number)], max_tokens=3))
        bench.run()
        assert bench.tokens(again) == alone(Request([*prompt, *bench.tokens(number)], max_tokens=3))


def test_a_request_has_tokens_of_its_own_of_whatever_kind_they_came():
    prompt = [1, 2, 3, 1, 2]
    bench = Bench(drafter=PromptLookup)
    kinds: list[Any] = [prompt, np.array(prompt)]
    numbers = [bench.scheduler.submit(Request(tokens, max_tokens=6)) for tokens in kinds]
    expected = alone(Request(prompt, max_tokens=6))
    bench.step()
    prompt.append(4)  # as a chat does with its list
    bench.run()
    assert [bench.tokens(number) for number in numbers] == [expected] * 2


def test_guesses_of_any_kind_cost_no_token():
    class Odd:
        def propose(self, tokens, count):
            return np.array([4] * (count + 3))

    request = Request([1, 2, 3], max_tokens=9)
    bench = Bench(drafter=Odd)
    number = bench.scheduler.submit(request)
    bench.run()
    assert bench.tokens(number) == alone(request)


def test_after_an_interrupted_step_nothing_wrong_is_given_out():
    class Failing:
        def propose(self, tokens, count):
            raise KeyboardInterrupt

    bench = Bench(drafter=Failing)
    for n in range(2):
        bench.scheduler.submit(Request([n] * 3, max_tokens=5))
    bench.step()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    with pytest.raises(RuntimeError, match=r"an earlier step has not ended .* expected a new engine"):
        bench.step()


def test_a_failure_between_the_start_of_a_call_and_its_tokens_ends_the_engine():
    bench = Bench()
    bench.scheduler.submit(Request([1, 2], max_tokens=9))
    bench.step()
    bench.step()
    ahead = bench.scheduler._ahead
    assert ahead is not None

    def lost():
        raise OSError("the device is gone")

    bench.scheduler._ahead = ahead._replace(tokens=lost)
    with pytest.raises(OSError, match=r"the device is gone"):
        bench.step()
    with pytest.raises(RuntimeError, match=r"an earlier step has not ended"):
        bench.step()


def test_what_is_cancelled_after_its_call_was_started_is_not_waited_for():
    bench = Bench()
    first = bench.scheduler.submit(Request([1, 2] * 9, max_tokens=9))
    while bench.scheduler._ahead is None:
        bench.step()
    assert bench.scheduler.cancel(first)
    assert bench.allocators[0].sequences == []
    second = bench.scheduler.submit(request := Request([3] * 12, max_tokens=9))  # takes the row, and pages
    started = len(bench.executor.calls)
    bench.step()
    assert bench.finish(first) == "cancelled"
    assert ("read", started - 1) not in bench.executor.events
    bench.run()
    assert bench.tokens(second) == alone(request)


def test_a_request_is_taken_in_at_once_though_a_call_was_started_ahead():
    bench = Bench()
    bench.scheduler.submit(Request([1] * 5, max_tokens=30))
    for _ in range(4):
        bench.step()
    assert bench.scheduler._ahead is not None
    number = bench.scheduler.submit(Request([2] * 3, max_tokens=1))
    assert {output.request for output in bench.step()} == {0, number}


def test_decoding_gives_a_token_every_step_under_a_flood_of_long_prompts():
    bench = Bench(pages=200)
    number = bench.scheduler.submit(Request([1], max_tokens=30))
    bench.step()
    for _ in range(20):
        bench.scheduler.submit(Request([2] * 50, max_tokens=5))
    for _ in range(29):
        assert [len(output.tokens) for output in bench.step() if output.request == number] == [1]
    assert bench.finish(number) == "length"


def test_a_short_request_overtakes_a_flood_and_no_long_one_waits_for_ever():
    bench = Bench(pages=200)
    flood = [bench.scheduler.submit(Request([2] * 50, max_tokens=5)) for _ in range(12)]
    bench.step()
    short = bench.scheduler.submit(Request([3], max_tokens=1))
    while not any(output.request == short for output in bench.outputs):
        bench.step()
    assert sum(output.finish is not None for output in bench.outputs if output.request in flood) <= 4
    steps = 0
    while not all(any(o.request == n and o.finish for o in bench.outputs) for n in flood):
        bench.scheduler.submit(Request([steps % 5, 1], max_tokens=4))  # short ones keep coming
        bench.step()
        steps += 1
        assert steps < 400


def test_only_listed_shapes_are_called_and_batches_shrink():
    bench = Bench(pages=80)
    bench.scheduler.submit(Request([1] * 20, max_tokens=8))
    bench.run()
    assert set(bench.executor.calls) == {(1, 9), (1, 4), (1, 1)}
    for n in range(4):
        bench.scheduler.submit(Request([n + 2] * 20, max_tokens=8))
    bench.run()
    assert {(2, 9), (4, 1)} <= set(bench.executor.calls) <= {call[:2] for call in SHAPES.calls()}


def test_the_last_prompt_token_is_all_that_a_repeated_prompt_costs():
    bench = Bench(pages=80)
    request = Request([1, 2, 3] * 12, max_tokens=3)
    bench.scheduler.submit(request)
    bench.run()
    before = len(bench.executor.calls)
    number = bench.scheduler.submit(request)
    bench.run()
    assert bench.executor.calls[before:] == [(1, 1)] * 3
    assert bench.tokens(number) == alone(request)


def test_a_prefix_inside_a_long_prompt_is_hit_at_a_multiple_of_tail_every():
    bench = Bench(pages=80, tail_every=16)
    bench.scheduler.submit(Request([1, 2] * 25, max_tokens=2))
    bench.run()
    request = Request([*[1, 2] * 20, 0, 3], max_tokens=4)
    number = bench.scheduler.submit(request)
    bench.run()
    assert bench.allocators[0].stats().tokens_hit == 32
    assert bench.tokens(number) == alone(request)


def test_drafted_tokens_save_steps():
    request = Request([1, 2, 3] * 5, max_tokens=30)
    steps = {}
    for drafter in (None, PromptLookup):
        bench = Bench(drafter=drafter)
        number = bench.scheduler.submit(request)
        bench.run()
        assert bench.tokens(number) == alone(request)
        steps[drafter] = bench.scheduler.counts.steps
    assert steps[PromptLookup] < steps[None]


def test_cancelling_waiting_running_and_ended_requests():
    bench = Bench()
    numbers = [bench.scheduler.submit(Request([n] * 5, max_tokens=5)) for n in range(6)]
    bench.step()
    assert bench.scheduler.cancel(numbers[0])
    assert bench.scheduler.cancel(numbers[5])
    assert not bench.scheduler.cancel(numbers[5])
    assert not bench.scheduler.cancel(99)
    assert {o.request for o in bench.step() if o.finish == "cancelled"} == {numbers[0], numbers[5]}
    bench.run()
    assert [bench.finish(number) for number in numbers[1:5]] == ["length"] * 4
    assert bench.scheduler.idle


def test_wrong_requests_and_settings_are_named():
    bench = Bench()
    with pytest.raises(ValueError, match=r"prompt of 60 tokens and max_tokens=5: expected at most max_length=64"):
        bench.scheduler.submit(Request([1] * 60, max_tokens=5))
    with pytest.raises(ValueError, match=r"prompt is empty"):
        Request([])
    for count in (0, 2.5, float("nan"), "3"):
        with pytest.raises(ValueError, match=r"max_tokens=.*: expected at least 1, a whole number"):
            Request([1], max_tokens=count)  # type: ignore[arg-type]
    for prompt in ([1, 2.0], "text", [[1, 2]], 7):
        with pytest.raises(ValueError, match=r"prompt=.*: expected token ids, whole numbers"):
            Request(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stop_tokens=.*: expected token ids"):
        Request([1], stop_tokens=["end"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"stop_sequences has an empty one"):
        Request([1], stop_sequences=[()])
    with pytest.raises(ValueError, match=r"pages=14: a sequence of max_length=64 needs 15"):
        Bench(pages=14)
    with pytest.raises(ValueError, match=r"tail_every=0"):
        Bench(tail_every=0)
    with pytest.raises(ValueError, match=r"chunks=\(9, 4\): expected ascending"):
        Shapes(4, (4,), (1,), (9, 4))
    with pytest.raises(ValueError, match=r"decode_batches=\(1,\)"):
        Shapes(4, (1,), (1,), (4,))
    with pytest.raises(ValueError, match=r"drafts=-1"):
        Shapes(4, (4,), (1,), (4,), -1)
    shapes = Shapes.of(4, chunks=(4,))
    with pytest.raises(ValueError, match=r"drafter with drafts=0"):
        Scheduler(
            [Allocator(TIERS, pages=24, tails=1)], FakeExecutor(shapes), shapes, max_length=64, drafter=PromptLookup
        )


def test_prompt_lookup_finds_what_followed_last_time():
    drafter = PromptLookup()
    assert drafter.propose([1, 2, 3], 4) == []
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3], 4) == [4, 1, 2, 3]
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3, 5, 2, 3], 1) == [5]
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 9], 3) == []
    with pytest.raises(ValueError, match=r"shortest=3, longest=2"):
        PromptLookup(2, 3)
