"""Decode attention against PyTorch's cuDNN attention over a contiguous bfloat16 cache, on one GPU.

`python -m pallas_kernels.attention.benchmark --json rows.json` times the shapes of `SHAPES`. Both sides are device
time: ours is a loop of `REPEATS` calls compiled as one program, each call's output the next one's query, and `QUEUED`
such programs more against one, so that what the host takes to start and to end cancels; PyTorch's is a captured graph
of as many calls between two events. Ours counts everything from the query to the output: query transform, all three
tiers, merge and map-back. PyTorch is needed, on the same GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import AttentionSpec, PlainTiers
from pallas_kernels.attention.triton import attend
from pallas_kernels.history import History, SidePages
from pallas_kernels.rope import Rotary
from pallas_kernels.storage import storage_dtype
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes

REPEATS = 30
SAMPLES = 5
QUEUED = 4
UNROLL = 5  # calls in the body of the loop: enough launches for XLA to capture it as a graph
BUCKET = 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """One decode step: every sequence holds `context` tokens, its new ones counted."""

    batch: int
    context: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    recipe: str = "default"  # "default": buckets, implied offset; "oscar-reference": one bucket, stored offset
    page: int = 128


SHAPES = (
    Shape(16, 65536),
    Shape(64, 32768),
    Shape(32, 8192),
    Shape(1, 131072),
    Shape(16, 65536, 64, 8),
    Shape(16, 32768, 28, 4),
    Shape(16, 32768, 14, 2, 64),
    Shape(16, 32768, 9, 3, 64),
    Shape(16, 65536, q_len=4),
)


def random_codes(shape: Shape, seed: int = 0) -> TransformCodes:
    """One layer of codes in the recipe's form with random rotations."""
    rng = np.random.default_rng(seed)
    lead, dim = (1, shape.kv_heads), shape.head_dim
    levels = shape.recipe == "default"

    def side() -> TransformCode:
        rotation = np.linalg.qr(rng.normal(size=(*lead, dim, dim)))[0]
        ones = np.ones((*lead, dim))
        return TransformCode.build(
            mu=rng.normal(size=ones.shape) if levels else 0 * ones, encode=rotation,
            inverse=np.swapaxes(rotation, -1, -2), bits=(2 * ones).astype(np.int8), delta=ones, weight=ones,
            kind="levels" if levels else "minmax",
        )  # fmt: skip

    return TransformCodes(side(), side(), Rotary.standard(dim) if levels else None, BUCKET if levels else None)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Arguments of `attend` but the query."""

    q: jax.Array
    arrays: tuple
    tiers: Tiers
    spec: AttentionSpec
    packed_bytes: int


def workload(shape: Shape, seed: int = 0) -> Workload:
    """A full cache of random slots, scales between .2 and .6, on permuted pages."""
    codes, tiers = random_codes(shape), Tiers(page=shape.page)
    starts, key = shape.context - shape.q_len, jax.random.key(seed)
    pages, ring = tiers.history_pages(shape.context), tiers.ring(shape.q_len)
    pool, width = shape.batch * pages, shape.head_dim // 4
    rows = (1, pool, shape.kv_heads, tiers.page)

    def normal(index, *dims):
        return jax.random.normal(jax.random.fold_in(key, index), dims, jnp.float32).astype(jnp.bfloat16)

    def side(code, index, tokens_last) -> SidePages:
        at = functools.partial(jax.random.fold_in, key)
        slots = jax.random.bits(at(index), (*rows[:3], width, tiers.page) if tokens_last else (*rows, width), jnp.uint8)
        scale = jax.random.uniform(at(index + 1), rows, jnp.float32, 0.2, 0.6).astype(jnp.float16)
        return SidePages(slots, scale, -1.5 * scale if code.has_offset else None, tokens_last)

    def plain(index, tokens):
        bits = normal(index, 1, shape.batch, tokens, shape.kv_heads, shape.head_dim)
        return jax.lax.bitcast_convert_type(bits, storage_dtype(jnp.bfloat16))

    history = History(side(codes.key, 10, False), side(codes.value, 12, True))
    new = [normal(i, shape.batch, shape.q_len, shape.kv_heads, shape.head_dim) for i in (20, 21)]
    tiers_of = PlainTiers(plain(30, tiers.sink), plain(31, tiers.sink), plain(32, ring), plain(33, ring))
    table = jnp.asarray(np.random.default_rng(seed).permutation(pool).reshape(shape.batch, pages), jnp.int32)
    lengths = {
        "layer": jnp.int32(0), "starts": jnp.full(shape.batch, starts, jnp.int32),
        "counts": jnp.full(shape.batch, shape.q_len, jnp.int32), "page_indices": table,
    }  # fmt: skip
    tokens = shape.batch * shape.kv_heads * tiers.history_tokens(shape.context)
    row_bits = codes.key.row_bits + codes.value.row_bits
    return Workload(
        normal(1, shape.batch, shape.q_len, shape.q_heads, shape.head_dim),
        (*new, tiers_of, history, lengths, codes), tiers, AttentionSpec(shape.head_dim**-0.5), tokens * row_bits // 8,
    )  # fmt: skip


def ours(work: Workload, *, repeats: int = REPEATS, **tuning: int) -> list[float]:
    """Seconds of one call, `SAMPLES` times; `tuning` is `span` and `tile` of the kernels."""
    call = functools.partial(attend, tiers=work.tiers, spec=work.spec, **tuning)

    @jax.jit
    def loop(q, k, v, plain, history, lengths, codes):
        def step(_, q):
            for _ in range(UNROLL):
                q = call(q, k, v, plain, history, codes=codes, **lengths)
            return q

        return jax.lax.fori_loop(0, repeats // UNROLL, step, q)

    def run(programs: int) -> float:
        start, q = time.perf_counter(), work.q
        for _ in range(programs):
            q = loop(q, *work.arrays)
        jax.block_until_ready(q)
        return time.perf_counter() - start

    run(2)
    return [(run(1 + QUEUED) - run(1)) / QUEUED / repeats for _ in range(SAMPLES)]


def baseline(shape: Shape) -> list[float]:
    """Seconds of one cuDNN attention call in PyTorch, `SAMPLES` times."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def normal(*dims):
        return torch.randn(dims, device="cuda", dtype=torch.bfloat16)

    q = normal(shape.batch, shape.q_heads, shape.q_len, shape.head_dim)
    k, v = (normal(shape.batch, shape.kv_heads, shape.context, shape.head_dim) for _ in range(2))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return _captured(call)


