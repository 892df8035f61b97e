"""The engine on a tiny model: equal to requests alone, without a compilation once warm, bytes as the formula has them.

One engine serves nearly all tests, since its programs take long to compile.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.engine import Engine, Output, PromptLookup, Request, Shapes, sizes
from oscar_jax.engine.compilations import compilations
from oscar_jax.engine.executor import JaxExecutor
from oscar_jax.engine.invariants import check
from oscar_jax.engine.model_drafts import draft_model
from oscar_jax.models import random_decoder
from oscar_jax.sampling import Sampling
from oscar_jax.session import Session
from oscar_jax.step import cache_config, make_step
from tests.oscar_jax.tiny import CONFIG, TIERS, codes, tokens

SHAPES = Shapes(rows=3, decode_batches=(3,), prefill_batches=(2,), chunks=(16,), drafts=2)
OPTIONS: dict[str, Any] = {"max_length": 96, "tiers": TIERS, "plain_dtype": "float32", "shapes": SHAPES}
PAGES = 14
SAMPLED = Sampling(temperature=0.8, top_k=20, seed=5)


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def engine(decoder) -> Engine:
    """Too few pages for three long sequences, so that some are preempted."""

    def drafter() -> PromptLookup:  # guesses often, and often wrongly
        return PromptLookup(2, 1)

    engine = Engine(decoder, codes(), pages=PAGES, tails=3, tail_every=32, drafter=drafter, **OPTIONS)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def alone(decoder):
    """Tokens of a request by the plain decoding loop, one token a step, without an engine."""
    config = cache_config(CONFIG, max_length=96, tiers=TIERS, plain_dtype="float32", step_tokens=SHAPES.drafts + 1)
    step = make_step(decoder, config, codes())

    def run(request: Request) -> list[int]:
        session = Session(step, chunks=(16,))
        logits = session.prefill([list(request.prompt)])
        new = session.decode(logits, [request.sampling or Sampling()], max_tokens=[request.max_tokens])
        result: list[int] = []
        for (token,) in new:
            assert token is not None
            result.append(token)
            if request.finish(result):
                break
        return result

    return run


def requests() -> list[Request]:
    prompts = tokens(40, 12, 30, 25, 55)
    return [
        Request(prompts[0], max_tokens=40),
        Request(prompts[1], max_tokens=50, sampling=SAMPLED),
        Request(prompts[2], max_tokens=50),
        Request([*prompts[0], *prompts[3]], max_tokens=20, sampling=SAMPLED),
        Request(prompts[4], max_tokens=30, stop_tokens=tuple(range(0, 96, 9))),
        Request(prompts[0], max_tokens=25),
    ]


def test_a_mixed_batch_equals_each_request_alone_and_compiles_nothing(engine, alone):
    before = compilations()
    wanted = requests()
    cancelled = engine.submit(Request(tokens(60)[0], max_tokens=30))
    for _ in range(6):
        engine.step()
    assert engine.cancel(cancelled)
    got = engine.complete([*wanted, *wanted])
    again = [engine.complete([request])[0] for request in wanted]  # after hits
    assert compilations() == before
    assert got == again + again
    stats = engine.stats()
    assert stats.preemptions
    assert stats.prefix_hits
    assert 0 < stats.hit_rate < 1
    assert stats.page_copies
    assert stats.evictions
    assert 0 < stats.drafts_accepted < stats.drafted
    assert stats.cancelled == 1
    assert stats.tokens_in_use == stats.running == stats.waiting == 0
    check(engine._allocators[0])
    assert got[: len(wanted)] == [alone(request) for request in wanted]


def test_what_lay_in_memory_before_and_absurd_guesses_change_no_token(engine, decoder):
    class Absurd:
        def propose(self, tokens, count):
            return [-1, 10**6][:count]

    poisoned = Engine(decoder, codes(), pages=PAGES, tails=3, tail_every=32, drafter=Absurd, **OPTIONS)
    device = poisoned._executor
    device.plain, device.tails, device.history = jax.tree.map(
        lambda x: jnp.full_like(x, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else -1),
        (device.plain, device.tails, device.history),
    )
    assert poisoned.complete(requests()) == engine.complete(requests())
    assert poisoned.stats().drafted


def test_a_draft_model_is_believed_where_it_is_right_and_changes_no_token(engine, decoder):
    """The model itself knows its greedy tokens and not its sampled ones. Its programs are those of `alone`."""
    drafter = draft_model(
        decoder, codes(), max_length=96 - SHAPES.drafts, drafts=SHAPES.drafts, chunks=(16,), tiers=TIERS,
        plain_dtype="float32",
    )  # fmt: skip
    drafted = Engine(decoder, codes(), pages=PAGES, tails=3, tail_every=32, drafter=drafter, **OPTIONS)
    before = compilations()
    assert drafted.complete(requests()) == engine.complete(requests())
    assert compilations() == before
    stats = drafted.stats()
    assert 0.5 < stats.drafts_accepted / stats.drafted < 1


def test_calls_started_ahead_change_no_token_and_nothing_that_is_kept(decoder, alone):
    """Step by step the same as without, down to the bits of kept prefixes, though stops are known late."""
    shapes = Shapes(rows=3, decode_batches=(1, 3), prefill_batches=(2,), chunks=(16,))
    options = OPTIONS | {"shapes": shapes, "pages": PAGES - 2, "tails": 6, "tail_every": 32}
    engines = [Engine(decoder, codes(), **options) for _ in range(2)]
    engines[0]._scheduler._may_start_ahead = False
    engines[0].warm_up()
    before, rng = compilations(), random.Random(2)
    wanted: list[Request] = []
    outputs: list[Output] = []
    late = 0
    while len(wanted) < 200 or not engines[0].idle:
        if len(wanted) < 200 and rng.random() < 0.2:
            for _ in range(3):
                wanted.append(random_request(rng))
                assert len({engine.submit(wanted[-1]) for engine in engines}) == 1
        if wanted and rng.random() < 0.02:
            victim = rng.randrange(max(0, len(wanted) - 4), len(wanted))
            assert len({engine.cancel(victim) for engine in engines}) == 1
        first, second = (engine.step() for engine in engines)
        assert first == second
        outputs += second
        scheduler = engines[1]._scheduler
        if scheduler._ahead is not None:
            late += any(progress.id not in scheduler._running for progress in scheduler._ahead.parts)
    assert compilations() == before
    first, second = (engine.stats() for engine in engines)
    assert dataclasses.replace(first, compilations=0) == dataclasses.replace(second, compilations=0)
    assert late
    assert second.preemptions
    assert second.prefix_hits
    assert second.cancelled
    tails = [list(engine._allocators[0].tree.tails) for engine in engines]
    for pair in zip(*tails, strict=True):
        for left, right in zip(*map(_stored, engines, pair), strict=True):
            np.testing.assert_array_equal(left, right)
    ended = {output.request for output in outputs if output.finish in ("stop", "length")}
    for number in sorted(ended)[::6]:
        got = [token for output in outputs if output.request == number for token in output.tokens]
        assert got == alone(wanted[number])


def random_request(rng: random.Random) -> Request:
    """Half of them sampled, some with stop rules that hold often; many begin alike."""
    length = rng.choice((rng.randrange(1, 50), 50))
    shared = rng.choice((0, length // 2, length))
    return Request(
        [*tokens(50, 50)[rng.randrange(2)][:shared], *(rng.randrange(96) for _ in range(length - shared))],
        max_tokens=rng.choice((rng.randrange(1, 40), 46)),
        sampling=rng.choice((None, SAMPLED)),
        stop_tokens=rng.choice(((), tuple(range(0, 96, 24)))),
        stop_sequences=rng.choice(((), tuple((n,) for n in range(1, 96, 24)))),
    )


def test_generated_tokens_are_found_by_the_next_turn(engine, alone):
    (prompt,) = tokens(20)
    (answer,) = engine.complete([Request(prompt, max_tokens=40)])
    before = engine.stats()
    turn = Request([*prompt, *answer, 1, 2, 3], max_tokens=10)
    (second,) = engine.complete([turn])
    assert engine.stats().prefix_hits == before.prefix_hits + 1
    assert second == alone(turn)


def test_measured_bytes_equal_the_formula(engine, decoder):
    stats = engine.stats()
    assert stats.device_bytes == stats.expected_bytes
    config = engine._executor.config
    cache_bytes = stats.device_bytes + sizes.page_bytes(config, codes()) - 1
    same = Engine(decoder, codes(), cache_bytes=cache_bytes, tails=3, **OPTIONS).stats()
    assert (same.device_bytes, same.capacity_tokens) == (stats.device_bytes, stats.capacity_tokens)
    assert stats.capacity_tokens == PAGES * TIERS.page
    assert stats.tail_bytes * (3 + 3) + PAGES * sizes.page_bytes(config, codes()) == stats.device_bytes
    plain = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 2
    assert stats.capacity_tokens_bf16 == stats.device_bytes // plain


def test_a_plain_engine_needs_no_codes(decoder):
    tiers = type(TIERS)(sink=4, recent=96, group=4, page=8)
    engine = Engine(decoder, **(OPTIONS | {"tiers": tiers, "max_length": 64}))
    stats = engine.stats()
    assert stats.device_bytes == stats.expected_bytes
    assert stats.capacity_tokens == 0


def test_wrong_requests_and_sizes_are_named(engine, decoder):
    with pytest.raises(ValueError, match=r"prompt has token 96: expected 0 to 95"):
        engine.submit(Request([1, 96]))
    with pytest.raises(ValueError, match=r"max_length=96 together"):
        engine.submit(Request([1] * 90, max_tokens=7))
    with pytest.raises(ValueError, match=r"at most one of them"):
        Engine(decoder, codes(), pages=20, cache_bytes=1, **OPTIONS)
    with pytest.raises(ValueError, match=r"cache_bytes=1000: 3 rows, 32 tails and one sequence of max_length=96 take"):
        Engine(decoder, codes(), cache_bytes=1000, **OPTIONS)
    with pytest.raises(ValueError, match=r"memory_fraction=2: expected above 0"):
        Engine(decoder, codes(), memory_fraction=2, **OPTIONS)
    if jax.devices()[0].memory_stats() is None:
        with pytest.raises(ValueError, match=r"does not tell its memory; give cache_bytes"):
            Engine(decoder, codes(), memory_fraction=0.5, **OPTIONS)
    with pytest.raises(ValueError, match=r"tails=-1"):
        Engine(decoder, codes(), tails=-1, **OPTIONS)
    with pytest.raises(ValueError, match=r"pages=20.5: expected a whole number"):
        Engine(decoder, codes(), pages=20.5, **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tail_every=2.5: expected a whole number"):
        Engine(decoder, codes(), tail_every=2.5, **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"drafts=7 with recent=8: expected at most 6"):
        Engine(decoder, codes(), max_length=96, tiers=TIERS, shapes=Shapes.of(2, drafts=7))
    with pytest.raises(ValueError, match=r"sampling=0.5: expected an oscar_jax.Sampling, or None"):
        engine.submit(Request([1], sampling=0.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"codes=None: a plain cache has no pages"):
        Engine(decoder, pages=20, **OPTIONS)
    with pytest.raises(ValueError, match=r"prompt has token 96"):
        engine.complete([Request([1], max_tokens=3), Request([96])])
    assert [output.finish for output in engine.step()] == ["cancelled"]
    assert engine.idle
    number = engine.submit(Request([1], max_tokens=3))
    with pytest.raises(ValueError, match=r"warm_up while requests run"):
        engine.warm_up()
    assert engine.cancel(number)
    assert [output.finish for output in engine.step()] == ["cancelled"]


def test_an_executor_refuses_a_cache_that_does_not_fit_its_calls(decoder):
    config = cache_config(CONFIG, max_length=96, tiers=TIERS, plain_dtype="float32", batch=3, step_tokens=3)
    with pytest.raises(ValueError, match=r"batch=3, step_tokens=3: expected rows=3 a part and at least 4"):
        JaxExecutor(decoder, config, codes(), shapes=SHAPES, tails=1)


def test_a_prefix_hit_stores_what_the_whole_prompt_stores_in_float64():
    """Rule E3: equal slots and scales, plain tiers to 1e-9."""
    with jax.enable_x64(True):
        shapes = Shapes(rows=1, decode_batches=(1,), prefill_batches=(1,), chunks=(16,))
        options = OPTIONS | {"plain_dtype": "float64", "shapes": shapes}
        decoder = random_decoder(CONFIG, dtype=np.float64)
        (prompt,) = tokens(60)
        stored = []
        for first in ([], [prompt[:37]], [prompt[:50], prompt[:24], prompt]):
            engine = Engine(decoder, codes(), tails=12, tail_every=1000, **options)
            engine.complete(Request(part, max_tokens=1) for part in first)
            hits = engine.stats().prefix_hits
            engine.complete([Request(prompt, max_tokens=1)])
            assert engine.stats().prefix_hits == hits + bool(first)
            tail = engine._allocators[0].tree.match(prompt)
            assert tail is not None
            stored.append(_stored(engine, tail))
        for slots, plain in stored[1:]:
            np.testing.assert_array_equal(slots, stored[0][0])
            np.testing.assert_allclose(plain, stored[0][1], rtol=0, atol=1e-9)


def _stored(engine: Engine, tail) -> tuple[np.ndarray, np.ndarray]:
    """Slots of a kept prefix's history, and its sinks and recents, in the order of positions."""
    history, ring = engine._executor.history, engine._executor.config.ring
    assert history is not None
    begin, end = TIERS.history_end(tail.boundary - 1), tail.boundary
    pages = np.asarray(history.key.slots)[:, tail.pages()]  # [L, p, K, page, N/4]
    slots = pages.swapaxes(2, 3).reshape(CONFIG.layers, -1, CONFIG.kv_heads, pages.shape[-1])
    recents = np.asarray(engine._executor.tails.recent_k)[:, tail.slot][:, np.arange(begin, end) % ring]
    sinks = np.asarray(engine._executor.tails.sink_k)[:, tail.slot]
    return slots[:, : TIERS.history_tokens(end)], np.concatenate([sinks, recents], axis=1)
