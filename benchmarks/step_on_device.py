"""Whole decode steps of the engine at Qwen3-8B shapes with random weights: the 2-bit cache beside a BF16 one.

`python benchmarks/step_on_device.py --out benchmarks/results/h200-step.json` on one GPU; `--tensor 2` on two compares
one with two instead, the 2-bit cache alone. XLA launches their collectives one by one unless XLA_FLAGS has
--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,COLLECTIVES.
`--cases`, `--arms` and `--memory 0` choose parts of it; `--model tiny --cases 2x256 --memory 0 --baseline xla` tries
it on any device.

Both caches run in the same `Engine`, scheduler, sampling and host included, with the same decoder. Prompts are not
computed: what a cache holds does not change how long a step takes. The BF16 engine's plain tier holds the whole
context: pages, read by the paged attention that jax brings (`--baseline paged`), or one piece a sequence, read by cuDNN
(`--baseline cudnn`). The larger of both is what the 2-bit cache has to be compared with.

The engine starts a step's decode call before it reads the tokens of the step before: `waited_ms` is what it then still
waits for tokens, the rest of `step_ms` is the host's work, which the device does not wait for as long as it is less.

`--unroll` compiles every layer by itself in both engines. Compiled for an H200 without one (jax 0.10.2, 4 layers,
16 x 16K, no autotuning), the loop copies every weight of a layer before its product (104 MB of temporary memory); with
`--unroll` only those of q, k and v, and with XLA_FLAGS=--xla_gpu_dot_merger_threshold_mb=0 too, which keeps these three
products apart, none. In both cases the cache is updated in place.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax import sharding, step
from oscar_jax.cache import KVCache, append
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.engine import Engine, Request, Shapes, executor, sizes
from oscar_jax.models import tiny_config
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder, parameter_shapes
from pallas_kernels.attention import PlainTiers
from pallas_kernels.rope import Rotary
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes

BUCKET = 2048
PAGE = 128
PLAIN_PAGE, PLAIN_PAGES = 32, 4  # tokens of a BF16 page, and pages that jax's kernel computes on at a time
PROGRAMS = 2048  # of that kernel in a launch, about, as long as there is enough to read
WARM, STEPS = 4, 32  # steps before, and timed
HEADROOM = 4 * 2**30  # bytes for logits, workspaces and fragmentation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--model", choices=["qwen3-8b", "tiny"], default="qwen3-8b")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["1x65536", "16x32768"])
    parser.add_argument("--full", type=int, default=16384, help="context of the largest batch")
    parser.add_argument("--memory", type=float, default=120, help="GB that it may take; 0 leaves it out")
    parser.add_argument("--baseline", choices=["paged", "cudnn", "xla"], default="paged")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=["int2", "bf16"])
    parser.add_argument("--unroll", action="store_true", help="every layer compiled by itself, in all arms")
    parser.add_argument("--tensor", type=int, default=1, help="2 compares two GPUs with one at 64x16384")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")  # jax takes three quarters otherwise
    config = model_config(args.model)
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]), "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "model": f"{args.model} shapes, random weights",
        "baseline": args.baseline, "unroll": args.unroll, "steps": STEPS, "rows": [],
    }  # fmt: skip

    def measure(arm: str, batch: int, context: int, mesh=None) -> None:
        row = step_row(config, arm, batch, context, baseline=args.baseline, unroll=args.unroll, mesh=mesh)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()

    if args.tensor > 1:
        cases = ["64x16384"] if args.cases == ["1x65536", "16x32768"] else args.cases
        for batch, context in (map(int, case.split("x")) for case in cases):
            for tensor in (1, args.tensor):
                measure("int2", batch, context, sharding.make_mesh(tensor=tensor))
        return
    for batch, context in (map(int, case.split("x")) for case in args.cases):
        for arm in args.arms:
            measure(arm, batch, context)
    if args.memory:
        for arm in args.arms:
            measure(arm, largest_batch(config, arm, args.full, args.memory * 1e9), args.full)


def model_config(name: str) -> ModelConfig:
    if name == "tiny":
        return tiny_config(architecture="qwen3", head_dim=64, max_position=1024)
    return ModelConfig(
        architecture="qwen3", vocab_size=151936, layers=36, hidden_size=4096, mlp_size=12288, q_heads=32, kv_heads=8,
        head_dim=128, norm_eps=1e-6, rotary=Rotary.standard(128, 1e6), max_position=131072, qk_norm=True,
    )  # fmt: skip


def random_weights(config: ModelConfig, mesh) -> Decoder:
    """Made on the device, since billions of numbers take minutes on the host."""
    weights = {}
    for index, (name, kind) in enumerate(parameter_shapes(config).items()):
        shape = (config.layers, *kind.shape) if name.startswith("layers.") else kind.shape
        place = None if mesh is None else sharding.named(mesh, sharding.weight_spec(name, config, mesh))
        scale = kind.shape[0] ** -0.5 if kind.matrix else 0.0 if name.endswith("norm") else 1.0

        def draw(key, shape=shape, scale=scale) -> jax.Array:
            if not scale:
                return jnp.ones(shape, jnp.bfloat16)
            return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)

        weights[name] = jax.jit(draw, out_shardings=place)(jax.random.key(index))
    return Decoder(config, weights)


def random_codes(config: ModelConfig) -> TransformCodes:
    """Codes of the default recipe's form with random rotations, the same ones in every layer."""
    rng = np.random.default_rng(0)
    dim, lead = config.head_dim, (config.layers, config.kv_heads)

    def side() -> TransformCode:
        rotation = np.linalg.qr(rng.normal(size=(config.kv_heads, dim, dim)))[0]
        rotation = np.broadcast_to(rotation, (*lead, dim, dim))
        ones = np.ones((*lead, dim))
        return TransformCode.build(
            mu=0 * ones, encode=rotation, inverse=np.swapaxes(rotation, -1, -2), bits=(2 * ones).astype(np.int8),
            delta=ones, weight=ones,
        )  # fmt: skip

    return TransformCodes(side(), side(), config.rotary, BUCKET)


