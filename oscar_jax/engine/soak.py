"""Random requests on a random model, each compared with itself run alone: `oscar-jax bench soak`.

Shared beginnings, prompts of very different lengths, cancels, and a pool so small that requests are preempted. The
comparison runs in the same engine and compiled programs, without kept prefixes.
"""

from __future__ import annotations

import random
import resource
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calib import fit, moments
from oscar_jax.engine.compilations import compilations
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import Request
from oscar_jax.engine.scheduler import Shapes
from oscar_jax.models import Decoder, plain_attention, random_decoder, tiny_config
from oscar_jax.step import Step, cache_config, make_step, prefill
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

TIERS = Tiers(sink=8, recent=32, group=8, page=32)
BUCKET = 256
LONGEST = 600
PAGES = 34  # one sequence of the whole context needs 32
ROW_PAGES = 1.5  # of more rows, so that several run at once and pages still run out
TIE = 1e-4
COUNTS = ("requests", "mismatches", "ties", "leaked_pages", "preemptions", "cancelled", "prefix_hits")
CONFIG = tiny_config(head_dim=64, hidden_size=128, vocab_size=256, max_position=1024)


def soak(
    requests: int,
    *,
    seed: int = 0,
    rows: int = 16,
    drafts: int = 3,
    pages: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, int | float]:
    """Runs and compares.

    Args:
        requests: how many.
        rows: at once, in each part of the mesh; calls of all rows, so the same ones together and alone.
        drafts: most drafted tokens a step; with 0, calls are started ahead.
        pages: of the pool, in each part; None for so few that some requests are preempted.
        mesh: of the engine.

    Returns:
        `requests`, `mismatches`, `ties` (first differences where the two best logits are closer than 1e-4),
        `leaked_pages`, `preemptions`, `cancelled`, `prefix_hits`, `compilations` after the warm-up, `memory_growth`
        (bytes by which the process's peak rose in the second half of the requests), `most_at_once` and `mean_at_once`
        (requests running after a step), `pages`, `minutes`.
    """
    began = time.perf_counter()
    decoder = random_decoder(CONFIG, seed=seed)
    codes = calibrated(decoder, seed=seed)
    shapes = Shapes(rows, (rows,), (2,), (64,), drafts=drafts)
    options: dict[str, Any] = {"max_length": 1024, "tiers": TIERS, "plain_dtype": "float32", "shapes": shapes}
    pages = pages or max(PAGES, int(ROW_PAGES * rows))
    engine = Engine(decoder, codes, pages=pages, tails=48, tail_every=128, mesh=mesh, **options)
    engine.warm_up()
    compiled = compilations()
    rng = random.Random(seed)
    wanted = random_requests(rng, requests)
    outputs, ended, growth, running = _together(engine, wanted, rng)
    stats = engine.stats()
    leaked = stats.tokens_in_use // TIERS.page
    solo = _alone(engine, wanted)
    compiled = compilations() - compiled
    config = cache_config(CONFIG, max_length=1024, tiers=TIERS, plain_dtype="float32", step_tokens=1)
    step = make_step(decoder, config, codes)
    mismatches = ties = 0
    for number, request in enumerate(wanted):
        got, expected = outputs[number], solo[number]
        if number not in ended:
            expected = expected[: len(got)]
        if got != expected:
            tie = _gap(step, request, got, expected) < TIE
            ties, mismatches = ties + tie, mismatches + (not tie)
    return {
        "requests": requests,
        "mismatches": mismatches,
        "ties": ties,
        "leaked_pages": leaked,
        "preemptions": stats.preemptions,
        "cancelled": stats.cancelled,
        "prefix_hits": stats.prefix_hits,
        "compilations": compiled,
        "memory_growth": growth,
        "most_at_once": max(running),
        "mean_at_once": round(sum(running) / len(running), 1),
        "pages": pages,
        "minutes": round((time.perf_counter() - began) / 60),
    }


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts of 1 to 600 tokens, most of which begin like others."""
    bases = [[rng.randrange(CONFIG.vocab_size) for _ in range(LONGEST)] for _ in range(8)]
    wanted = []
    for _ in range(count):
        length = rng.randint(1, rng.choice((20, 100, 300, LONGEST)))
        shared = rng.choice((0, length // 2, length, length))
        prompt = rng.choice(bases)[:shared] + [rng.randrange(CONFIG.vocab_size) for _ in range(length - shared)]
        wanted.append(Request(prompt, max_tokens=rng.randint(1, 80), stop_tokens=(0, 1)))
    return wanted


def calibrated(decoder: Decoder, *, seed: int) -> TransformCodes:
    """Codes of the default recipe from random tokens."""
    config = decoder.config
    length = BUCKET + TIERS.sink + TIERS.recent
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (1, length))
    positions = jnp.arange(length)
    q, k, v = decoder(jnp.asarray(tokens), positions[None], plain_attention(config, capture=True), None)[2]
    sums = moments.init(
        ("default",),
        layers=config.layers,
        kv_heads=config.kv_heads,
        q_heads=config.q_heads,
        head_dim=config.head_dim,
        bucket=BUCKET,
        sink=TIERS.sink,
        recent=TIERS.recent,
    )
    sums = moments.accumulate(sums, q, k, v, positions=positions, lengths=jnp.asarray([length]), rope=config.rotary)
    with warnings.catch_warnings():  # good codes are not needed, only the same ones everywhere
        warnings.simplefilter("ignore", fit.ThinStatisticsWarning)
        return fit.fit(sums, "default", rope=config.rotary, max_position=config.max_position)


def _together(
    engine: Engine, wanted: list[Request], rng: random.Random
) -> tuple[dict[int, list[int]], set[int], int, list[int]]:
    """Outputs by request, those that were not cancelled, the rise of peak memory in the second half, and how many
    requests ran after each step."""
    outputs: dict[int, list[int]] = {}
    ended: set[int] = set()
    running: list[int] = []
    halfway = 0
    while len(outputs) < len(wanted) or not engine.idle:
        while len(outputs) < len(wanted) and rng.random() < 0.6:
            outputs[engine.submit(wanted[len(outputs)])] = []
        if outputs and rng.random() < 0.04:
            engine.cancel(rng.choice(list(outputs)[-engine.shapes.rows :]))
        for output in engine.step():
            outputs[output.request] += output.tokens
            if output.finish in ("stop", "length"):
                ended.add(output.request)
        running.append(engine.stats().running)
        if not halfway and 2 * len(outputs) >= len(wanted):
            halfway = _peak()
    return outputs, ended, _peak() - halfway, running


def _alone(engine: Engine, wanted: list[Request]) -> list[list[int]]:
    results = []
    for request in wanted:
        engine.forget()
        results += engine.complete([request])
    return results


def _gap(step: Step, request: Request, got: list[int], expected: list[int]) -> float:
    """Difference of the two best logits where two outputs first differ."""
    same = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), len(got))
    logits, _ = prefill(step, step.init(), [[*request.prompt, *expected[:same]]], chunks=(64,))
    second, first = np.sort(np.asarray(logits[0]))[-2:]
    return float(first - second)


def passed(result: dict[str, int | float]) -> bool:
    """Whether a soak found nothing but ties, of which one in a thousand is allowed."""
    return not (result["mismatches"] or result["leaked_pages"]) and 1000 * result["ties"] <= result["requests"]


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
