"""Time of writing history on one GPU: demotion in decode steps, and prefill beside XLA and a plain copy.

`python -m pallas_kernels.write.benchmark --json rows.json` prints a line a shape. Times are device time: a loop of
`REPEATS` calls compiled as one program, the pools in its carry.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.history import History, init_history
from pallas_kernels.rope import Rotary
from pallas_kernels.storage import storage_dtype
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes
from pallas_kernels.write import triton, xla

REPEATS = 32  # whole groups of steps, so that every sequence demotes as often
SAMPLES = 5
BUCKET = 2048
TIERS = Tiers()


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's cache; `tokens` of each sequence are written at once, or one by one for decode."""

    batch: int = 16
    tokens: int = 1
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    recipe: str = "default"  # "default": buckets, levels; "oscar-reference": one bucket, clipped min and max


def random_codes(shape: Shape, seed: int = 0) -> TransformCodes:
    """Codes in the recipe's form with random rotations."""
    rng = np.random.default_rng(seed)
    lead, dim = (shape.layers, shape.kv_heads), shape.head_dim
    levels = shape.recipe == "default"
    ones = np.ones((*lead, dim))

    def side(bits) -> TransformCode:
        rotation = np.broadcast_to(np.linalg.qr(rng.normal(size=(shape.kv_heads, dim, dim)))[0], (*lead, dim, dim))
        return TransformCode.build(
            mu=rng.normal(size=ones.shape) if levels else 0 * ones, encode=rotation,
            inverse=np.swapaxes(rotation, -1, -2), bits=np.broadcast_to(bits, ones.shape), delta=0.5 * ones,
            weight=ones, kind="levels" if levels else "minmax", clip="none" if levels else "rank", clip_ratio=0.96,
        )  # fmt: skip

    two = np.full(dim, 2)
    mixed = np.repeat([6, 4, 2, 0], [4, dim // 8, dim - 12 - dim // 4, 8 + dim // 8])  # N = D slots
    rotary, bucket = (Rotary.standard(dim), BUCKET) if levels else (None, None)
    return TransformCodes(side(mixed if levels else two), side(two), rotary, bucket)


Step = tuple[Callable[..., History], History, tuple[Any, ...]]  # `history = step(i, history, *arguments)`


def decode_step(shape: Shape, *, staggered: bool = False, tile: int | None = None) -> Step:
    """Demotion of a decode step of one token a sequence, all layers.

    Args:
        staggered: sequences demote in different steps; else all in the same one of eight.
    """
    codes, entries = random_codes(shape), 512
    dims = (shape.layers, shape.batch, TIERS.ring(1), shape.kv_heads, shape.head_dim)
    bits = jax.random.normal(jax.random.key(0), dims, jnp.bfloat16)
    recent = jax.lax.bitcast_convert_type(bits, storage_dtype(jnp.bfloat16))
    plain = PlainTiers(recent[:, :, :0], recent[:, :, :0], recent, recent)
    table = jnp.arange(shape.batch * entries, dtype=jnp.int32).reshape(shape.batch, entries) % (2 * shape.batch)
    phases = jnp.arange(shape.batch, dtype=jnp.int32) * staggered
    history = init_history(codes, pages=2 * shape.batch, page=TIERS.page, values_tokens_last=True)

    def step(i, history, plain, codes):
        return triton.demote_ahead(
            history, plain, tokens=1, starts=40000 + i + phases, counts=jnp.ones_like(phases), page_indices=table,
            codes=codes, tiers=TIERS, tile=tile,
        )  # fmt: skip

    return step, history, (plain, codes)


def prefill_step(shape: Shape, implementation: str, *, tile: int | None = None) -> Step:
    """Writing `tokens` rows of each sequence, each time in the next layer."""
    codes, entries = random_codes(shape), -(-shape.tokens // TIERS.page)
    k, v = _rows(shape)
    positions = jnp.broadcast_to(TIERS.sink + jnp.arange(shape.tokens, dtype=jnp.int32), k.shape[:2])
    table = jnp.arange(shape.batch * entries, dtype=jnp.int32).reshape(shape.batch, entries)
    history = init_history(codes, pages=shape.batch * entries, page=TIERS.page, values_tokens_last=True)
    write = functools.partial(triton.write, tile=tile) if implementation == "triton" else xla.write

    def step(i, history, k, v, codes):
        return write(
            history, k, v, layer=i % shape.layers, positions=positions, valid=positions >= 0, page_indices=table,
            codes=codes, tiers=TIERS,
        )  # fmt: skip

    return step, history, (k, v, codes)


def copied(shape: Shape) -> list[float]:
    """Seconds of reading the plain rows of `prefill_step` and writing as many bytes, `SAMPLES` times."""
    return seconds(lambda i, rows: jax.tree.map(jnp.negative, rows), _rows(shape))


def _rows(shape: Shape) -> tuple[jax.Array, jax.Array]:
    dims = (shape.batch, shape.tokens, shape.kv_heads, shape.head_dim)
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], dims, jnp.bfloat16), jax.random.normal(keys[1], dims, jnp.bfloat16)


def seconds(step: Callable[..., Any], carry: Any, arguments: tuple[Any, ...] = ()) -> list[float]:
    """Seconds of `carry = step(i, carry, *arguments)`, `SAMPLES` times."""

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry, *arguments):
        return jax.lax.fori_loop(0, REPEATS, lambda i, carry: step(i, carry, *arguments), carry)

    carry, arguments = jax.device_put((carry, arguments))
    samples = []
    for _ in range(SAMPLES + 1):
        jax.block_until_ready(carry)
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, *arguments))
        samples.append((time.perf_counter() - start) / REPEATS)
    return samples[1:]