def longest(context: int) -> int:
    return -(-(context + WARM + STEPS + 2) // PAGE) * PAGE


def cache_of(config: ModelConfig, arm: str, batch: int, context: int, mesh=None) -> CacheConfig:
    tiers = Tiers() if arm == "int2" else Tiers(sink=0, recent=longest(context))
    return step.cache_config(
        config, max_length=longest(context), batch=batch, tiers=tiers, plain_dtype="bfloat16", step_tokens=3, mesh=mesh
    )


def largest_batch(config: ModelConfig, arm: str, context: int, memory: float) -> int:
    """Sequences of a context whose caches and the weights fit into so many bytes."""
    codes = random_codes(config) if arm == "int2" else None
    cache = cache_of(config, arm, 1, context)
    each = sizes.row_bytes(cache, codes) + cache.sequence_pages * sizes.page_bytes(cache, codes)
    weights = 2 * sum(
        int(np.prod(kind.shape)) * (config.layers if name.startswith("layers.") else 1)
        for name, kind in parameter_shapes(config).items()
    )
    return int((memory - weights - HEADROOM) // each)


def step_row(
    config: ModelConfig, arm: str, batch: int, context: int, *, baseline: str, unroll: bool, mesh=None
) -> dict[str, Any]:
    """Seconds of an engine's steps with `batch` sequences of `context` tokens."""
    decoder = random_weights(config, mesh)
    cache = cache_of(config, arm, batch, context, mesh)
    with baseline_cache(baseline, arm), baseline_attention(baseline, arm):
        engine = Engine(
            decoder, random_codes(config) if arm == "int2" else None, max_length=cache.max_length, tiers=cache.tiers,
            plain_dtype="bfloat16", shapes=Shapes(batch, (batch,), (batch,), (context,)), tails=0, tail_every=2**40,
            unroll_layers=unroll, mesh=mesh,
        )  # fmt: skip
        device = engine._executor
        start = device.start
        device.start = lambda call: lambda: [[1] * row.draws for row in call.rows]  # prompts cost nothing
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, context - 1).tolist()
        for _ in range(batch):
            engine.submit(Request(prompt, max_tokens=WARM + STEPS + 1))
        engine.step()
        waited: list[float] = []

        def timed(call):
            read = start(call)

            def drawn():
                begin = time.perf_counter()
                chosen = read()
                waited.append(time.perf_counter() - begin)
                return chosen

            return drawn

        device.start = timed
        seconds = []
        for _ in range(WARM + STEPS):
            begin = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - begin)
            assert len(outputs) == batch
    each = statistics.median(seconds[WARM:])
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "arm": arm, "batch": batch, "context": context, "devices": 1 if mesh is None else mesh.size,
        "tokens_per_second": round(batch / each, 1),
        "step_ms": round(1e3 * each, 3), "waited_ms": round(1e3 * statistics.median(waited[WARM:]), 3),
        "fastest_ms": round(1e3 * min(seconds[WARM:]), 3),
        "cache_gb": round(engine.stats().device_bytes / 1e9, 3),
        "weights_gb": round(sum(x.nbytes for x in jax.tree.leaves(decoder)) / 1e9, 3),
        "peak_gb": round(stats.get("peak_bytes_in_use", 0) / 1e9, 3),
        "compile_s": round(sum(seconds[:WARM]), 1),
    }  # fmt: skip


