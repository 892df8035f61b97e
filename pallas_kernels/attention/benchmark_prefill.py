"""Prefill attention against PyTorch's cuDNN and FlashAttention over a contiguous bfloat16 cache, on one GPU.

`python -m pallas_kernels.attention.benchmark_prefill --json rows.json` times the shapes of `SHAPES`, whose `q_len` is
the length of the chunk. Ours is one call, from queries to outputs, in a loop compiled as one program. PyTorch's is two
calls where there is a prefix, one without a mask over it and a causal one over the chunk: no causal mask of PyTorch
puts the queries at the end of longer keys for both. Its merge of the two is left out. `--blocks` tries other shapes of
a program, `--xla` times the implementation in plain XLA as well.
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

from pallas_kernels.attention import triton_prefill, xla
from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.attention.benchmark import SAMPLES, Shape, Workload, _captured, workload
from pallas_kernels.attention.triton_prefill import Block

REPEATS = 5
SHAPES = (
    Shape(1, 65536, q_len=4096),
    Shape(1, 4096, q_len=4096),
    Shape(1, 65536, q_len=512),
    Shape(4, 16384, q_len=2048),
    Shape(1, 65536, q_len=4096, recipe="oscar-reference"),
    Shape(1, 65536, 28, 4, q_len=4096),
    Shape(1, 65536, 14, 2, 64, q_len=4096),
)
BLOCKS = (
    Block(64, 64, 4),
    Block(64, 64, 4, 3),
    Block(64, 32, 4),
    Block(64, 128, 4),
    Block(128, 64, 8),
    Block(128, 128, 8),
    Block(128, 64, 4),
)


def prefill_workload(shape: Shape) -> Workload:
    """As `workload`, with the ring of a cache whose decode steps bring one token."""
    work = workload(shape)
    k, v, plain, *rest = work.arrays
    ring = work.tiers.ring(1)
    plain = PlainTiers(plain.sink_k, plain.sink_v, plain.recent_k[:, :, :ring], plain.recent_v[:, :, :ring])
    return dataclasses.replace(work, arrays=(k, v, plain, *rest))


def operations(shape: Shape) -> int:
    """Floating-point operations of the two products over all visible keys, transforms left aside."""
    keys = shape.q_len * (shape.context - shape.q_len) + shape.q_len * (shape.q_len + 1) // 2
    return 4 * shape.batch * shape.q_heads * shape.head_dim * keys


def ours(work: Workload, attend=triton_prefill.attend, *, repeats: int = REPEATS) -> list[float]:
    """Seconds of one call, `SAMPLES` times."""

    @jax.jit
    def loop(q, k, v, plain, history, lengths, codes):
        def step(_, q):
            return attend(q, k, v, plain, history, codes=codes, tiers=work.tiers, spec=work.spec, **lengths)

        return jax.lax.fori_loop(0, repeats, step, q)

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(work.q, *work.arrays))
        return (time.perf_counter() - start) / repeats

    run()
    return [run() for _ in range(SAMPLES)]


def baseline(shape: Shape, backend: str) -> list[float]:
    """Seconds of one chunk by PyTorch's `backend`, a name of `SDPBackend`, `SAMPLES` times."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def normal(heads, tokens):
        return torch.randn((shape.batch, heads, tokens, shape.head_dim), device="cuda", dtype=torch.bfloat16)

    prefix = shape.context - shape.q_len
    q = normal(shape.q_heads, shape.q_len)
    k, v = (normal(shape.kv_heads, shape.q_len) for _ in range(2))
    past = [normal(shape.kv_heads, prefix) for _ in range(2)] if prefix else None

    def attend(k, v, *, is_causal: bool):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def call():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            if past is not None:
                attend(*past, is_causal=False)
            return attend(k, v, is_causal=True)

    return _captured(call)


def row(shape: Shape, *, with_xla: bool = False) -> dict:
    """One row of the report; microseconds are medians, `spread` half the range over the median."""
    work = prefill_workload(shape)
    samples = ours(work)
    us = statistics.median(samples) * 1e6
    result = {
        "batch": shape.batch, "context": shape.context, "q_heads": shape.q_heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "q_len": shape.q_len, "recipe": shape.recipe, "tiers": 3,
        "sink": work.tiers.sink, "recent": work.tiers.recent, "page": work.tiers.page, "us": round(us, 1),
        "spread": round((max(samples) - min(samples)) / 2 / statistics.median(samples), 4),
        "teraflops": round(operations(shape) / us / 1e6, 1),
    }  # fmt: skip
    if with_xla:
        result["xla_us"] = round(statistics.median(ours(work, xla.attend, repeats=1)) * 1e6, 1)
    for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION")):
        result[f"{name}_us"] = round(statistics.median(baseline(shape, backend)) * 1e6, 1)
    result["baseline"] = "PyTorch cuDNN or FlashAttention, bfloat16, the faster one"
    result["baseline_us"] = min(result["cudnn_us"], result["flash_us"])
    result["ratio"] = round(result["baseline_us"] / us, 3)
    return result


def report(shapes=SHAPES, *, with_xla: bool = False) -> dict:
    """Device, versions and a row a shape."""
    import torch

    rows = []
    for shape in shapes:
        rows.append(row(shape, with_xla=with_xla))
        print(json.dumps(rows[-1]), flush=True)
    return {
        "command": "python -m pallas_kernels.attention.benchmark_prefill",
        "device": torch.cuda.get_device_name(0),
        "versions": {"jax": jax.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "rows": rows,
    }


def try_blocks(shape: Shape, blocks=BLOCKS) -> None:
    """Prints the time of a call for each block."""
    work = prefill_workload(shape)
    for block in blocks:
        us = statistics.median(ours(work, functools.partial(triton_prefill.attend, block=block))) * 1e6
        print(f"{block}: {us:.1f} us, {operations(shape) / us / 1e6:.0f} TFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the report")
    parser.add_argument("--first", type=int, default=len(SHAPES), help="time the first so many shapes only")
    parser.add_argument("--xla", action="store_true", help="time plain XLA as well")
    parser.add_argument("--blocks", action="store_true", help="time the first shape with every block instead")
    options = parser.parse_args()
    if options.blocks:
        try_blocks(SHAPES[0])
        return
    result = report(SHAPES[: options.first], with_xla=options.xla)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