def read_bandwidth() -> float:
    """Bytes a second of a sum over 4 GiB."""
    import torch

    x = torch.zeros(2**30, device="cuda", dtype=torch.float32)
    return x.nbytes / statistics.median(_captured(lambda: torch.sum(x)))


def _captured(call) -> list[float]:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    samples = []
    for _ in range(SAMPLES + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3 / REPEATS)
    del graph
    torch.cuda.empty_cache()
    return samples[1:]


def row(shape: Shape, bandwidth: float) -> dict:
    """One row of the report; microseconds are medians, `spread` half the range over the median."""
    work = workload(shape)
    samples = ours(work)
    reference = baseline(shape)
    us, baseline_us = (statistics.median(x) * 1e6 for x in (samples, reference))
    tiers = work.tiers
    return {
        "batch": shape.batch, "context": shape.context, "q_heads": shape.q_heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "q_len": shape.q_len, "recipe": shape.recipe, "tiers": 3, "sink": tiers.sink,
        "recent": tiers.recent, "page": tiers.page, "us": round(us, 1),
        "spread": round((max(samples) - min(samples)) / 2 / statistics.median(samples), 4),
        "baseline": "PyTorch cuDNN attention, bfloat16", "baseline_us": round(baseline_us, 1),
        "ratio": round(baseline_us / us, 3), "packed_bytes": work.packed_bytes,
        "bandwidth_share": round(work.packed_bytes / us * 1e6 / bandwidth, 4),
    }  # fmt: skip


def report(shapes=SHAPES) -> dict:
    """Device, versions, measured read bandwidth and a row a shape."""
    import torch

    bandwidth = read_bandwidth()
    rows = []
    for shape in shapes:
        rows.append(row(shape, bandwidth))
        print(_line(rows[-1]), flush=True)
    return {
        "command": "python -m pallas_kernels.attention.benchmark",
        "device": torch.cuda.get_device_name(0),
        "versions": {"jax": jax.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "read_bandwidth": round(bandwidth),
        "rows": rows,
    }


def _line(row: dict) -> str:
    return (
        f"{row['batch']:3} x {row['context']:6}  {row['q_heads']:2}/{row['kv_heads']} D{row['head_dim']} "
        f"T{row['q_len']}  {row['us']:7.1f} us (cuDNN {row['baseline_us']:7.1f}, {row['ratio']:.2f}x), "
        f"{row['bandwidth_share']:.0%} of read bandwidth"
    )


def tune(shapes, tiles: list[int]) -> None:
    """Prints microseconds of our calls alone, with tiles of other sizes and spans around those that would be taken."""
    for shape in shapes:
        work = workload(shape)
        for tile in tiles:
            times = {}
            for span in [None, *(BUCKET // tile // n for n in (1, 2, 4, 8))]:
                tuning = {"tile": tile} if span is None else {"tile": tile, "span": span}
                times[span] = round(statistics.median(ours(work, **tuning)) * 1e6, 1)
            print(dataclasses.astuple(shape), f"tile {tile}, us by span:", times, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the report")
    parser.add_argument("--first", type=int, default=len(SHAPES), help="time the first so many shapes only")
    parser.add_argument("--tiles", help="time ours alone, with tiles of these sizes, separated by commas")
    options = parser.parse_args()
    if options.tiles:
        tune(SHAPES[: options.first], [int(tile) for tile in options.tiles.split(",")])
        return
    result = report(SHAPES[: options.first])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