def baseline_cache(baseline: str, arm: str):
    """Replaces `init_cache` of a paged BF16 engine: K and V are pages `[K, L pages, page, D]` of all layers."""
    if arm == "int2" or baseline != "paged":
        return contextlib.nullcontext()

    def init(config: CacheConfig, codes: None) -> KVCache:
        del codes
        pages = config.batch * config.max_length // PLAIN_PAGE
        nothing = (config.layers, config.batch, 0, config.kv_heads, config.head_dim)
        shape = (config.kv_heads, config.layers * pages, PLAIN_PAGE, config.head_dim)
        sides = [jnp.zeros(size, jnp.bfloat16) for size in (nothing, nothing, shape, shape)]
        return KVCache(
            PlainTiers(*sides), None, jnp.zeros((config.batch, 0), jnp.int32),
            jnp.zeros(config.batch, jnp.int32),
        )  # fmt: skip

    return mock.patch.object(step, "init_cache", init)


def baseline_attention(baseline: str, arm: str):
    """Replaces `begin_step` in a BF16 engine: the new token is stored first, then read with the others."""
    if arm == "int2":
        return contextlib.nullcontext()
    attend = {"paged": paged_attend, "cudnn": partial(whole_attend, "cudnn"), "xla": partial(whole_attend, "xla")}

    def begin(cache: KVCache, config: CacheConfig, codes: None, counts: jax.Array, *, tokens: int):
        del codes
        assert tokens == 1
        return cache, partial(attend[baseline], config, counts)

    return mock.patch.object(executor, "begin_step", begin)


def whole_attend(name: Any, config: CacheConfig, counts: jax.Array, cache: KVCache, layer: jax.Array, q, k, v):
    """One piece a sequence: position p lies at place p of the ring, which holds the whole context."""
    cache = append(cache, k, v, layer=layer, counts=counts, tiers=config.tiers)
    keys, values = (loaded(x[layer]) for x in (cache.plain.recent_k, cache.plain.recent_v))
    out = jax.nn.dot_product_attention(
        q, keys, values, scale=config.attention.scale, key_value_seq_lengths=cache.lengths + 1,
        query_seq_lengths=jnp.ones_like(cache.lengths), implementation=name,
    )  # fmt: skip
    return out, cache, None


def paged_attend(config: CacheConfig, counts: jax.Array, cache: KVCache, layer: jax.Array, q, k, v):
    """Sequence b owns pages `b n .. (b + 1) n - 1` of every layer."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    del counts
    each = config.max_length // PLAIN_PAGE
    rows = jnp.arange(config.batch)
    first = layer * config.batch * each + rows * each
    pages, places = first + cache.lengths // PLAIN_PAGE, cache.lengths % PLAIN_PAGE

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[:, pages, places].set(new[:, 0].swapaxes(0, 1))

    plain = cache.plain
    plain = dataclasses.replace(plain, recent_k=put(plain.recent_k, k), recent_v=put(plain.recent_v, v))
    splits = 1 << max(0, min(PROGRAMS // (config.batch * config.kv_heads), 64).bit_length() - 1)
    padded = splits * PLAIN_PAGES * -(-each // (splits * PLAIN_PAGES))  # what is past the length is masked
    table = first[:, None] + jnp.minimum(jnp.arange(padded), each - 1)
    out = paged_attention(
        q[:, 0] * jnp.asarray(config.attention.scale, q.dtype), plain.recent_k, plain.recent_v, table,
        cache.lengths + 1, pages_per_compute_block=PLAIN_PAGES, k_splits=splits,
    )  # fmt: skip
    return out[:, None], dataclasses.replace(cache, plain=plain), None


if __name__ == "__main__":
    main()