def _microseconds(samples: list[float]) -> dict[str, float]:
    median = statistics.median(samples)
    return {
        "us": round(median * 1e6, 2),
        "spread": round((max(samples) - min(samples)) / 2 / median, 4),
    }


def decode_row(shape: Shape, *, staggered: bool) -> dict[str, Any]:
    """A row of the report; `us_a_layer` is what a decode step of one layer pays."""
    time_of = _microseconds(seconds(*decode_step(shape, staggered=staggered)))
    kind = {"operation": "demote", "staggered": staggered}
    return kind | dataclasses.asdict(shape) | time_of | {"us_a_layer": round(time_of["us"] / shape.layers, 3)}


def prefill_row(shape: Shape) -> dict[str, Any]:
    """A row of the report."""
    row = {"operation": "write"} | dataclasses.asdict(shape) | _microseconds(seconds(*prefill_step(shape, "triton")))
    row["xla_us"] = _microseconds(seconds(*prefill_step(shape, "xla")))["us"]
    row["copy_us"] = _microseconds(copied(shape))["us"]
    return row


def report() -> list[dict[str, Any]]:
    """Rows of both recipes, printed as they come."""
    rows = []
    for recipe in ("default", "oscar-reference"):
        for staggered in (False, True):
            rows.append(decode_row(Shape(recipe=recipe), staggered=staggered))
            print(
                f"demote  {recipe:15} batch 16, 32 layers, {'staggered' if staggered else 'in step'}: "
                f"{rows[-1]['us']:.1f} us a step, {rows[-1]['us_a_layer']:.2f} a layer",
                flush=True,
            )
        rows.append(prefill_row(Shape(tokens=4096, layers=2, recipe=recipe)))
        print(
            f"write   {recipe:15} 16 x 4096 tokens, one layer: {rows[-1]['us']:.0f} us "
            f"(XLA {rows[-1]['xla_us']:.0f}, copy {rows[-1]['copy_us']:.0f})",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the report")
    options = parser.parse_args()
    rows = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": report()}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
